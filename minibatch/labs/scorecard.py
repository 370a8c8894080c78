"""The scorecard of the capstone: five workloads, three measures, one score, for a scheduler of your own.

    python -m minibatch.labs.scorecard capstone.py    your card beside the reference's, and a picture, scorecard.png

Everything runs on one simulated machine, Llama-2-7B on an A10G, whose KV cache has 15,760 tokens: tight. What a
scheduler may know of a request is what a server knows: its prompt, its client, its limit (``max_new_tokens``), and what
it has generated so far. How long the answer will be is in no request; names and ids are drawn anew for every run.

The three measures, each of one run, from 0 to 1:

``goodput``         share of the requests that were good: first token within 3 s, and at most 0.12 s an output token
``fairness_gap``    how much less the worst-served client got of what it is entitled to than the best-served one
``preemption_tax``  share of the executed tokens that preemptions have cost

    score of a workload = 100 x (goodput - fairness gap / 2 - preemption tax)

The score of a card is the mean over the workloads, each drawn twice. What counts is the *gain*: how much of what the
reference lacks to 100 a card has got back. It is worth points from :data:`LEAST` on and all of them from :data:`FULL`
on, if no workload loses more than :data:`TOLERANCE` points of score, and nobody waits for a token longer than
:data:`LONGEST_WAIT`. The same scheduler's gain differs from seed to seed by about 0.05.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from minibatch.arrival_processes import ArrivalProcess, Gamma, OnOff
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.cost_model import CostModel
from minibatch.distributions import Lengths, LogNormal, Uniform
from minibatch.engine import Engine
from minibatch.gpus import GPUS
from minibatch.kv_cache import KVCache
from minibatch.labs import scorecard_plot
from minibatch.metrics import COMPLETED, gaps
from minibatch.model_shapes import MODELS
from minibatch.models.simulated_model import END, SimulatedModel
from minibatch.open_loop import Client, clients
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Plan, Scheduler
from minibatch.policies import FCFS, Fair, Order
from minibatch.request import Request, RequestState
from minibatch.trace import StepCounts, Timeline, Trace
from minibatch.workloads import Workload

Parts = Callable[[], tuple[Order, Scheduler]]

PUBLISHED = Path(__file__).with_name("scorecard_reference.json")
COST = CostModel(MODELS["llama-2-7b"], GPUS["a10g"])
BLOCK, NUM_BLOCKS = 16, 985  # what 0.9 of the GPU's memory has room for
TTFT, TPOT = 3.0, 0.12  # seconds: what a good request keeps to
LONGEST_WAIT = 25.0  # seconds to a token: whoever waits longer has been starved
LEAST, FULL = 0.2, 0.65  # the gain from which on there are points, and that which is worth all of them
TOLERANCE = 15.0  # points of score that a workload may lose
DRAWS = 2  # of each workload
MOST = 20_000  # iterations; a run has about 1,500


def parts() -> tuple[Order, Scheduler]:
    """A new order of the queue and a new scheduler, for one run on the machine of the scorecard."""
    return Fair(), ChunkedPrefill(token_budget=256)


def reference() -> tuple[Order, Scheduler]:
    """What is to be beaten: first come, first served; a watermark, as vLLM had in V0; the newest is
    preempted, and recomputed; a budget about as large as suits machine and objectives best."""
    return FCFS(), ChunkedPrefill(token_budget=256)


# --- workloads: name -> what is hard about it; and of each client, for 40 s: arrivals, lengths, limit ---

CHAT = LogNormal(150, 400, 1000), LogNormal(60, 160, 400)
SHORT = LogNormal(80, 200, 400), LogNormal(60, 160, 400)
TASK = LogNormal(250, 500, 800), LogNormal(90, 180, 300)
ANSWER = LogNormal(80, 200, 400), LogNormal(250, 600, 1000)
DOCUMENT = Uniform(2000, 3500), LogNormal(60, 120, 300)
MIXED = LogNormal(250, 700, 1500), LogNormal(100, 250, 600)
SECONDS = 40.0

WORKLOADS: dict[str, tuple[str, list[tuple[ArrivalProcess, tuple[Lengths, Lengths], int]]]] = {
    "bursts": ("short chats, 27 a second for 4 s, then none for 9 s", [(OnOff(27, 4, 9), CHAT, 512)]),
    "flood": (
        "one client sends 5.5 requests a second, four others 0.4 each",
        [(Gamma(5.5, 0.7), TASK, 512), *[(Gamma(0.4, 0.7), TASK, 512)] * 4],
    ),
    "answers": (
        "two clients with short questions and long answers, which outgrow the memory",
        [(Gamma(1.7, 0.5), ANSWER, 2048)] * 2,
    ),
    "documents": (
        "a client with short prompts beside one with prompts of 2,000 to 3,500 tokens",
        [(Gamma(2.3, 0.7), SHORT, 512), (Gamma(0.8, 0.2), DOCUMENT, 512)],
    ),
    "steady": (
        "four clients with a mix that the reference serves well: do no harm",
        [(Gamma(0.9, 0.7), MIXED, 1024)] * 4,
    ),
}


def workload(name: str, seed: int, draw: int = 0) -> Workload:
    """One draw of a workload. Names of clients and ids of requests are drawn too, and say nothing."""
    entropy = (seed, list(WORKLOADS).index(name), draw)
    rng = np.random.default_rng(entropy)
    asked = WORKLOADS[name][1]
    codes = rng.permutation(10_000)[: len(asked)]
    several = [
        Client(f"client {code:04}", arrivals, *lengths, duration=SECONDS, max_tokens=limit)
        for code, (arrivals, lengths, limit) in zip(codes, asked, strict=True)
    ]
    drawn = clients([several[i] for i in rng.permutation(len(several))], int(rng.integers(2**32)))
    ids = rng.permutation(10_000)[: len(drawn)]
    renamed = [replace(request, request_id=f"{code:04}") for request, code in zip(drawn.requests, ids, strict=True)]
    return Workload(renamed, name, seed)


# --- a run ---


class Served(SimulatedModel):
    """It alone knows where an answer ends: requests do not say it. And it notes what it computes, out of the reach of
    policies.

    ``times``     of each request, when its tokens came
    ``executed``  tokens; ``lost``: those of them that had been computed before, and those that were copied to the host
    """

    def __init__(self, given: Workload) -> None:
        super().__init__(COST)
        self._lengths = given.output_lengths
        self.times: dict[str, list[float]] = {name: [] for name in self._lengths}
        self.executed = self.lost = 0
        self._reached: dict[str, int] = {}
        self._emitted: list[str] = []

    def forward(self, plan: Plan, kv: KVCache, store: object) -> dict[RequestState, int]:
        for request, start, stop in plan.chunks:
            before = self._reached.get(request.request_id, 0)
            self.executed += stop - start
            self.lost += max(min(stop, before) - start, 0)
            self._reached[request.request_id] = max(stop, before)
        self.lost += sum(change.request.num_computed for change in plan.preemptions if change.swap)
        emitting = [request for request, _, stop in plan.chunks if stop == request.num_tokens]
        self._emitted = [request.request_id for request in emitting]
        return {request: self._next(request) for request in emitting}

    def _next(self, request: RequestState) -> int:
        ends = len(request.generated) + 1 == self._lengths[request.request_id]
        return END if ends else (request.generated or request.prompt)[-1] + 1

    def note(self, time: float) -> None:
        """The iteration has ended."""
        for name in self._emitted:
            self.times[name].append(time)

    def trace(self, given: Workload) -> Trace:
        """The run as it was noted: of each request its arrival and its tokens."""
        meta = {"executed": self.executed, "lost": self.lost}
        return Trace(meta, [], [self._timeline(request) for request in given.requests])

    def _timeline(self, request: Request) -> Timeline:
        name, times = request.request_id, self.times[request.request_id]
        most = request.params.max_tokens
        made = Timeline(name, request.client, 0, len(request.prompt), most, request.arrival_time, None, times)
        if len(times) == self._lengths[name]:
            made.finish, made.finish_reason = times[-1], "stop"
        return made


class Endless(RuntimeError):
    """A run has far more iterations than the work can need."""


def machine(given: Workload, order: Order, scheduler: Scheduler) -> Engine:
    """The engine of one run, before it. It keeps a light trace."""
    memory = PagedKVCache(NUM_BLOCKS, BLOCK)
    return Engine(Served(given), scheduler, memory, order=order, meta=given.meta, record_steps=False)


def run(engine: Engine, given: Workload) -> Trace:
    """The run as the model has noted it. Raises what engine and parts raise, or Endless."""

    def note(record: StepCounts) -> None:
        engine.model.note(record.end)
        if engine.trace.num_steps >= MOST:
            raise Endless(f"{MOST:,} iterations, and {len(engine.life.live)} of {len(given)} requests have not ended")

    engine.run([replace(request, output_length=None) for request in given.requests], on_step=note)
    return engine.model.trace(given)


# --- measures ---


def is_good(timeline: Timeline) -> bool:
    """Completed, first token at most TTFT after the arrival, mean gap between its tokens at most TPOT."""
    if timeline.finish_reason not in COMPLETED or timeline.token_times[0] - timeline.arrival > TTFT:
        return False
    between = gaps(timeline)
    return not between.size or bool(between.mean() <= TPOT)


def goodput(trace: Trace) -> float:
    """Share of all submitted requests that were good."""
    return float(np.mean([is_good(timeline) for timeline in trace.timelines]))


def fairness_gap(trace: Trace) -> float:
    """Satisfaction of the best-served client minus that of the worst-served; 0 with one client.

    A client is entitled to what it asks for, but to no more than an equal share: all requests divided by the number of
    clients. Its satisfaction is its good requests divided by what it is entitled to, at most 1. So a client that floods
    the server cannot complain that it gets less of its flood than modest clients of their few requests, and they can,
    if they get no more than it does.
    """
    asked: dict[str, list[bool]] = {}
    for timeline in trace.timelines:
        asked.setdefault(timeline.client, []).append(is_good(timeline))
    equal = len(trace.timelines) / len(asked)
    satisfied = [min(1.0, sum(good) / min(len(good), equal)) for good in asked.values()]
    return max(satisfied) - min(satisfied)


def preemption_tax(trace: Trace) -> float:
    """Tokens whose K/V preemptions have cost, recomputed or copied to the host, as a share of all executed tokens."""
    return trace.meta["lost"] / max(1, trace.meta["executed"])


def waited(timeline: Timeline) -> float:
    """Seconds, at most, that a request waited for its next token, the first from its arrival; 0 if it has none."""
    return max(map(float, np.diff([timeline.arrival, *timeline.token_times])), default=0.0)


def longest_wait(trace: Trace) -> float:
    """Of whoever waited longest for a token."""
    return max(map(waited, trace.timelines))


WEIGHTS = {"goodput": 1.0, "fairness_gap": -0.5, "preemption_tax": -1.0}
MEASURES = {"goodput": goodput, "fairness_gap": fairness_gap, "preemption_tax": preemption_tax}


def measure(trace: Trace) -> dict[str, float]:
    """The three measures, the score, and the longest wait, of one run."""
    values = {name: of(trace) for name, of in MEASURES.items()}
    score = 100 * sum(WEIGHTS[name] * value for name, value in values.items())
    return {"score": score, **values, "longest_wait": longest_wait(trace)}


def card(serve: Callable[[Workload], Trace], seed: int) -> pd.DataFrame:
    """A row a workload: the means over the draws, of the longest wait the maximum."""
    rows = {}
    for name in WORKLOADS:
        draws = pd.DataFrame([measure(serve(workload(name, seed, draw))) for draw in range(DRAWS)])
        rows[name] = {**draws.mean(), "longest_wait": draws["longest_wait"].max()}
    return pd.DataFrame.from_dict(rows, orient="index")


def served_by(make: Parts) -> Callable[[Workload], Trace]:
    return lambda given: run(machine(given, *make()), given)


@dataclass(frozen=True)
class Cards:
    """Yours beside the reference's."""

    mine: pd.DataFrame
    theirs: pd.DataFrame

    def __repr__(self) -> str:
        return scorecard_plot.table(self.mine, self.theirs, gain(self.mine, self.theirs))

    def figure(self) -> Figure:
        return scorecard_plot.figure(self.mine, self.theirs)


def cards(make: Parts, seed: int = 0) -> Cards:
    """Raises what the parts raise."""
    return Cards(card(served_by(make), seed), reference_card(seed))


@lru_cache
def reference_card(seed: int) -> pd.DataFrame:
    """That of the students' seed is published beside this file, so that nobody waits for it; a test says that it is
    what :func:`reference` gets."""
    if seed == 0:
        return pd.read_json(PUBLISHED, orient="index")
    return card(served_by(reference), seed)


def gain(mine: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """Of what the second card lacks to a mean score of 100, the share that the first has got back; negative: lost."""
    return float((mine["score"] - theirs["score"]).mean() / (100 - theirs["score"].mean()))


def share_of_points(gained: float) -> float:
    """What a gain is worth: nothing up to LEAST, everything from FULL on, evenly in between."""
    return float(np.clip((gained - LEAST) / (FULL - LEAST), 0.0, 1.0))
