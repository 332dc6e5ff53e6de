"""A network namespace without a name for one benchmark, and faults between the processes in it.  Needs root and nft.

Everything runs on the namespace's own loopback interface: process number i has the address 127.1.0.i and the group id
GROUP_BASE + i, by which rules know who sends, whatever port a connection leaves from.  The namespace ends with the last
process in it; nothing outside it is touched.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
GROUP_BASE = 20_000
HEADER_BYTES = 28  # of IP and UDP
PROGRAMS = {"ip": "iproute2", "nft": "nftables"}
_TABLES = """
table inet faults {
  chain leaving { type filter hook output priority 0
  }
  chain arriving { type filter hook input priority 0
    meta mark 1 drop
  }
}
"""


def missing_packages() -> list[str]:
    """Debian packages that must be installed first."""
    return [package for program, package in PROGRAMS.items() if shutil.which(program) is None]


def host(number: int) -> str:
    """The address of a process."""
    return f"127.1.0.{number}"


def group(number: int) -> int:
    """The group id of a process."""
    return GROUP_BASE + number


class Faults:
    """Rules of the namespace.  Half-open ranges of process numbers name the sides of a split."""

    def __init__(self, counted_ports: Sequence[int]) -> None:
        _nft(_TABLES + _counters(counted_ports))

    def split(self, one: range, other: range) -> None:
        """Packets between the two sides vanish on the way, as in a broken switch."""
        self._between(one, other, "meta mark set 1")

    def forbid(self, one: range, other: range) -> None:
        """Packets between the two sides are refused where they leave: the sender gets EPERM."""
        self._between(one, other, "drop")

    def lose(self, percent: int) -> None:
        """This share of all UDP packets vanishes at random."""
        _nft(f"add rule inet faults arriving meta l4proto udp numgen random mod 100 < {percent} drop")

    def heal(self) -> None:
        """End all faults."""
        _nft(f"delete table inet faults\n{_TABLES}")

    def udp_sent(self, port: int) -> tuple[int, int]:
        """(packets, payload bytes) that left this UDP port so far, whoever has it."""
        listed = subprocess.run(["nft", "-j", "list", "counters"], check=True, capture_output=True, text=True).stdout
        for item in json.loads(listed)["nftables"]:
            counter = item.get("counter", {})
            if counter.get("name") == f"port{port}":
                return counter["packets"], counter["bytes"] - HEADER_BYTES * counter["packets"]
        raise AssertionError(f"UDP port {port} is not counted")

    def _between(self, one: range, other: range, verdict: str) -> None:
        for senders, receivers in ((one, other), (other, one)):
            groups = f"{group(senders[0])}-{group(senders[-1])}"
            hosts = f"{host(receivers[0])}-{host(receivers[-1])}"
            _nft(f"add rule inet faults leaving meta skgid {groups} ip daddr {hosts} {verdict}")


def _counters(ports: Sequence[int]) -> str:
    counters = "".join(f"  counter port{port} {{ }}\n" for port in ports)
    rules = "".join(f"    udp sport {port} counter name port{port}\n" for port in ports)
    return f"table inet counted {{\n{counters}  chain leaving {{ type filter hook output priority 10\n{rules}  }}\n}}\n"


@contextmanager
def private_network(counted_ports: Sequence[int]) -> Iterator[Faults]:
    """Put this thread, and what it starts, into a new namespace until the block ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(libc.unshare(CLONE_NEWNET), "unshare")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield Faults(counted_ports)
        finally:
            _check(libc.setns(before, CLONE_NEWNET), "setns")
    finally:
        os.close(before)


def _check(result: int, call: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def _nft(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, check=True, text=True)
