"""`swarm completion`: scripts for bash, zsh and fish, made from the same tables that parse the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from swarm_client.cli import ALIASES, COMMANDS, COMMON, common_options, load_command
from swarm_client.cli.config import KEYS
from swarm_client.cli.ps import END_REASONS, STATES
from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command, Option, nearest
from swarm_client.session import Session, one_positional
from swarmsched.specification import FIELDS

SHELLS = ("bash", "zsh", "fish")
COMMAND = Command(
    "completion",
    "Print a completion script.",
    positionals="bash | zsh | fish",
    details=(
        "bash: source <(swarm completion bash)   zsh: source <(swarm completion zsh)\n"
        "fish: swarm completion fish | source"
    ),
    has_output=False,
)
TAKES_JOBS = (
    "status",
    "why",
    "logs",
    "attach",
    "cancel",
    "scale",
    "migrate",
    "recover",
    "wait",
    "describe",
    "inspect",
    "stop",
)
TAKES_NODES = ("nodes", "drain", "forget")
TAKES_FILES = ("run", "submit", "simulate", "checkpoint")
FILE_VALUES = ("FILE", "PATH", "PATTERN", "DIR|FILE")
EVENT_KINDS = (
    "aggregation",
    "api",
    "claim",
    "hold",
    "holder",
    "job",
    "member",
    "model",
    "negotiation",
    "node",
    "peer",
    "plan",
    "setting",
    "task",
)
"""Beginnings of kinds of events, which `events --kind` takes as well as whole ones."""
JOBS = "$(swarm ps --format '{{.handle}} {{.name}}' 2>/dev/null)"
NODES = "$(swarm nodes -q 2>/dev/null)"
LOCAL_NODES = '$(swarm local status ${name:+--name "$name"} -q 2>/dev/null)'
SET_KEYS = "$(swarm config view -q 2>/dev/null)"
CONTEXTS = r"$(swarm config view -q 2>/dev/null | sed -n 's/^contexts\.//p')"
FISH_CONTEXTS = "(swarm config view -q 2>/dev/null | string replace -rf '^contexts\\.' '')"
MOVES = ("migrate:--to", "migrate:--off")
VALUES = (
    ("*:-o|*:--output", "table wide json jsonl yaml name"),
    ("ps:--state|queue:--state", " ".join((*STATES, *END_REASONS))),
    ("events:--job", f"{JOBS} @last"),
    ("events:--kind", " ".join(EVENT_KINDS)),
    ("|".join((*(f"*:{row.option}" for row in FIELDS if row.kind == "nodes" and row.option), *MOVES)), NODES),
    ("*:--context", CONTEXTS),
)
"""Of options that take a value: what there is to choose from."""
WORDS = {
    "local": "up down status stop start",
    "simulate": "faults replay generate import",
    "config": "view set unset",
    "completion": "bash zsh fish",
}
PLACES = (
    ("local:stop|local:start", LOCAL_NODES),
    ("config:unset", SET_KEYS),
    *((f"{name}:", words) for name, words in WORDS.items()),
    ("|".join(f"{name}:*" for name in TAKES_NODES), NODES),
    ("|".join(f"{name}:*" for name in TAKES_JOBS), f"{JOBS} @last"),
)
"""Of words that are no options, by command and the first of these: what there is to choose from."""


def execute(session: Session, arguments: Arguments) -> int:
    """Write the script of one shell to standard output."""
    shell = one_positional(arguments, "shell")
    if shell not in SHELLS:
        raise UsageError(f"shell {shell!r} is not known{nearest(shell, SHELLS)}", f"one of {', '.join(SHELLS)}")
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[shell]())
    return OK


def _commands() -> Iterator[tuple[str, str, Sequence[Option]]]:
    for name, summary in COMMANDS.items():
        yield name, summary, _options(name)
    for alias, name in ALIASES.items():
        yield alias, COMMANDS[name], _options(name)


def _options(name: str) -> list[Option]:
    command = load_command(name)
    return [each for each in (*command.options, *common_options(command)) if not each.hidden and not each.later]


def bash() -> str:
    """Completes commands, options, their choices and values, and live jobs."""
    cases, chosen, valued, files = [f'        "") words="{_spelt(COMMON)}" ;;'], [], [_patterns("", COMMON)], []
    for name, _, options in _commands():
        cases.append(f'        {name}) words="{_spelt(options)}" ;;')
        for option in (each for each in options if each.metavar or each.choices):
            chosen += [(_patterns(name, [option]), " ".join(option.choices))] if option.choices else []
            files += [_patterns(name, [option])] if option.metavar in FILE_VALUES else []
        valued.append(_patterns(name, options))
    commands = " ".join([*COMMANDS, *ALIASES, "help"])
    places = (*PLACES, ("config:set", " ".join(KEYS)), ("help:*", commands))
    return _BASH.format(
        commands=commands,
        options="\n".join(cases),
        valued="|".join(valued),
        values=_cases((*VALUES, *chosen)),
        files="|".join(files),
        places=_cases(places),
        takes_files="|".join(f"{name}:*" for name in TAKES_FILES),
    )


def _spelt(options: Sequence[Option]) -> str:
    return " ".join(spelling for option in options for spelling in option.names)


def _patterns(command: str, options: Sequence[Option]) -> str:
    """Of options with a value."""
    return "|".join(f"{command}:{name}" for each in options if each.metavar for name in each.names)


def _cases(choices: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f'        {pattern}) words="{words}" ;;' for pattern, words in choices)


def zsh() -> str:
    """The bash functions through zsh's own bridge."""
    return "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n" + bash()


