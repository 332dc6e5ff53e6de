"""A command's options as a table, and the parser that reads a command line by it.

One table serves parsing, `--help`, and the completion scripts.  It is smaller than argparse, starts faster, names
the nearest option for a misspelt one, and leaves everything after `--` untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from swarm_client.failure import UsageError


class Option:
    """One option.  `names` holds all spellings, the first long one is its key; without `metavar` it is a flag.

    `read` turns the text into a value and raises `ValueError` with "must be ..." for a bad one.  `repeats` gathers a
    list; `once` refuses a second one, which would not be seen.  `later` refuses the option, which belongs to a later
    version; its summary is then the remedy.  `kinds` are the types of its value in a job file, where that has one.
    `alone` is the value of an option that may stand without one: the next word is its value only if it has a `=`.
    """

    __slots__ = (
        "alone", "choices", "hidden", "key", "kinds", "later", "metavar", "names", "once", "read", "repeats", "summary",
        "value",
    )  # fmt: skip

    def __init__(
        self,
        names: str,
        summary: str = "",
        metavar: str = "",
        *,
        key: str = "",
        read: Callable[[str], object] | None = None,
        choices: Sequence[str] = (),
        repeats: bool = False,
        value: object = True,
        later: bool = False,
        hidden: bool = False,
        once: bool = False,
        kinds: tuple[type, ...] = (),
        alone: str = "",
    ) -> None:
        self.names = tuple(names.split())
        long = next((name for name in self.names if name.startswith("--")), self.names[0])
        self.key = key or long.lstrip("-").replace("-", "_")
        self.summary, self.metavar, self.read = summary, metavar, read
        self.choices, self.repeats, self.value, self.later, self.hidden = tuple(choices), repeats, value, later, hidden
        self.once, self.kinds, self.alone = once, kinds, alone

    def convert(self, spelling: str, text: str) -> object:
        """The value of `text`, or a usage error that names option, value and remedy."""
        if self.choices and text not in self.choices:
            raise UsageError(f"{spelling} {text!r} is not known{nearest(text, self.choices)}", _one_of(self.choices))
        try:
            return self.read(text) if self.read else text
        except ValueError as error:
            raise UsageError(f"{spelling} {text!r}: {error}", f"{spelling} is: {self.summary}") from None


class Command:
    """One command: its words, its options, and what follows them; `name` is also its module in `swarm_client.cli`.

    `has_output` is False for one that prints nothing that -o and --format could shape: it does not take them.
    """

    __slots__ = (
        "aliases",
        "details",
        "examples",
        "has_output",
        "name",
        "options",
        "positionals",
        "summary",
        "takes_command",
    )

    def __init__(
        self,
        name: str,
        summary: str,
        options: Sequence[Option] = (),
        *,
        positionals: str = "",
        takes_command: bool = False,
        aliases: Sequence[str] = (),
        details: str = "",
        examples: Sequence[str] = (),
        has_output: bool = True,
    ) -> None:
        self.name, self.summary, self.options = name, summary, tuple(options)
        self.positionals, self.takes_command, self.has_output = positionals, takes_command, has_output
        self.aliases, self.details, self.examples = tuple(aliases), details, tuple(examples)


class Arguments:
    """What was given: `arguments["key"]` is None unless the option occurred."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.spellings: dict[str, str] = {}  # key -> option as typed, for messages
        self.positionals: list[str] = []
        self.command: list[str] = []  # what followed `--`

    def run(self, command: list[str]) -> None:
        """The job's command is this one."""
        self.command = command

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key)

    def get(self, key: str, default: Any) -> Any:
        """The option's value, or `default` when it was not given."""
        return self.values.get(key, default)


def parse(words: Sequence[str], options: Sequence[Option], *, takes_command: bool = False) -> Arguments:
    """Read a command line.  With `takes_command` the first word that is no option begins the job's command."""
    table = {name: option for option in options for name in option.names}
    arguments = Arguments()
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            arguments.command = queue
            break
        if word == "-" or not word.startswith("-"):
            arguments.positionals.append(word)
            if takes_command:
                arguments.command = [word, *queue]
                break
        elif word.startswith("--"):
            _take_long(word, queue, table, arguments)
        else:
            _take_short(word, queue, table, arguments)
    return arguments


