"""Hosts as network namespaces on one bridge, with links that can be cut, made one-way and made lossy.

    with Network.build(3) as network:
        first, second, _ = network.hosts
        subprocess.Popen(first.command("program", "--listen", f"{first.address}:7433"))
        network.drop(second, [first])    # first -> second vanishes; second -> first passes
        network.refuse(first, [second])  # first gets EPERM when it sends to second
        network.heal()

The bridge has a namespace of its own, so that nothing leaves the machine; one link joins it to the root namespace, from
where tests reach every host whatever is cut among the hosts.  Root only; needs iproute2, nftables and util-linux.
Any number of test processes may have networks at once: each takes a free subnet of 198.18.0.0/15 (RFC 2544) by locking
a file, and what a killed test process left in a subnet is removed by the next that takes it.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SUBNETS = 512
HOSTS_MAX = 250
ROOT_OCTET = 254
NAMESPACES = Path("/run/netns")
LOCKS = Path("/run")  # whatever TMPDIR a test process has
END_TIMEOUT_S = 20.0
PROGRAMS = ("ip", "nft", "nsenter")
CABLE = Path(__file__).with_name("cable.py")

RULES = """
table inet faults {
  chain input { type filter hook input priority 0; }
  chain output { type filter hook output priority 0; }
}
"""


def why_not() -> str:
    """Why no network can be built here; empty when it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        lack = f" (not found: {', '.join(missing)})" if missing else ""
        return f"needs root and ip netns{lack}"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return f"needs root and ip netns: {probe.stderr.strip()}" if probe.returncode else ""


