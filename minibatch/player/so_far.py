"""The metrics of a run up to some iteration: those of :mod:`minibatch.metrics` and ``accounting``, as they grow.

After the last iteration they are those of the whole run (but for what ends later: an abort that comes when nothing runs
any more). A latency is that of completed requests, so it is NaN until somebody has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from minibatch.metrics import COMPLETED, gaps, ratio
from minibatch.trace import StepReport, Timeline


@dataclass(frozen=True, slots=True)
class SoFar:
    """Names as in ``metrics.summary``; ``useful_share`` of ``accounting.Work``, ``*_filled`` of ``accounting.Memory``.

    ``num_requests``  how many the trace knows, those included that are still to come
    """

    num_requests: int
    completed: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    throughput: float = math.nan
    queueing_delay_mean: float = math.nan
    ttft_mean: float = math.nan
    ttft_max: float = math.nan
    tbt_p50: float = math.nan
    tbt_max: float = math.nan
    useful_share: float = math.nan
    mean_filled: float = math.nan
    peak_filled: float = math.nan


@dataclass
class Tally:
    """Adds up iterations; ``so_far()`` says what they come to."""

    timelines: dict[str, Timeline]
    generated: int = 0
    preemptions: int = 0
    useful: int = 0
    executed: int = 0
    filled: float = 0.0  # shares of the cache, times seconds
    seconds: float = 0.0
    peak: float = math.nan
    first: float = math.inf  # arrival of one that has run
    last: float = -math.inf  # token, or end of one that has run
    delays: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    tbts: list[float] = field(default_factory=list)
    _ran: set[str] = field(default_factory=set)
    _latencies: dict[str, float] = field(default_factory=dict)

    def add(self, step: StepReport) -> None:
        forked = [fork.request_id for fork in step.forked]
        for name in (*(member.request_id for member in step.members), *forked):
            if name not in self._ran:
                self._ran.add(name)
                self.first = min(self.first, self.timelines[name].arrival)
        emitted = sum(change.emitted is not None for change in (*step.members, *step.forked))
        self.generated += emitted
        self.last = max(self.last, step.end) if emitted else self.last
        self.preemptions += len(step.preempted)
        self.useful += step.prefill + step.decode
        self.executed += step.num_tokens
        self._add_memory(step)
        for name, reason in step.finished:
            self._add_end(self.timelines[name], reason)

    def _add_memory(self, step: StepReport) -> None:
        share, seconds = step.kv.filled / step.kv.capacity, step.end - step.start
        self.filled, self.seconds = self.filled + share * seconds, self.seconds + seconds
        self.peak = share if math.isnan(self.peak) else max(self.peak, share)

    def _add_end(self, timeline: Timeline, reason: str) -> None:
        if timeline.request_id in self._ran:
            self.last = max(self.last, timeline.finish)
        if reason in COMPLETED:
            self.delays.append(timeline.scheduled - timeline.arrival)
            self.ttfts.append(timeline.token_times[0] - timeline.arrival)
            self.tbts += gaps(timeline).tolist()
            self._latencies = {
                "queueing_delay_mean": float(np.mean(self.delays)),
                "ttft_mean": float(np.mean(self.ttfts)),
                "ttft_max": max(self.ttfts),
                "tbt_p50": float(np.median(self.tbts)) if self.tbts else math.nan,
                "tbt_max": max(self.tbts, default=math.nan),
            }

    def so_far(self) -> SoFar:
        return SoFar(
            num_requests=len(self.timelines),
            completed=len(self.delays),
            generated_tokens=self.generated,
            preemptions=self.preemptions,
            throughput=ratio(self.generated, self.last - self.first) if math.isfinite(self.last) else math.nan,
            useful_share=ratio(self.useful, self.executed),
            mean_filled=ratio(self.filled, self.seconds),
            peak_filled=self.peak,
            **self._latencies,
        )
