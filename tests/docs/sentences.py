"""First sentences, held to the rule of the house as far as a machine can.

The first sentence of a docstring, a help text, a message or a paragraph names its object before any pronoun, and has at
most 25 words.  That it names a type and has a verb in the present tense is for people to see.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

WORDS_MOST = 25
PRONOUNS = {"it", "they", "he", "she", "its", "their", "theirs", "his", "her", "him", "them"}
POINTING = {"this", "that", "these", "those"}
"""Pronouns unless a noun follows: `this node` names something, `those that wait` does not."""
FOLLOWS = re.compile(
    r"is|are|was|were|has|have|had|does|did|do|will|would|can|could|may|might|must|"
    r"should|that|which|who|whose|whom|what|of|in|on|at|for|from|to|with|by|and|or|not|"
    r"never|only|always|both|all|also|says|tells|means|makes|takes|gives|goes|comes|holds|"
    r"keeps|leaves|as|if|when|while|where"
)
RAISES = re.compile(r"(?:Error|Failure|Problem|Rejected|Refused|Declined)$")
MANUAL = ("index.md", "tutorials", "how-to", "reference", "explanation")
NOT_PROSE = (
    re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL),
    re.compile(r"^<!-- generated.*?^<!-- end -->", re.MULTILINE | re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^(?:    |\t).*$", re.MULTILINE),
)


def first_sentence(text: str) -> str:
    """The words up to a full stop, a question mark or an exclamation mark, or to the end of the paragraph."""
    paragraph = re.split(r"\n\s*\n|\n\s*[-*|] |\n\s*\d+\. ", text.strip())[0]
    words: list[str] = []
    for word in paragraph.split():
        words.append(word)
        if re.search(r"[.?!][)\"'`*\]]*$", word) and not re.search(r"\b(?:e\.g|i\.e|al|vs|cf)\.$|\.\.\.$", word):
            break
    return " ".join(words)


def mistakes(text: str) -> Iterator[str]:
    """What is wrong with the first sentence of a text."""
    words = re.sub(r"\]\([^)]*\)", "]", first_sentence(text)).split()
    first, second, *_ = *(re.sub(r"[^\w']", "", word).lower() for word in words[:2]), "", ""
    if first in PRONOUNS or (first in POINTING and FOLLOWS.fullmatch(second)):
        yield f"begins with a pronoun: {' '.join(words)}"
    if len(words) > WORDS_MOST:
        yield f"has {len(words)} words, {WORDS_MOST} at most: {' '.join(words)}"


def docstrings(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Docstrings of a module and of its public parts, each with its line."""
    if isinstance(tree, ast.Module):
        yield 1, ast.get_docstring(tree) or ""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node.lineno, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                yield from docstrings(node)


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The first clauses of texts that are given to errors, each with its line: many stand behind a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and RAISES.search(getattr(node.func, "id", getattr(node.func, "attr", ""))):
            for argument in node.args:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                texts = [each.value if isinstance(each, ast.Constant) else "X" for each in parts]
                if texts != ["X"] and all(isinstance(text, str) for text in texts):
                    yield argument.lineno, "X " + re.split(r"[:;] ", "".join(map(str, texts)))[0]


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """Paragraphs of a page, each with its line: no headings, tables, lists or code, and nothing that is generated."""
    text = page.read_text(encoding="utf-8")
    for pattern in NOT_PROSE:
        text = pattern.sub(lambda found: "\n" * found[0].count("\n"), text)
    line = 1
    for block in re.split(r"(\n\s*\n)", text):
        stripped = block.strip()
        if stripped and not re.match(r"#|\||[-*] |\d+\. |!\[|>", stripped):
            yield line, stripped
        line += block.count("\n")


def pages(docs: Path) -> Iterator[Path]:
    """The pages of the manual: records of decisions and of experiments are as they were written."""
    for name in MANUAL:
        yield from sorted((docs / name).rglob("*.md")) if (docs / name).is_dir() else [docs / name]
