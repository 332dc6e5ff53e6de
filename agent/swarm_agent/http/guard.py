"""The checks before any handler: Host, Origin and bearer token.

Why each: the Host check defeats DNS rebinding (a page's own name that resolves to this agent), the Origin check
defeats pages that send requests without reading the answers, and both hold for every method.  An IP address cannot be
rebound, but only those that lead here are accepted, so that a mistake is seen.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from swarm_agent.config import AgentConfig
from swarm_agent.http.principal import OPERATOR, Principal
from swarm_agent.http.problem import Problem

UNSAFE_FETCH_SITES = ("cross-site", "same-site")


def known_hosts(config: AgentConfig) -> frozenset[str]:
    """The names, lower case, under which this agent may be called; loopback is accepted besides."""
    own = (config.listen, config.advertised, config.people_listen, config.people_advertised)
    names = {config.name, "localhost", *config.allowed_hosts, *(address[0] for address in own if address)}
    return frozenset(name.lower().rstrip(".") for name in names if name)


@dataclass(frozen=True, slots=True)
class Guard:
    """Raises `Problem` for requests that must not reach a handler; keeps no state."""

    tokens: tuple[str, ...]
    hosts: frozenset[str]

    def check_host(self, host_header: str, local_address: str) -> None:
        """`local_address` is the address of ours that the connection came to."""
        name = host_name(host_header)
        if name is None or not (name in self.hosts or name == local_address or _is_loopback(name)):
            raise Problem("wrong_host", f"the Host header says {host_header[:80]!r}, which is not this agent")

    def check_origin(self, headers: Mapping[str, str], *, is_page: bool) -> None:
        """A link from elsewhere may open the status page (`is_page`), nothing more; it holds no data."""
        origin = headers.get("Origin")
        if origin is not None and _location(origin) != headers.get("Host", "").lower():
            raise Problem("cross_origin", f"the request comes from the web origin {origin[:80]!r}")
        if headers.get("Sec-Fetch-Site") in UNSAFE_FETCH_SITES and not is_page:
            raise Problem("cross_origin", "the browser says that another web site sent this request")

    def principal_of(self, authorization: str) -> Principal:
        """Who has that token; each is compared in constant time."""
        scheme, _, given = authorization.partition(" ")
        sent = given.strip().encode("utf-8", "replace")
        is_right = any(hmac.compare_digest(sent, token.encode()) for token in self.tokens)
        if scheme.lower() != "bearer" or not is_right:
            said = "the bearer token is wrong" if given else "no bearer token was sent"
            raise Problem("unauthorised", said, headers={"WWW-Authenticate": 'Bearer realm="swarm"'})
        return OPERATOR


def _location(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def host_name(host_header: str) -> str | None:
    """The name in a Host header, lower case, without port and brackets; None when it is malformed."""
    try:
        parts = urlsplit(f"//{host_header}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    is_clean = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
    return name.rstrip(".") if name and is_clean else None


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
