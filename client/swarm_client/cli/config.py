"""`swarm config`: show settings with their origin, change the user's file, or the swarm's own setting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from swarm_client import job_key
from swarm_client.cli.setting import set_setting, unset_setting, view_setting
from swarm_client.config import SETTINGS, user_file
from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command, Option, nearest
from swarm_client.output import Column, Row
from swarm_client.session import Session
from swarm_client.toml_edit import Value, remove_key, remove_section, save, set_key

ACTIONS = ("view", "set", "unset")
KEYS = (*SETTINGS, *(f"job.{each}" for each in job_key.NAMES if each not in ("command", "env")))
"""What can be set in the user's file."""
COMMAND = Command(
    "config",
    "Show or change settings.",
    (
        Option("--origin", "view: where each value comes from"),
        Option("--swarm", "the swarm-wide setting (policy and its parameters) instead of the user's file"),
    ),
    positionals="view | set KEY VALUE | unset KEY | set --swarm [policy=NAME] [PARAMETER=NUMBER...] [KEY=VALUE...]",
    details="Keys of jobs are written job.KEY, for example job.time; `unset contexts.NAME` forgets a swarm.\n"
    "`unset --swarm KEY` goes back to the default of the policy, of one parameter, of elasticity or restartable.\n"
    "Of the swarm are `elasticity` (off, advise, on) and `restartable` (true: jobs that do not say otherwise\n"
    "may be stopped for others and begun again).",
    examples=("swarm config set job.time 2h", "swarm config set --swarm policy=las"),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Carry out view, set or unset."""
    action = arguments.positionals[0] if arguments.positionals else "view"
    words = arguments.positionals[1:]
    if action not in ACTIONS:
        raise UsageError(f"config {action!r} is not known{nearest(action, ACTIONS)}", f"one of {', '.join(ACTIONS)}")
    if action == "view" and words:
        raise UsageError(f"config view takes no {words[0]!r}", "it shows all settings; --format picks of them")
    if arguments["swarm"]:
        return {"view": view_setting, "set": set_setting, "unset": unset_setting}[action](session, words)
    if action == "view":
        return _view(session, with_origin=bool(arguments["origin"]))
    return _change(session, action, words)


def _view(session: Session, *, with_origin: bool) -> int:
    config = session.config
    items = [{"name": key, "value": value, "origin": config.origins[key]} for key, value in config.values.items()]
    items += [
        {"name": f"job.{key}", "value": value, "origin": config.job_origins[key]} for key, value in config.job.items()
    ]
    items += [
        {"name": f"contexts.{name}", "value": values.get("hosts", ""), "origin": "-"}
        for name, values in config.contexts.items()
    ]
    columns: list[Column[Row]] = [
        Column("KEY", lambda item: str(item["name"])),
        Column("VALUE", lambda item: _shown(item["value"])),
    ]
    if with_origin:
        columns.append(Column("ORIGIN", lambda item: str(item["origin"])))
    session.printer.items(items, columns)
    return OK


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={text}" for key, text in value.items())
    return str(value) if value != "" else "-"


def _change(session: Session, action: str, words: list[str]) -> int:
    key, value = _key_and_value(action, words)
    section, _, name = key.rpartition(".")
    file = Path(user_file(os.environ))
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if action == "unset":
        changed = remove_section(text, key) if section == "contexts" else remove_key(text, section, name)
        if changed == text:
            session.tell(f"{key} is not set in {file}")
            return OK
        if section == "contexts" and session.config.context == name:
            changed = remove_key(changed, "", "context")
        save(file, changed)
    else:
        save(file, set_key(text, section, name, _checked(key, section, name, value)))
    session.tell(f"{key} was {'removed from' if action == 'unset' else 'set in'} {file}")
    return OK


def _key_and_value(action: str, words: list[str]) -> tuple[str, str]:
    if action == "set" and len(words) == 1 and "=" in words[0]:
        key, _, value = words[0].partition("=")
        return key, value
    if len(words) != (2 if action == "set" else 1):
        raise UsageError(f"config {action} takes {'KEY VALUE' if action == 'set' else 'KEY'}", "for example job.time")
    return words[0], words[-1]


def _checked(key: str, section: str, name: str, text: str) -> Value:
    if key.startswith("contexts."):
        name = key.removeprefix("contexts.").partition(".")[0]
        raise UsageError(f"{key!r} is not a setting", f"swarm login HOST --name {name} remembers a swarm")
    if key not in KEYS:
        raise UsageError(f"unknown key {key!r}{nearest(key, KEYS)}", f"known keys: {', '.join(KEYS)}")
    try:
        if not section:
            value: Value = SETTINGS[name][0](text)
            return value
        if name in job_key.FILE_ONLY:
            return bool(job_key.check_value(name, {"true": True, "false": False}.get(text.lower(), text)))
        kept = job_key.BY_NAME[name]
        kept.convert(key, text)
        is_whole = int in kept.kinds and text.removeprefix("-").isdecimal()
        return [text] if kept.repeats else int(text) if is_whole else text
    except ValueError as error:
        raise UsageError(f"{key}: {text!r} {error}", "correct the value") from None