def run(*words: str, text: str | None = None) -> str:
    """Output of a command; `RuntimeError` with what it said when it fails."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Cables(NamedTuple):
    """What joins each host to the switch: two of them are between two hosts, in each direction."""

    mbit_s: float
    delay_ms: float


@dataclass(frozen=True)
class Host:
    """One namespace with an address on the bridge."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host, in the process that is started."""
        return ["nsenter", f"--net={NAMESPACES / self.namespace}", *words]

    def pids(self) -> list[int]:
        """Every process of this host; dead ones that nobody has waited for do not count."""
        return pids_in(self.namespace)

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of this host."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        """Stop every process, also those that are being started meanwhile."""
        stopped: set[int] = set()
        while fresh := set(self.pids()) - stopped:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh

    def unplug(self) -> None:
        """Take the link down: not even the end of a connection is told."""
        run("ip", "-n", self.namespace, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        """Take the link up."""
        run("ip", "-n", self.namespace, "link", "set", "eth0", "up")

    def cut_power(self) -> None:
        """End every process at one instant, without a word to the network; what is on disk stays.

        All are frozen first: no process sees the death of another and writes it down.  `plug_in` before the next start.
        """
        self.unplug()
        self.freeze()
        end_processes(self.namespace)

    def rules(self, chain: str, rules: Iterable[str]) -> None:
        """Add rules to the input or output chain."""
        run(*self.command("nft", "-f", "-"), text="".join(f"add rule inet faults {chain} {rule}\n" for rule in rules))


class Network:
    """N hosts; `build` makes and removes it."""

    def __init__(self, prefix: str, net: str, count: int) -> None:
        self._prefix, self._net = prefix, net
        self._switch = f"{prefix}sw"
        self.hosts = [Host(f"{prefix}h{number}", f"{net}.{number}") for number in range(1, count + 1)]

    @classmethod
    @contextmanager
    def build(cls, count: int, cables: Cables | None = None) -> Iterator["Network"]:
        """A network for the time of a block; at its end every process in it is killed.  Without cables it is fast."""
        assert 1 <= count <= HOSTS_MAX, count
        with ExitStack() as stack:
            number = stack.enter_context(_free_subnet())
            prefix = f"swt{number}"
            remove(prefix)
            stack.callback(remove, prefix)
            network = cls(prefix, f"198.{18 + number // 256}.{number % 256}", count)
            network._raise_switch()
            if cables is not None:
                stack.enter_context(network._laid(cables))
            for host in network.hosts:
                network._add(host, is_laid=cables is not None)
            yield network

    def drop(self, receiver: Host, senders: Sequence[Host]) -> None:
        """What the senders send to the receiver vanishes there, on its INPUT; the other direction passes."""
        receiver.rules("input", [f"ip saddr {sender.address} counter drop" for sender in senders])

    def refuse(self, sender: Host, receivers: Sequence[Host]) -> None:
        """What the sender sends to the receivers is dropped on its OUTPUT: datagrams fail with EPERM."""
        sender.rules("output", [f"ip daddr {receiver.address} counter drop" for receiver in receivers])

    def cut(self, side: Sequence[Host], other: Sequence[Host]) -> None:
        """A symmetric partition, silent for both sides."""
        for receivers, senders in ((side, other), (other, side)):
            for receiver in receivers:
                self.drop(receiver, senders)

    def lose(self, percent: int) -> None:
        """Every host loses so much of what other hosts send to it; the tests' own requests get through."""
        own = f"{self._net}.{ROOT_OCTET}"
        for host in self.hosts:
            host.rules("input", [f'iifname "eth0" ip saddr != {own} numgen random mod 100 < {percent} counter drop'])

    def heal(self) -> None:
        """Drop every rule; links that are down stay down."""
        for host in self.hosts:
            run(*host.command("nft", "flush", "table", "inet", "faults"))

    def _raise_switch(self) -> None:
        switch = self._switch
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        run("ip", "link", "add", self._prefix, "type", "veth", "peer", "name", "root", "netns", switch)
        run("ip", "-n", switch, "link", "set", "root", "master", "br0", "up")
        run("ip", "addr", "add", f"{self._net}.{ROOT_OCTET}/24", "dev", self._prefix)
        run("ip", "link", "set", self._prefix, "up")
        for host in self.hosts:
            run("ip", "netns", "add", host.namespace)

    @contextmanager
    def _laid(self, cables: Cables) -> Iterator[None]:
        """Cables from each host's eth0 to the switch, in a process that outlives all that talk through them."""
        pairs = [f"{host.namespace}:eth0={self._switch}:{host.namespace}" for host in self.hosts]
        words = [sys.executable, str(CABLE), str(cables.mbit_s), str(cables.delay_ms), *pairs]
        with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            try:
                if process.stdout.readline() != b"ready\n":
                    raise RuntimeError("cables between hosts need root and /dev/net/tun")
                yield
            finally:
                process.kill()

    def _add(self, host: Host, *, is_laid: bool) -> None:
        name, switch = host.namespace, self._switch
        if not is_laid:
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", switch)
        run("ip", "-n", switch, "link", "set", name, "master", "br0", "up")
        run("ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run(*host.command("nft", "-f", "-"), text=RULES)


def pids_in(namespace: str) -> list[int]:
    """Processes whose network namespace this is, zombies left out."""
    inode = (NAMESPACES / namespace).stat().st_ino
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if (entry / "ns" / "net").stat().st_ino == inode and not _is_zombie(entry):
                    found.append(int(entry.name))
    return found


def end_processes(namespace: str) -> None:
    """SIGKILL until none is left; `RuntimeError` names those that stay."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while pids := pids_in(namespace):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{namespace}: processes {pids} do not end")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def remove(prefix: str) -> None:
    """End what runs in the namespaces of a network, and remove them with their links."""
    names = [path.name for path in NAMESPACES.glob(f"{prefix}h*")] + [f"{prefix}sw"]
    for name in names:
        if (NAMESPACES / name).exists():
            with suppress(OSError):  # a file left by a `netns add` that was interrupted is no namespace
                end_processes(name)
            run("ip", "netns", "del", name)
    # The kernel takes the links of a deleted namespace down later, and the name is needed now.
    subprocess.run(["ip", "link", "del", prefix], capture_output=True, check=False)


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


@contextmanager
def _free_subnet() -> Iterator[int]:
    """A number that no other test process uses while the block lasts."""
    start = os.getpid()
    for offset in range(SUBNETS):
        number = (start + offset) % SUBNETS
        path = LOCKS / f"swarm-netns-{number}.lock"
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            yield number
            return
    raise RuntimeError(
        f"all {SUBNETS} subnets of 198.18.0.0/15 are taken: end the tests that hold {LOCKS}/swarm-netns-*"
    )
