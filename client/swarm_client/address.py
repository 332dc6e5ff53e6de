"""Addresses of agents, and what is put into the path of a request."""

from __future__ import annotations

from swarm_client.failure import Failure, UsageError

DEFAULT_PORT = 7433
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~,:@")

Address = tuple[str, int]


def spell(address: Address) -> str:
    """`host:port`, with brackets for IPv6."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """Read `host`, `host:port`, `[v6]:port` or `http://host:port`; raise `Failure` (usage) for anything else."""
    rest = text.strip()
    if rest.startswith("https://"):
        raise Failure(f"address {text!r}: TLS is not available in this version", "use http:// or leave it out", 2)
    rest = rest.removeprefix("http://").rstrip("/")
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        port_text = tail.removeprefix(":")
        is_good = bool(bracket) and (not tail or tail.startswith(":"))
    elif rest.count(":") > 1:
        host, port_text, is_good = rest, "", True
    else:
        host, _, port_text = rest.partition(":")
        is_good = True
    port = int(port_text) if port_text.isdigit() and len(port_text) <= 5 else default_port if not port_text else 0
    if not is_good or not host or not 0 < port < 65_536 or any(c in host for c in "/@? "):
        raise Failure(f"address {text!r} cannot be read", "write host:port, for example 10.0.0.5:7433", 2)
    return host, port


def readable(texts: list[str]) -> list[Address]:
    """Addresses out of a cache or an answer; damaged ones are left out."""
    found = []
    for text in texts:
        try:
            found.append(parse_address(text))
        except Failure:
            continue
    return found


def quote(text: str) -> str:
    """Percent-encode for a path segment or query value (RFC 3986).

    Bytes of the command line that are not UTF-8 come as surrogates; nothing in a swarm has such a name.
    """
    try:
        return "".join(c if c in PLAIN else "".join(f"%{byte:02X}" for byte in c.encode()) for c in text)
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is not UTF-8", "write it in UTF-8") from None
