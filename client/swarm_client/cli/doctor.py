"""`swarm doctor`: checks this side and every agent, and names the fix for each problem."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

from swarm_client.address import Address, parse_address, spell
from swarm_client.agents import Agents
from swarm_client.cli.version import client_version
from swarm_client.failure import FAILED, LOOK_CLOSER, NOT_AUTHORISED, OK, Failure
from swarm_client.options import Arguments, Command
from swarm_client.output import Column, Row, state_style
from swarm_client.quantity import show_count
from swarm_client.session import Session

COMMAND = Command(
    "doctor",
    "Look for what is wrong and say how to mend it.",
    details="Shows what is not in order; with `-o wide` every check.",
)
CLOCK_OFFSET_LIMIT_S = 5.0
COLUMNS: tuple[Column[Row], ...] = (
    Column("WHERE", lambda item: str(item["node"])),
    Column("CHECK", lambda item: str(item["name"])),
    Column("STATUS", lambda item: str(item["status"]), style=state_style),
    Column("DETAIL", lambda item: str(item["detail"]) + (f" -> {item['remedy']}" if item["remedy"] else "")),
)
Check = dict[str, str]


def execute(session: Session, arguments: Arguments) -> int:
    """0 when nothing failed (warnings are allowed), else 1."""
    items = list(_checks(session))
    is_brief = session.printer.is_for_people and session.printer.output != "wide"
    session.printer.items(_brief(items) if is_brief else items, COLUMNS)
    failed = sum(item["status"] == "failed" for item in items)
    if failed and session.printer.is_for_people:
        session.tell(f"{failed} of {len(items)} checks failed")
    return FAILED if failed else OK


def _brief(items: list[Check]) -> list[Check]:
    """What is not in order, and how many checks were, place by place; `-o wide` shows each of them."""
    rows: list[Check] = []
    for place in dict.fromkeys(item["node"] for item in items):
        here = [item for item in items if item["node"] == place]
        well = sum(item["status"] == "ok" for item in here)
        if well:
            rest = "other " if well < len(here) else ""
            rows.append(_check(place, "-", "ok", f"{show_count(well, f'{rest}check')} passed"))
        rows += [item for item in here if item["status"] != "ok"]
    return _together(rows)


def _together(rows: list[Check]) -> list[Check]:
    """What several agents say alike in one row."""
    places: dict[tuple[str, ...], list[str]] = {}
    for item in rows:
        places.setdefault(tuple(item[key] for key in ("name", "status", "detail", "remedy")), []).append(item["node"])
    return [_check(_few(nodes), *what) for what, nodes in places.items()]


def _few(nodes: list[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _check(node: str, name: str, status: str, detail: str, remedy: str = "") -> Check:
    return {"node": node, "name": name, "status": status, "detail": detail, "remedy": remedy}


def _checks(session: Session) -> Iterator[Check]:
    try:
        config = session.config
        addresses = config.addresses
    except Failure as failure:
        yield _check("client", "configuration", "failed", failure.problem, failure.remedy)
        return
    yield _check(
        "client", "configuration", "ok", f"context {config.context or '-'}, hosts from {config.origins['hosts']}"
    )
    try:
        token = config.read_token()
    except Failure as failure:
        yield _check("client", "token", "failed", failure.problem, failure.remedy)
        return
    remedy = "" if token else "swarm login HOST --token-file FILE, unless the swarm runs without one"
    yield _check("client", "token", "ok" if token else "warning", "found" if token else "none is configured", remedy)
    learnt: list[Address] = []
    for address in addresses:
        yield from _agent_checks(session, address, learnt)
    for address in dict.fromkeys(learnt):
        if address not in addresses:
            yield from _agent_checks(session, address, [])


def _agent_checks(session: Session, address: Address, learnt: list[Address]) -> Iterator[Check]:
    """Reachability, token, clock, version, then what the agent says of itself."""
    with Agents([address], session.config.read_token, session.waiter, "") as agents:
        yield from _asked(agents, address, learnt)


def _asked(agents: Agents, address: Address, learnt: list[Address]) -> Iterator[Check]:
    where = spell(address)
    started_s = time.monotonic()
    try:
        report = agents.call("not accepted", "GET", "/v1/doctor")
    except Failure as failure:
        name = "token" if failure.exit_code == NOT_AUTHORISED else "reachable"
        yield _check(where, name, "failed", failure.problem, failure.remedy.removesuffix(LOOK_CLOSER))
        return
    took_ms = (time.monotonic() - started_s) * 1000
    where = str(report.get("node") or where)
    yield _check(where, "reachable", "ok", f"{spell(address)} answered in {took_ms:.0f} ms")
    yield _clock(where, agents.last_headers.get("date", ""))
    for member in agents.call("cannot list members", "GET", "/v1/members")["items"]:
        if member["name"] == where:
            yield _version(where, str(member.get("version") or ""))
        elif member["status"] == "alive" and member.get("address"):
            learnt.append(parse_address(str(member["address"]), address[1]))
        elif member["status"] not in ("alive", "left"):
            detail = f"{where} sees it as {member['status']}"
            yield _check(str(member["name"]), "member", "warning", detail, "is its agent running, and its port open?")
    for item in report.get("items", []):
        yield _check(where, item["name"], item["status"], item["detail"], item.get("remedy") or "")


def _clock(where: str, date: str) -> Check:
    if not date:
        return _check(where, "clock", "warning", "the agent sends no time", "is there a proxy between?")
    offset_s = parsedate_to_datetime(date).timestamp() - time.time()
    # The header has whole seconds, cut off: half a second is the best guess.
    offset_s += 0.5
    if abs(offset_s) <= CLOCK_OFFSET_LIMIT_S:
        return _check(where, "clock", "ok", f"within {max(1.0, abs(offset_s)):.0f} s of this machine")
    return _check(
        where, "clock", "warning", f"{offset_s:+.0f} s from this machine", "set both by NTP (chronyc tracking)"
    )


def _version(where: str, version: str) -> Check:
    mine = client_version()
    if version == mine:
        return _check(where, "version", "ok", version)
    remedy = f"install {version} here or {mine} there; one release apart works"
    return _check(where, "version", "warning", f"agent {version or 'unknown'}, client {mine}", remedy)
