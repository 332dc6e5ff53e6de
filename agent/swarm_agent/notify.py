"""Tells systemd how the agent is doing (sd_notify and its watchdog), without its library."""

import asyncio
import os
import socket

FEEDINGS = 3  # in the time that systemd waits for one


def notify(state: str) -> bool:
    """Send for example `READY=1`; false when nobody asked to be told or the socket is gone.

    A leading '@' of NOTIFY_SOCKET stands for the abstract namespace (sd_notify(3)).
    """
    target = os.environ.get("NOTIFY_SOCKET", "")
    if not target:
        return False
    address = "\0" + target[1:] if target.startswith("@") else target
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(state.encode(), address)
        except OSError:
            return False
    return True


async def feed_watchdog() -> None:
    """Say `WATCHDOG=1` for as long as the loop turns; systemd ends and restarts an agent that no longer does.

    Returns at once when nobody watches this process (sd_watchdog_enabled(3)).
    """
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    if not limit_us.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while notify("WATCHDOG=1"):  # noqa: ASYNC110  # the time that passes is the event
        await asyncio.sleep(int(limit_us) / 1e6 / FEEDINGS)
