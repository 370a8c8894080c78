"""What simulating costs: seconds and memory of a run as large as a public trace, and whether they grow with the work.

The default is as large as the Azure LLM inference trace of 2023, conversations: 19,366 requests in an hour, 4 million
output tokens. Its file itself can be given; without it, lengths and arrivals are drawn (lognormal with the medians and
90th percentiles of that file, Poisson).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise

from minibatch import bench
from minibatch.bench_worker import peak_memory
from minibatch.scenario import Scenario, numbers

HARDWARE = Scenario(model="llama-3-70b", gpu="a100-80", tensor_parallel=4, token_budget=2048)
LIKE_AZURE = replace(
    HARDWARE,
    num_requests=19_366,
    arrivals="poisson:5.5",
    prompts="lognormal:1020,2735,8000",
    outputs="lognormal:129,424,1000",
)


@dataclass(frozen=True)
class Size:
    """One run. Times are seconds of CPU; ``memory`` is the most that the process had so far, in bytes."""

    requests: int
    iterations: int
    request_iterations: int
    mean_batch: float
    load: float
    run: float
    numbers: float
    memory: float

    @property
    def each(self) -> float:
        """Microseconds a request and iteration, all included."""
        return 1e6 * (self.load + self.run + self.numbers) / self.request_iterations


def run(scenario: Scenario = LIKE_AZURE) -> list[Size]:
    """A quarter, half and all of it; the smaller ones first, because the memory of a process does not shrink."""
    total = scenario.num_requests or len(scenario.load())
    return [_measure(replace(scenario, num_requests=total // part)) for part in (4, 2, 1)]


def _measure(scenario: Scenario) -> Size:
    times = [time.process_time()]
    workload = scenario.load()
    times.append(time.process_time())
    trace = scenario.run(workload)
    times.append(time.process_time())
    numbers(trace)
    times.append(time.process_time())
    seqs = sum(counts.num_seqs for counts in trace.light)
    seconds = (after - before for before, after in pairwise(times))
    return Size(len(workload), trace.num_steps, seqs, seqs / trace.num_steps, *seconds, peak_memory())


def describe(sizes: list[Size]) -> str:
    titles = [
        "requests",
        "iterations",
        "request-iterations",
        "batch",
        "load s",
        "run s",
        "numbers s",
        "us each",
        "peak MB",
    ]
    rows = [
        [
            f"{s.requests:,}",
            f"{s.iterations:,}",
            f"{s.request_iterations:,}",
            f"{s.mean_batch:.1f}",
            f"{s.load:.2f}",
            f"{s.run:.2f}",
            f"{s.numbers:.2f}",
            f"{s.each:.2f}",
            f"{s.memory / 1e6:.0f}",
        ]
        for s in sizes
    ]
    return f"simulating, one core (seconds of CPU)\n{bench.table(titles, rows)}"
