"""A plan: which workers train a job from some moment on, in rank order, those that go on before those that join."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from swarm_elastic._arguments import shown

NAME_LENGTH_MAX = 200


class PlanInvalid(ValueError):
    """A plan that cannot be followed; the text names the field, its value and the remedy."""


class PlanMember(NamedTuple):
    """One worker of a plan.  `address` is "host:port", where its store listens.

    `secret` is what keys in that store are named after; workers of earlier versions have none.
    """

    worker: str
    address: str
    secret: str = ""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host, without the brackets of IPv6, and port."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


class GangPlan(NamedTuple):
    """One membership.  Versions only grow.

    `lost` are workers that agents know to be gone: nobody waits for them.  `may_start`: nobody has trained yet.
    """

    version: int
    epoch: int
    members: tuple[PlanMember, ...]
    lost: frozenset[str] = frozenset()
    may_start: bool = False

    @property
    def is_former(self) -> bool:
        """Whether some of them have the library of the first version, so that all speak with each other as that did."""
        return not all(member.secret for member in self.members)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the members in rank order."""
        return tuple(member.worker for member in self.members)

    def rank_of(self, worker: str) -> int:
        """-1 for one that is not a member."""
        return self.workers.index(worker) if worker in self.workers else -1


def hosts_of(count: int, learners: Sequence[str]) -> list[str]:
    """Of each range the learner whose agent hosts it.

    Each takes an equal share, and a range stays where it is as far as that allows: of those with room left it goes to
    the one that a hash of both names puts first.
    """
    room = dict.fromkeys(learners, -(-count // len(learners)))
    hosts = []
    for index in range(count):
        found = max((each for each in learners if room[each]), key=lambda each: _score(index, each))
        room[found] -= 1
        hosts.append(found)
    return hosts


def parse(value: object) -> GangPlan:
    """The plan that an agent sent as JSON.  Raises `PlanInvalid`."""
    if not isinstance(value, dict):
        raise PlanInvalid(f"a plan must be an object, not {shown(value)}; publish version, epoch and members")
    members = value.get("members")
    if not isinstance(members, list) or not members:
        raise PlanInvalid(f"members of a plan must be a list that is not empty, not {shown(members)}; cancel the job")
    parsed = tuple(_member(each) for each in members)
    if len({member.worker for member in parsed}) < len(parsed):
        raise PlanInvalid(
            f"members of a plan must differ, not {shown([each.worker for each in parsed])}; name each once"
        )
    lost = value.get("lost", [])
    if not isinstance(lost, list) or not all(isinstance(each, str) for each in lost):
        raise PlanInvalid(f"lost must be a list of names, not {shown(lost)}; leave it out where nobody is lost")
    may_start = value.get("may_start") is True
    return GangPlan(_count("version", value), _count("epoch", value), parsed, frozenset(lost), may_start)


def _count(name: str, value: dict[str, object]) -> int:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise PlanInvalid(f"{name} of a plan must be a whole number from 0 on, not {shown(number)}; count up from 1")
    return number


def _member(value: object) -> PlanMember:
    known = value if isinstance(value, dict) else {}
    worker, address, secret = known.get("worker"), known.get("address"), known.get("secret", "")
    if not isinstance(worker, str) or not 0 < len(worker) <= NAME_LENGTH_MAX:
        raise PlanInvalid(f"worker of a member must be its SWARM_WORKER, not {shown(worker)}; take it from its request")
    if isinstance(address, str) and "@" in address:  # as agents keep it
        secret, _, address = address.rpartition("@")
    if not isinstance(secret, str) or len(secret) > NAME_LENGTH_MAX:
        raise PlanInvalid(f"secret of {worker} must be a text, not {shown(secret)}; take it from its request")
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PlanInvalid(f"address of {worker} must be host:port, not {shown(address)}; take it from its request")
    return PlanMember(worker, f"{host}:{port}", secret)


def _score(index: int, learner: str) -> bytes:
    return hashlib.sha256(f"{index}/{learner}".encode()).digest()
