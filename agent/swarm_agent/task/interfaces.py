"""Which network interface has an address, and what a host name means on this machine.

Libraries that open connections among ranks choose an interface by themselves: gloo and tensorpipe take that of the
host's own name, which Debian's installer writes into /etc/hosts as 127.0.1.1, and then wait for themselves.
"""

import array
import fcntl
import socket
import struct
from ipaddress import IPv6Address, ip_address
from pathlib import Path

HOSTS, INET6 = Path("/etc/hosts"), Path("/proc/net/if_inet6")
SIOCGIFCONF = 0x8912  # netdevice(7): every IPv4 address, with the label of its interface
ENTRY = struct.Struct("16sHH4s16x")  # name, family, port, address; in 40 bytes
REQUEST = struct.Struct("iP")
ENTRIES_MOST = 1_024


def interface_of(address: str) -> str:
    """The interface that has an IP address, a label such as `eth0:1` where it has one; empty where none has it."""
    wanted = ip_address(address.partition("%")[0])
    try:
        found = _inet6() if isinstance(wanted, IPv6Address) else _inet()
    except OSError:
        return ""
    return next((name for name, packed in found if packed == wanted.packed), "")


def _inet() -> list[tuple[str, bytes]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asking:
        room = array.array("B", bytes(ENTRIES_MOST * ENTRY.size))
        place, _ = room.buffer_info()
        told = fcntl.ioctl(asking, SIOCGIFCONF, REQUEST.pack(len(room), place))
    length, _ = REQUEST.unpack(told)
    entries = ENTRY.iter_unpack(room.tobytes()[:length])
    return [(name.partition(b"\0")[0].decode(), packed) for name, _, _, packed in entries]


def _inet6() -> list[tuple[str, bytes]]:
    words = [line.split() for line in INET6.read_text().splitlines()]
    return [(line[5], bytes.fromhex(line[0])) for line in words]


def loopback_of(name: str, hosts: Path = HOSTS) -> str:
    """The loopback address that /etc/hosts gives a name first; empty where it gives another, or none."""
    try:
        lines = hosts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    entries = [line.partition("#")[0].split() for line in lines]
    own = [words[0] for words in entries if name.lower() in (word.lower() for word in words[1:])]
    try:
        return own[0] if own and ip_address(own[0]).is_loopback else ""
    except ValueError:
        return ""
