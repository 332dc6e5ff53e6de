"""The program that a command runs, as a short name: the kind of a job to which nobody gave a name.

A name is at most 32 characters of `PATH#WORDS@TREE`: the script or module behind interpreters and launchers, a digest
of its arguments, and one of the shipped folder.  Arguments that are numbers never count: a sweep is of one kind.  Who
edits a script changes the last part alone, and who names another model the middle one, so that each level that is cut
off (`levels`) joins more jobs.
"""

import hashlib
import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from posixpath import basename, join, normpath

PROGRAM_LENGTH = 32
PATH_LENGTH = 18
WORDS_DIGITS, TREE_DIGITS, CUT_DIGITS = 4, 8, 6
PROGRAMS_KEPT = 4_096
NESTED_MOST = 4
"""Shells within shells that are looked into."""

_INTERPRETER = re.compile(r"(python|pypy|ipython)[\d.]*w?|(ba|da|z|k|fi)?sh|perl|ruby|node|Rscript|julia|java")
_SHELL = re.compile(r"(ba|da|z|k|fi)?sh")
_LAUNCHER = re.compile(
    "accelerate|conda|coverage|deepspeed|env|exec|horovodrun|ionice|launch|mamba|mpiexec|mpirun|nice|nohup|nsys|numactl|"
    "pipenv|poetry|profile|run|setsid|srun|stdbuf|sudo|taskset|time|timeout|torchrun|uv|xvfb-run"
)
_LAUNCHER_MODULE = re.compile(
    r"accelerate(\.commands\.launch)?|cProfile|coverage|deepspeed|pdb|torch\.distributed\.(launch|run)"
)
_MODULE_TAKER = re.compile("accelerate|coverage|launch|run|torchrun")
_SETTER = re.compile(
    r"\.|:|cd|echo|eval|exit|export|for|mkdir|module|pushd|set|source|test|true|ulimit|umask|unset|while"
)
_SCRIPT = re.compile(r".*\.(py|pyc|pyz|zip|ipynb|sh|bash|R|jl|rb|pl|js|jar)")
_NUMBER = re.compile(r"[-+]?\.?\d.*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_BETWEEN = frozenset(("&&", "||", ";", "|", "&", "(", ")", "{", "}", "then", "do", "if", "else"))


@lru_cache(maxsize=PROGRAMS_KEPT)
def program_of(command: tuple[str, ...], tree: str = "", workdir: str = "") -> str:
    """The name of what the command runs; empty for an empty command."""
    path, rest = _found(command, NESTED_MOST)
    if not path:
        return ""
    is_file = "/" in path or _SCRIPT.fullmatch(path)
    told = _told(normpath(join(workdir, path)) if is_file else path)
    words = [each for word in rest if (each := _without_number(word))]
    if words:
        told += "#" + _digest("\0".join(words), WORDS_DIGITS)
    return f"{told}@{_digest(tree, TREE_DIGITS)}" if tree else told


def levels(program: str) -> tuple[str, ...]:
    """The program; the same from any folder that was shipped; the same with any arguments.  Each once."""
    anywhere = program.rpartition("@")[0] or program
    return tuple(dict.fromkeys((program, anywhere, anywhere.partition("#")[0]))) if program else ()


def _found(words: Sequence[str], depth: int) -> tuple[str, Sequence[str]]:
    """Script, module or program, and the words behind it."""
    at = 0
    while at < len(words) and _ASSIGNMENT.fullmatch(words[at]):
        at += 1
    if at == len(words):
        return (words[0].partition("=")[0], ()) if words else ("", ())
    first = basename(words[at])
    if not (_INTERPRETER.fullmatch(first) or _LAUNCHER.fullmatch(first)):
        return words[at], words[at + 1 :]
    guess = 0
    for number in range(at + 1, len(words)):
        word, before, rest = words[number], words[number - 1], words[number + 1 :]
        if before == "-m" and (_INTERPRETER.fullmatch(first) or _MODULE_TAKER.fullmatch(first)):
            if _LAUNCHER_MODULE.fullmatch(word):
                first = "torchrun"
                continue
            return word, rest
        if _is_inline(before, first):
            return _inline(word, first, depth, rest)
        if word.startswith("-") or _NUMBER.fullmatch(word) or _ASSIGNMENT.fullmatch(word):
            continue
        name = basename(word)
        if _INTERPRETER.fullmatch(name) or _LAUNCHER.fullmatch(name):
            first, guess = name, 0
        elif _SCRIPT.fullmatch(name):
            return word, rest
        guess = guess or (number if name != first else 0)
    return (words[guess], words[guess + 1 :]) if guess else (words[at], words[at + 1 :])


def _is_inline(option: str, interpreter: str) -> bool:
    """Whether the next word is code: behind `-c`, `-e`, and of shells `-lc` and the like."""
    if _SHELL.fullmatch(interpreter):
        return re.fullmatch(r"-[a-z]*c", option) is not None
    return option in ("-c", "-e") and _INTERPRETER.fullmatch(interpreter) is not None


def _inline(code: str, interpreter: str, depth: int, rest: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Of a line for a shell the first command that does something; of other code its digest, without its numbers."""
    digest = f"{interpreter} -c {_digest(re.sub(r'[0-9]+', '0', code), CUT_DIGITS)}"
    if not _SHELL.fullmatch(interpreter) or not depth:
        return digest, rest
    try:
        lexer = shlex.shlex(code.replace("\n", " ; "), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words = list(lexer)
    except ValueError:
        return digest, rest
    commands: list[list[str]] = [[]]
    for word in words:
        if word in _BETWEEN or not word.strip(";&|()<>"):
            commands.append([])
        else:
            commands[-1].append(word)
    for command in commands:
        path, more = _found(command, depth - 1)
        if path and not _SETTER.fullmatch(path):
            return path, more
    return digest, rest


def _without_number(word: str) -> str:
    """The word, or what names a number in it; empty for a number."""
    name, is_set, value = word.partition("=")
    if is_set and _NUMBER.fullmatch(value):
        return name + "="
    return "" if _NUMBER.fullmatch(word) else word


def _told(path: str) -> str:
    """The path if it is short and plain, else its end with a digest of the whole."""
    plain = "".join(each if each.isascii() and each.isprintable() and each not in "@#~" else "_" for each in path)
    if plain == path and len(path) <= PATH_LENGTH:
        return path
    return f"{plain[CUT_DIGITS + 1 - PATH_LENGTH :]}~{_digest(path, CUT_DIGITS)}"


def _digest(text: str, digits: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:digits]
