"""Cables of hosts with a rate and a delay: frames pass through this process, which joins pairs of TAP devices.

    python tests/testbed/cable.py MBIT_S DELAY_MS NAMESPACE:DEVICE=NAMESPACE:DEVICE ...

A cable carries the rate in each direction at once, and each frame takes the delay besides.  What a queue has no room
for is dropped, as a switch does.  The process makes the devices, says `ready`, and they go when it ends.  It stands in
for the kernel's netem, which many kernels of test machines lack.  Needs root and /dev/net/tun.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x2, 0x1000, 0x40000000
FRAME_BYTES_MAX = 65_536
QUEUE_BYTES = 262_144  # 21 ms of 100 Mbit/s
READ_AT_ONCE = 64


class Direction:
    """What is on its way from one device to another."""

    def __init__(self, source: int, sink: int, bytes_per_s: float, delay_s: float) -> None:
        self.source, self._sink = source, sink
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free_s = 0.0  # when the last frame has left
        self._frames: deque[tuple[float, bytes]] = deque()

    @property
    def next_s(self) -> float:
        """When the next frame arrives; infinity where there is none."""
        return self._frames[0][0] if self._frames else float("inf")

    def take(self, now_s: float) -> None:
        """Read what the source has."""
        for _ in range(READ_AT_ONCE):
            try:
                frame = os.read(self.source, FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            starts_s = max(now_s, self._free_s)
            if (starts_s - now_s) * self._bytes_per_s < QUEUE_BYTES:
                self._free_s = starts_s + len(frame) / self._bytes_per_s
                self._frames.append((self._free_s + self._delay_s, frame))

    def give(self, now_s: float) -> None:
        """Write what has arrived; a device that is down takes nothing."""
        while self._frames and self._frames[0][0] <= now_s:
            with suppress(OSError):
                os.write(self._sink, self._frames.popleft()[1])


def main(arguments: list[str]) -> None:
    """Carry frames until this process is ended."""
    bytes_per_s, delay_s = float(arguments[0]) * 1e6 / 8, float(arguments[1]) / 1e3
    directions = []
    for pair in arguments[2:]:
        one, other = (_open_tap(*end.split(":")) for end in pair.split("="))
        directions += [Direction(one, other, bytes_per_s, delay_s), Direction(other, one, bytes_per_s, delay_s)]
    print("ready", flush=True)
    by_source = {each.source: each for each in directions}
    while True:
        wait_s = max(0.0, min(each.next_s for each in directions) - time.monotonic())
        readable, _, _ = select.select(list(by_source), [], [], min(wait_s, 1.0))
        now_s = time.monotonic()
        for source in readable:
            by_source[source].take(now_s)
        for each in directions:
            each.give(now_s)


def _open_tap(namespace: str, device: str) -> int:
    """A device in a namespace, whose frames this process reads and writes."""
    told: list[int] = []

    def open_there() -> None:  # a thread can change its namespace alone
        with Path("/run/netns", namespace).open() as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                return
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
        told.append(tap)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    if not told:
        raise RuntimeError(f"no TAP device {device} could be made in namespace {namespace}")
    return told[0]


if __name__ == "__main__":
    main(sys.argv[1:])
