"""The status page: one file without outside resources, which asks for the token and then calls the API itself."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from swarm_agent.http.exchange import Call, HttpReply

PAGE_FILE = Path(__file__).parent / "page" / "index.html"
INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


async def page(_: Call) -> HttpReply:
    """GET /: only the page's own script and style may run, and it may call this agent only."""
    return _page()


@cache
def _page() -> HttpReply:
    """The file, read once."""
    body = PAGE_FILE.read_bytes()
    policy = {"Content-Security-Policy": content_policy(body)}
    headers = {**policy, "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
    return HttpReply(200, body, "text/html; charset=utf-8", headers)


def content_policy(page: bytes) -> str:
    """A policy that names the inline script and style by their digests."""
    digests: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, text in INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "connect-src 'self'; img-src data:; "
        f"script-src {' '.join(digests[b'script'])}; style-src {' '.join(digests[b'style'])}"
    )
