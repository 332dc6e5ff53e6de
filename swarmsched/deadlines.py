"""When each of many things wants attention, at a cost that does not grow with those that do not."""

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
SLACK = 64  # outdated entries that are kept without a thought


class Deadlines(Generic[K]):
    """Times by key, infinity for never.  Keys that are due come in the order in which they were first put."""

    def __init__(self) -> None:
        self._at_s: dict[K, float] = {}
        self._places: dict[K, int] = {}
        self._place_count = 0
        self._heap: list[tuple[float, int, K]] = []  # also of times and keys that are out of date

    @property
    def next_s(self) -> float:
        """The earliest; infinity without any."""
        heap = self._heap
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def put(self, key: K, at_s: float) -> None:
        """Set or change one."""
        if self._at_s.get(key) == at_s:
            return
        if key not in self._places:
            self._place_count += 1
            self._places[key] = self._place_count
        self._at_s[key] = at_s
        if at_s < math.inf:
            heapq.heappush(self._heap, (at_s, self._places[key], key))
        if len(self._heap) > 2 * len(self._at_s) + SLACK:
            self._heap = [(at_s, self._places[key], key) for key, at_s in self._at_s.items() if at_s < math.inf]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Forget a key; unknown ones are none of our business."""
        self._at_s.pop(key, None)
        self._places.pop(key, None)

    def due(self, now_s: float) -> list[K]:
        """Keys whose time has come.  They stay due until they are put again, or dropped."""
        found: dict[K, tuple[float, int, K]] = {}
        while self._heap and self._heap[0][0] <= now_s:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                found[entry[2]] = entry
        for entry in found.values():
            heapq.heappush(self._heap, entry)
        return sorted(found, key=self._places.__getitem__)

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        at_s, place, key = entry
        return self._places.get(key) == place and self._at_s[key] == at_s
