"""An address belongs to an interface, and a name may be loopback."""

import subprocess
import sys
from pathlib import Path

import pytest

from swarm_agent.task import interfaces
from swarm_agent.task.interfaces import interface_of, loopback_of
from tests.testbed.netns import Network, run, why_not


def test_loopback_has_its_address_and_nobody_has_that_of_a_stranger() -> None:
    assert [interface_of(address) for address in ("127.0.0.1", "192.0.2.77", "2001:db8::77")] == ["lo", "", ""]


def test_an_address_of_ipv6_is_found_whatever_its_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "if_inet6"
    told.write_text(
        "fe80000000000000000000000000000a 02 40 20 80 eth7\nfd00000000000000000000000000000b 03 40 00 80 ib0\n"
    )
    monkeypatch.setattr(interfaces, "INET6", told)
    assert [interface_of(address) for address in ("fe80::a%eth7", "fd00::b", "fd00::c")] == ["eth7", "ib0", ""]
    monkeypatch.setattr(interfaces, "INET6", tmp_path / "a kernel without it")
    assert interface_of("fd00::b") == ""


@pytest.mark.root
def test_an_interface_may_have_several_addresses_labels_and_devices_below_it() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Network.build(1) as network:
        (host,) = network.hosts

        def ip(*words: str) -> None:
            run("ip", "-n", host.namespace, *words)

        ip("addr", "add", "10.9.0.2/24", "dev", "eth0")
        ip("addr", "add", "10.9.1.2/24", "dev", "eth0", "label", "eth0:1")
        ip("addr", "add", "fd09::2/64", "dev", "eth0", "nodad")
        ip("link", "add", "br7", "type", "bridge")
        ip("addr", "add", "10.9.3.2/24", "dev", "br7")
        ip("link", "set", "br7", "up")
        code = "import sys; from swarm_agent.task.interfaces import interface_of as f; print(*map(f, sys.argv[1:]))"

        def told(*addresses: str) -> list[str]:
            asked = host.command(sys.executable, "-c", code, *addresses)
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()

        found = told(host.address, "10.9.0.2", "10.9.1.2", "fd09::2", "10.9.3.2")
        assert found == ["eth0", "eth0", "eth0:1", "eth0", "br7"]
        ip("link", "set", "br7", "down")
        ip("link", "set", "br7", "name", "fabric0")
        ip("link", "set", "fabric0", "up")
        assert told("10.9.3.2") == ["fabric0"]


@pytest.mark.parametrize(
    ("hosts", "loopback"),
    [
        ("127.0.0.1\tlocalhost\n127.0.1.1\tgpu1.lab gpu1\n", "127.0.1.1"),
        ("127.0.0.1 localhost GPU1\n", "127.0.0.1"),
        ("::1 gpu1\n", "::1"),
        ("127.0.0.1 localhost\n10.0.0.1 gpu1\n127.0.1.1 gpu1\n", ""),
        ("127.0.0.1 localhost\n#127.0.1.1 gpu1\n", ""),
        ("nonsense gpu1\n", ""),
        ("", ""),
    ],
)
def test_a_name_is_loopback_where_the_file_of_hosts_says_so_first(hosts: str, loopback: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(hosts)
    assert loopback_of("gpu1", tmp_path / "hosts") == loopback
    assert loopback_of("gpu1", tmp_path / "none") == ""
