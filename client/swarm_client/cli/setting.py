"""The swarm-wide setting, as `swarm config --swarm` shows and changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarm_client.failure import OK, UsageError
from swarm_client.options import nearest
from swarm_client.quantity import number
from swarm_client.session import Session

if TYPE_CHECKING:
    from swarmsched.gossip.setting import SwarmSetting

KEYS = ("policy", "elasticity", "restartable")  # all others are parameters of the policy
EXAMPLE = "for example swarm config set --swarm policy=las"


def view_setting(session: Session, _: Sequence[str]) -> int:
    """Print it."""
    _print(session, _read(session))
    return OK


def set_setting(session: Session, words: Sequence[str]) -> int:
    """Change policy, parameters, elasticity or what jobs are by default, by words such as policy=las."""
    values = _values(words)
    now = _read(session)
    policy = str(values.pop("policy", now["policy"]))
    kept = now.get("parameters") or {} if policy == now["policy"] else {}
    others = {key: values.pop(key) for key in KEYS[1:] if key in values}
    return _change(session, {"policy": policy, "parameters": {**kept, **values}, **others})


def unset_setting(session: Session, words: Sequence[str]) -> int:
    """Go back to the default of the policy (and its parameters), of one parameter, or of another key."""
    if len(words) != 1:
        raise UsageError("config unset --swarm takes KEY", f"{', '.join(KEYS)}, or a parameter that is set")
    now, (key,) = _read(session), words
    parameters = dict(now.get("parameters") or {})
    known = (*KEYS, *parameters)
    if key not in known:
        raise UsageError(f"{key!r} is not set{nearest(key, known)}", f"what can be unset: {', '.join(known)}")
    if key == "policy":
        return _change(session, {"policy": _default().policy})
    body = {"policy": now["policy"], "parameters": {name: parameters[name] for name in parameters if name != key}}
    if key in KEYS:
        body |= {"elasticity": _default().elasticity.value} if key == "elasticity" else {key: False}
    return _change(session, body)


def _default() -> SwarmSetting:
    from swarmsched.gossip.setting import SwarmSetting  # it brings all types of the wire

    return SwarmSetting()


def _read(session: Session) -> Any:
    return session.agents.call("cannot read the swarm's setting", "GET", "/v1/config")


def _change(session: Session, body: Mapping[str, Any]) -> int:
    """Store what follows from the setting that was read; a change in between is a conflict (exit code 5)."""
    tag = session.agents.last_headers.get("etag", "")
    headers = {"If-Match": tag} if tag else {}
    setting = session.agents.call("cannot change the setting", "PUT", "/v1/config", body=body, headers=headers)
    _print(session, setting)
    return OK


def _values(words: Sequence[str]) -> dict[str, str | float | bool]:
    """Keys and values of `policy=las queues=3`, or of `policy las`."""
    if len(words) == 2 and words[0] in KEYS and "=" not in words[1]:
        words = ["=".join(words)]
    if not words:
        raise UsageError("nothing to set", EXAMPLE)
    values: dict[str, str | float | bool] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"{word!r} is not KEY=VALUE", EXAMPLE)
        if key in values:
            raise UsageError(f"{key} is given twice", "give it once")
        values[key] = _flag(key, text) if key == "restartable" else text if key in KEYS else _parameter(key, text)
    return values


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"{key}: {text!r} says neither yes nor no", f"{key}=true, or {key}=false")
    return text == "true"


def _parameter(key: str, text: str) -> float:
    try:
        return number(text)
    except ValueError as error:
        if near := nearest(key, KEYS):
            raise UsageError(f"{key!r} takes no {text!r}{near}", EXAMPLE) from None
        remedy = f"beside {' and '.join(KEYS)} there are parameters of the policy, which are numbers"
        raise UsageError(f"parameter {key}: {text!r} {error}", remedy) from None


def _print(session: Session, setting: Mapping[str, Any]) -> None:
    if not session.printer.is_for_people:
        session.printer.document(setting)
        return
    elasticity = setting.get("elasticity", "advise")
    restartable = ", jobs restartable unless they say no" if setting.get("restartable") else ""
    session.printer.line(
        f"policy {setting['policy']}, elasticity {elasticity}{restartable} (version {setting['version']})"
    )
    for name, value in sorted((setting.get("parameters") or {}).items()):
        session.printer.line(f"  {name} = {value:g}")