def _take_long(word: str, queue: list[str], table: dict[str, Option], arguments: Arguments) -> None:
    name, equals, text = word.partition("=")
    option = table.get(name)
    if option is None:
        known = [each for each in table if each.startswith("--") and not (table[each].hidden or table[each].later)]
        raise UsageError(f"unknown option {name}{nearest(name, known, mark='--')}", "`--help` lists the options")
    _refuse_later(option, name)
    if option.metavar:
        _store(option, name, text if equals else _next_value(name, queue, option), arguments)
    elif equals:
        raise UsageError(f"{name} takes no value, but {text!r} was given", f"write only {name}")
    else:
        _put(option, name, option.value, arguments)


def _take_short(word: str, queue: list[str], table: dict[str, Option], arguments: Arguments) -> None:
    """Flags may be joined (`-dq`), a value may follow directly (`-g4`)."""
    rest = word[1:]
    while rest:
        name, rest = f"-{rest[0]}", rest[1:]
        option = table.get(name)
        if option is None:
            raise UsageError(f"unknown option {name}" + (f" in {word}" if word != name else ""), "`--help` lists them")
        _refuse_later(option, name)
        if not option.metavar:
            _put(option, name, option.value, arguments)
            continue
        _store(option, name, rest.removeprefix("=") or _next_value(name, queue, option), arguments)
        return


def _next_value(name: str, queue: list[str], option: Option) -> str:
    if option.alone and not (queue and "=" in queue[0] and not queue[0].startswith("-")):
        return option.alone
    if not queue or queue[0] == "--":
        raise UsageError(f"{name} needs a value", f"write {name} {option.metavar}")
    return queue.pop(0)


def _refuse_later(option: Option, spelling: str) -> None:
    if option.later:
        raise UsageError(f"{spelling} is not available in this version", option.summary or f"leave {spelling} out")


def _store(option: Option, spelling: str, text: str, arguments: Arguments) -> None:
    _put(option, spelling, option.convert(spelling, text), arguments)


def _put(option: Option, spelling: str, value: object, arguments: Arguments) -> None:
    if option.once and option.key in arguments.values:
        raise UsageError(f"{spelling} was given twice", f"give one {option.metavar}")
    arguments.spellings[option.key] = spelling
    if option.repeats:
        arguments.values.setdefault(option.key, []).append(value)
    else:
        arguments.values[option.key] = value


def nearest(word: str, choices: Sequence[str], *, mark: str = "") -> str:
    """`; did you mean X?` for a close match, else an empty string; a `mark` that all begin with makes none close."""
    import difflib  # only needed to word an error

    close = difflib.get_close_matches(word.removeprefix(mark), [each.removeprefix(mark) for each in choices], n=1)
    return f"; did you mean {mark}{close[0]}?" if close else ""


def _one_of(choices: Sequence[str]) -> str:
    return f"one of {', '.join(choices)}"


JOB_HELP = "JOB is an id or its beginning, a name (the newest live job of that name) or @last (your newest job)."


def help_text(command: Command, common: Sequence[Option]) -> str:
    """What `swarm COMMAND --help` prints."""
    usage = " ".join(filter(None, ["swarm", command.name, "[OPTIONS]", command.positionals]))
    lines = [f"Usage: {usage}", "", command.summary]
    if command.aliases:
        lines += ["", f"Alias: {', '.join(command.aliases)}"]
    if command.details:
        lines += ["", command.details]
    if "JOB" in command.positionals:
        lines += ["", JOB_HELP]
    if command.examples:
        lines += ["", "Examples:", *(f"  {example}" for example in command.examples)]
    for title, options in (("Options", command.options), ("Common options", common)):
        rows = [(_spellings(option), option.summary) for option in options if not option.hidden and not option.later]
        if rows:
            lines += ["", f"{title}:", *_columns(rows)]
    return "\n".join(lines) + "\n"


def _spellings(option: Option) -> str:
    short = [name for name in option.names if not name.startswith("--")]
    long = [name for name in option.names if name.startswith("--")]
    return ", ".join(short + long) + (f" {option.metavar}" if option.metavar else "")


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = min(34, max(len(left) for left, _ in rows))
    lines = []
    for left, right in rows:
        if len(left) > width:
            lines += [f"  {left}", f"  {'':{width}}  {right}"]
        else:
            lines.append(f"  {left:{width}}  {right}")
    return lines
