"""`swarm completion`: scripts for bash, zsh and fish, made from the same tables that parse the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from swarm_client.cli import ALIASES, COMMANDS, common_options, load_command
from swarm_client.cli.ps import END_REASONS, STATES
from swarm_client.cli.session import Session, one_positional
from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command, Option, nearest

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
JOBS = "$(swarm ps --format '{{.handle}} {{.name}}' 2>/dev/null)"
NODES = "$(swarm nodes -q 2>/dev/null)"
CONTEXTS = r"$(swarm config view -q 2>/dev/null | sed -n 's/^contexts\.//p')"
FISH_CONTEXTS = "(swarm config view -q 2>/dev/null | string replace -rf '^contexts\\.' '')"
VALUES = (
    '        *:-o|*:--output) words="table wide json jsonl yaml name" ;;',
    f'        ps:--state) words="{" ".join((*STATES, *END_REASONS))}" ;;',
    f'        *:--node|*:--exclude|nodes:nodes|drain:drain|forget:forget) words="{NODES}" ;;',
    f'        *:--context) words="{CONTEXTS}"; [[ -n "$words" ]] || return ;;',
    '        local:stop|local:start) words="$(swarm local status -q 2>/dev/null)"; [[ -n "$words" ]] || return ;;',
)
WORDS = {
    "local": "up down status stop start",
    "simulate": "faults replay",
    "config": "view set unset",
    "completion": "bash zsh fish",
}


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
    """Completes commands, options, their choices, and live jobs."""
    cases, values = [], []
    for name, _, options in _commands():
        words = " ".join(spelling for option in options for spelling in option.names)
        cases.append(f'        {name}) words="{words}" ;;')
        for option in options:
            if option.choices:
                pattern = "|".join(f"{name}:{spelling}" for spelling in option.names)
                values.append(f'        {pattern}) words="{" ".join(option.choices)}" ;;')
    extra = [f'        {name}) words="{words}" ;;' for name, words in WORDS.items()]
    return _BASH.format(
        commands=" ".join([*COMMANDS, *ALIASES]),
        cases="\n".join(cases),
        values="\n".join(dict.fromkeys((*values, *VALUES))),
        live=JOBS,
        extra="\n".join(extra),
        jobs="|".join(TAKES_JOBS),
    )


def zsh() -> str:
    """The bash functions through zsh's own bridge."""
    return "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n" + bash()


def fish() -> str:
    """One `complete` line for each command and option."""
    lines = ["complete -c swarm -f"]
    for name, summary, options in _commands():
        lines.append(f"complete -c swarm -n __fish_use_subcommand -a {name} -d {_quoted(summary)}")
        seen = f"complete -c swarm -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} {_fish_option(option)}" for option in options]
        if name in TAKES_JOBS:
            jobs = "(swarm ps -q --no-color 2>/dev/null)"
            lines.append(f"{seen} -a '{jobs}'")
        if name in ("nodes", "drain", "forget"):
            lines.append(f"{seen} -a '(swarm nodes -q 2>/dev/null)'")
        if name in WORDS:
            lines.append(f"{seen} -a '{WORDS[name]}'")
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    words = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.metavar:
        words.append("-r")
    if option.choices:
        words.append(f"-a '{' '.join(option.choices)}'")
    elif option.key == "context":
        words.append(f'-a "{FISH_CONTEXTS}"')
    elif option.metavar in ("FILE", "PATH"):
        words.append("-F")
    return " ".join([*words, f"-d {_quoted(option.summary)}"])


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_BASH = """_swarm() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" words="" index
    for ((index = 1; index < COMP_CWORD; index++)); do
        if [[ "${{COMP_WORDS[index]}}" == -- ]]; then
            COMPREPLY=($(compgen -f -- "$current"))
            return
        fi
        if [[ -z "$command" && "${{COMP_WORDS[index]}}" != -* ]]; then
            command="${{COMP_WORDS[index]}}"
        fi
    done
    if [[ -z "$command" ]]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "$command:$previous" in
{values}
    esac
    if [[ -n "$words" ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    if [[ "$current" == -* ]]; then
        case "$command" in
{cases}
        esac
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "$command" in
        {jobs}) words="{live} @last" ;;
{extra}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${{#COMPREPLY[@]}} -eq 0 ]]; then
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -F _swarm swarm
"""
