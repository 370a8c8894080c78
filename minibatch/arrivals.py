"""Open-loop arrivals: requests that have been submitted and whose arrival time has not come.

Open loop means that they arrive when the workload says, whether or not the engine keeps up (a closed loop would wait
for answers first, and so hide an overload).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from minibatch.request import RequestState


class Arrivals:
    """By arrival time; requests of the same time in the order of their submission."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """When the next one arrives; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, request: RequestState) -> None:
        self._count += 1
        heapq.heappush(self._heap, (request.arrival_time, self._count, request))

    def due(self, now: float) -> Iterator[RequestState]:
        """Takes out, one after the other, those who have arrived by ``now``."""
        while self.next_time <= now:
            yield heapq.heappop(self._heap)[2]

    def remove(self, request: RequestState) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapq.heapify(self._heap)