def fish() -> str:
    """One `complete` line for each command and option."""
    lines = ["complete -c swarm -f"]
    lines += [f"complete -c swarm -n __fish_use_subcommand {_fish_option(option)}" for option in COMMON]
    for name, summary, options in _commands():
        lines.append(f"complete -c swarm -n __fish_use_subcommand -a {name} -d {_quoted(summary)}")
        seen = _fish_seen(name)
        lines += [f"{seen} {_fish_option(option)}" for option in options]
        if name in TAKES_JOBS:
            jobs = "(swarm ps -q --no-color 2>/dev/null)"
            lines.append(f"{seen} -a '{jobs}'")
        if name in TAKES_NODES:
            lines.append(f"{seen} -a '(swarm nodes -q 2>/dev/null)'")
        if name in WORDS:
            lines.append(f"{_fish_first(name)} -a '{WORDS[name]}'")
    lines += [
        f"{_fish_seen('local', 'stop start')} -a '(swarm local status -q 2>/dev/null)'",
        f"{_fish_seen('config', 'set')} -a '{' '.join(KEYS)}'",
        f"{_fish_seen('config', 'unset')} -a '(swarm config view -q 2>/dev/null)'",
        f"{_fish_seen('help')} -a '{' '.join([*COMMANDS, *ALIASES])}'",
    ]
    return "\n".join(lines) + "\n"


def _fish_seen(*words: str) -> str:
    """The beginning of a line that counts once a word of each has been typed."""
    return f"complete -c swarm -n '{'; and '.join(f'__fish_seen_subcommand_from {each}' for each in words)}'"


def _fish_first(name: str) -> str:
    """The beginning of a line that counts until one of the words that a command begins with has been typed."""
    return (
        f"complete -c swarm -n '__fish_seen_subcommand_from {name}; and not __fish_seen_subcommand_from {WORDS[name]}'"
    )


def _fish_option(option: Option) -> str:
    words = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.metavar:
        words.append("-r")
    if option.choices:
        words.append(f"-a '{' '.join(option.choices)}'")
    elif option.key == "kind":
        words.append(f"-a '{' '.join(EVENT_KINDS)}'")
    elif option.key == "context":
        words.append(f'-a "{FISH_CONTEXTS}"')
    elif option.metavar in FILE_VALUES:
        words.append("-F")
    return " ".join([*words, f"-d {_quoted(option.summary)}"])


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_BASH = """_swarm_takes_value() {{
    case "$1" in
        {valued}) return 0 ;;
    esac
    return 1
}}
_swarm() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="" action="" name="" words="" index word prior
    for ((index = 1; index < COMP_CWORD; index++)); do
        word="${{COMP_WORDS[index]}}" prior="${{COMP_WORDS[index-1]}}"
        if [[ "$word" == -- ]]; then
            COMPREPLY=($(compgen -f -- "$current"))
            return
        fi
        if _swarm_takes_value "$command:$prior"; then
            if [[ "$prior" == --name || "$prior" == -n ]]; then name="$word"; fi
        elif [[ "$word" != -* && -z "$command" ]]; then
            command="$word"
        elif [[ "$word" != -* && -z "$action" ]]; then
            action="$word"
        fi
    done
    COMPREPLY=()
    if _swarm_takes_value "$command:$previous"; then
        case "$command:$previous" in
{values}
        {files}) COMPREPLY=($(compgen -f -- "$current")) ;;
        esac
    elif [[ "$current" == -* ]]; then
        case "$command" in
{options}
        esac
    elif [[ -z "$command" ]]; then
        words="{commands}"
    else
        case "$command:$action" in
{places}
        esac
    fi
    if [[ -n "$words" ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
    case "$command:$action" in
        {takes_files})
            if [[ ${{#COMPREPLY[@]}} -eq 0 ]] && ! _swarm_takes_value "$command:$previous"; then
                COMPREPLY=($(compgen -f -- "$current"))
            fi ;;
    esac
}}
complete -F _swarm swarm
"""
