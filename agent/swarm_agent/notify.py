"""Tells systemd how the agent is doing (sd_notify), without its library."""

import os
import socket


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
