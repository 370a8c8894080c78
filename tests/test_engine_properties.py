"""Every invariant, after every step, on random workloads, schedulers, caches and policies: the engine's strongest test.

The oracle of the tokens shares nothing with the engine: ``continuation`` hashes a plain list, as the toy model is meant
to when every row, position and neighbour is right. For drawn tokens it is a solo run, with the seed of that answer.

Everything random is made by functions that are given ``pick``, which chooses one of a sequence: Hypothesis chooses in
the state machine, a seeded generator in the sweep that shows that the rare events really happen.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from helpers import ask, check_drained, check_invariants, continuation, poison_unused_rows, solo
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    StaticBatching,
    ToyModel,
)
from minibatch.policies import (
    FCFS,
    ByTokensLeft,
    Fair,
    Forecast,
    LongestPrefix,
    Never,
    Optimistic,
    Priority,
    Recompute,
    ReserveMaximum,
    RoundRobin,
    ShortestFirst,
    Swap,
    Watermark,
    by_priority,
    least_progress_lost,
    lowest_priority,
    most_blocks,
    newest,
)
from minibatch.policies.predictors import Noisy, Oracle, like_its_prompt
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import RequestRefused
from minibatch.trace import StepReport

Pick = Callable[[Sequence[Any]], Any]

VOCAB, SLOT = 32, 24
VICTIMS = (newest, lowest_priority, most_blocks, least_progress_lost)
RANKS = (None, by_priority, ByTokensLeft())
ORDERS: dict[str, Callable[[], Any]] = {
    "strict": FCFS,
    "lookahead": lambda: FCFS(lookahead=2),
    "patient": lambda: FCFS(lookahead=4, patience=5.0),
    "priority": Priority,
    "ageing": lambda: Priority(ageing=4.0),
    "shortest": ShortestFirst,
    "shortest, guess": lambda: ShortestFirst(like_its_prompt),
    "shortest, noise": lambda: ShortestFirst(Noisy(sigma=1.0, seed=1)),
    "shortest, oracle": lambda: ShortestFirst(Oracle({f"q{i}": 3.0 for i in range(9)})),
    "prefix": lambda: LongestPrefix(window=3),
    "prefix, patient": lambda: LongestPrefix(window=4, patience=6.0),
    "round-robin": RoundRobin,
    "fair": Fair,
    "fair, weights": lambda: Fair({"x": 3.0, "y": 0.5}, input_weight=0.5),
    "fair, no lift": lambda: Fair(output_weight=1.0, lift=False),
}


def make_admission(pick: Pick) -> Any:
    return pick(
        [
            *(Watermark(share, whole) for share in (0.0, 0.01, 0.2, 0.5) for whole in (True, False)),
            *[ReserveMaximum()] * 2,
            *(Forecast(), Forecast(like_its_prompt), Forecast(Noisy(sigma=0.7))),
            *[Optimistic()] * 3,
        ]
    )


def make_preemption(pick: Pick, admission: Any) -> Any:
    if isinstance(admission, ReserveMaximum) and pick([True, False]):
        return Never()
    victim, displaces = pick(VICTIMS), pick(RANKS)
    if pick([True, False]):
        return Recompute(victim, displaces)
    return Swap(victim, displaces, host_tokens=pick([5, 12, 1000]))


def make_scheduler(pick: Pick) -> Any:
    kind = pick(["static", "continuous", "continuous", "chunked", "chunked"])
    if kind == "static":
        return StaticBatching(pick([1, 2, 4]), pick([0.0, 2.5]))
    policies = {"admission": make_admission(pick)}
    policies["preemption"] = make_preemption(pick, policies["admission"])
    if kind == "continuous":
        limits, order = (pick([1, 2, 3, 5]), pick([SLOT, 40])), (pick(["mixed", "prefill-first"]),)
        return ContinuousBatching(*limits, *order, pick(["decode", "prefill"]), **policies)
    return ChunkedPrefill(pick([1, 2, 5, 9, 12]), pick([1, 2, 3, 5]), pick([None, 1, 3]), **policies)


def make_cache(pick: Pick) -> Any:
    kind = pick([ContiguousKVCache, PagedKVCache, PagedKVCache, PrefixCachedKVCache, PrefixCachedKVCache])
    if kind is ContiguousKVCache:
        return ContiguousKVCache(pick([1, 2, 4]), SLOT)
    size = pick([1, 2, 3, 5])
    return kind(-(-SLOT // size) + pick([0, 1, 3, 8]), size)


def make_request(pick: Pick, number: int, arrival: float | None) -> Request:
    """One of a small family: prompts begin alike, up to the last token or two, and several are the same."""
    size, family, own = pick(range(1, SLOT // 2 + 1)), pick([0, 0, 1]), pick([0, 0, 1, 2, SLOT])
    shared = max(size - own, 0)
    prompt = [(11 * family + i * i) % VOCAB for i in range(shared)]
    prompt += [(7 * (number % 4) + i) % VOCAB for i in range(size - shared)]
    params = {"max_tokens": pick(range(1, SLOT // 2 + 1)), "n": pick([1, 1, 1, 2, 3])}
    params |= pick([{}, {"temperature": 1.0, "seed": 7 * pick([0, 1])}])
    return Request(
        prompt,
        SamplingParams(**params),
        f"q{number}",
        arrival,
        priority=pick([0, 1, 1, 2]),
        client=pick(["x", "y", "z"]),
        cache_salt=pick([None, None, None, "salt"]),
    )


def keeps_arrival_order(engine: Engine) -> bool:
    """Whether nobody may overtake anybody, if all are equally urgent: strict FCFS, and the newest are the victims."""
    if repr(engine.queue) != "FCFS()":
        return False
    preemption = getattr(engine.scheduler, "preemption", Never())
    return isinstance(preemption, Never) or (preemption.victim is newest and preemption.displaces is None)


# ---------------------------------------------------------------- the oracle


@functools.cache
def alone(prompt: tuple[int, ...], eos: int | None, seed: int | None) -> tuple[int, ...]:
    """The first tokens after a prompt: the most likely ones, or those drawn with a seed."""
    if seed is None:
        return continuation(prompt, SLOT, eos, VOCAB)
    params = SamplingParams(max_tokens=SLOT, temperature=1.0, seed=seed)
    return solo(Request(prompt, params), ToyModel(VOCAB, eos))


def expected(request: Request, index: int, eos: int | None) -> tuple[int, ...]:
    """All tokens of an answer to a request."""
    seed = request.params.seed
    tokens = alone(tuple(request.prompt), eos, None if seed is None else seed + index)
    return tokens[: request.params.max_tokens]


def check_tokens(engine: Engine, request: Request, eos: int | None) -> None:
    """Each answer of an ended request has the tokens of a solo run, or their beginning."""
    result = engine.results[request.request_id]
    answers = result.samples or (result,)
    assert len(answers) == request.params.n
    for index, answer in enumerate(answers):
        tokens = expected(request, index, eos)
        if answer.finish_reason in ("stop", "length"):
            assert answer.tokens == tokens, f"{answer.request_id} does not have the tokens of its solo run"
            assert (answer.finish_reason == "stop") == (eos is not None and tokens[-1] == eos)
        else:
            assert answer.tokens == tokens[: len(answer.tokens)], f"{answer.request_id} began otherwise than alone"


# ---------------------------------------------------------------- what happened


class Happenings:
    """Counts the rare events of one run."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.counts, self.known = engine, Counter(), set()

    def after(self, step: StepReport) -> None:
        reasons, counts = dict(step.waiting), self.counts
        for change in step.preempted:
            counts["swap" if change.swapped else "recompute"] += 1
            if "outranks" in reasons.get(change.request_id, ""):
                counts[
                    f"displaced, {getattr(self.engine.scheduler.preemption.displaces, '__name__', 'ByTokensLeft')}"
                ] += 1
            elif getattr(self.engine.scheduler.preemption, "host_tokens", 0) and not change.swapped:
                counts["host full"] += 1
        counts["swapped in"] += sum(change.swapped_in > 0 for change in step.admitted)
        counts["prefix hit"] += sum(change.cached > 0 and not change.resumed for change in step.admitted)
        counts["own prefix found again"] += sum(change.cached > 0 and change.resumed for change in step.admitted)
        counts["fork"] += len(step.forked)
        counts["copy on write"] += step.copied_rows > 0
        if isinstance(self.engine.kv, PrefixCachedKVCache):
            known = set(self.engine.kv.pool.known())
            counts["eviction"] += len(self.known - known)
            self.known = known


# ---------------------------------------------------------------- the state machine


@functools.cache
def below(number: int) -> st.SearchStrategy[int]:
    """Made once for each number: making a strategy takes longer than drawing from it."""
    return st.integers(0, number - 1)


def picks(draw: Any) -> Pick:
    return lambda options: options[draw(below(len(options)))]


@st.composite
def engines(draw):
    """Scheduler, cache, order."""
    pick = picks(draw)
    return make_scheduler(pick), make_cache(pick), ORDERS[pick(list(ORDERS))]()


@st.composite
def bursts(draw):
    """Requests, and how long from now they arrive; they get their ids when they are submitted."""
    pick = picks(draw)
    delays = [None, None, 0.0, 0.5, 3.0, 40.0]
    return [(make_request(pick, pick(range(4)), None), pick(delays)) for _ in range(pick(range(1, 6)))]


class EngineMachine(RuleBasedStateMachine):
    """Requests of all sizes come, are aborted and read, while the engine steps."""

    @initialize(
        parts=engines(),
        eos=st.sampled_from([None, 3]),
        max_queue=st.sampled_from([None, None, 3]),
        equal=st.booleans(),
    )
    def start(self, parts, eos, max_queue, equal):
        scheduler, cache, order = parts
        self.eos, self.equal = eos, equal
        self.engine = Engine(ToyModel(VOCAB, eos), scheduler, cache, order=order, max_queue=max_queue, seed=0)
        self.fcfs = equal and keeps_arrival_order(self.engine)
        self.happenings = Happenings(self.engine)
        self.submitted: dict[str, Request] = {}
        self.refused: set[str] = set()
        self.streams: dict[str, tuple] = {}
        self.read: dict[str, list[int]] = {}
        event(f"{type(scheduler).__name__} on {type(cache).__name__}")

    def _take(self, request, delay):
        """The request under an id of its own, now or later, and as urgent as all others if they are to be equal."""
        changes = {"request_id": f"q{len(self.submitted)}", "priority": 1 if self.equal else request.priority}
        if delay is not None:
            changes["arrival_time"] = self.engine.clock.now() + delay
        request = self.submitted[changes["request_id"]] = replace(request, **changes)
        return request

    def _step(self):
        poison_unused_rows(self.engine)
        report = self.engine.step()
        if report is None:
            check_drained(self.engine)
        else:
            check_invariants(self.engine, report, fcfs=self.fcfs)
            self.happenings.after(report)
        return report

    @rule(burst=bursts())
    def submit(self, burst):
        for request, delay in burst:
            request = self._take(request, delay)
            try:
                self.engine.submit(request)
            except RequestRefused:
                self.refused.add(request.request_id)
        check_invariants(self.engine, fcfs=self.fcfs)

    @rule(size=st.sampled_from([0, SLOT + 1, 200]), bad=st.booleans())
    def submit_impossible(self, size, bad):
        before = len(self.engine.queue), len(self.engine.active), self.engine.kv.num_free
        prompt = [VOCAB] if bad else [0] * (size + 200 * bool(size))
        with pytest.raises(RequestRefused):
            self.engine.submit(Request(prompt, SamplingParams(max_tokens=4)))
        assert (len(self.engine.queue), len(self.engine.active), self.engine.kv.num_free) == before

    @rule(burst=bursts())
    def open_stream(self, burst):
        request = replace(burst[0][0], params=replace(burst[0][0].params, n=1))
        request = self._take(request, None)
        try:
            self.streams[request.request_id] = self.engine.stream(request)
            self.read[request.request_id] = []
        except RequestRefused:
            self.refused.add(request.request_id)

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 99))
    def read_stream(self, pick):
        name = sorted(self.streams)[pick % len(self.streams)]
        delta = next(self.streams[name])
        self.read[name] += delta.tokens
        if delta.finish_reason is not None:
            assert tuple(self.read[name]) == self.engine.results[name].tokens
            assert next(self.streams.pop(name), None) is None

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 99))
    def close_stream(self, pick):
        self.streams.pop(sorted(self.streams)[pick % len(self.streams)]).close()

    @precondition(lambda self: self.submitted)
    @rule(pick=st.integers(0, 99), answer=st.sampled_from([None, None, 0, 1, 2]))
    def abort(self, pick, answer):
        """Of a request, with all its answers, or of one answer."""
        name = sorted(self.submitted)[pick % len(self.submitted)]
        lives = name not in self.engine.results and name not in self.refused
        if answer is not None:
            lives &= 1 < self.submitted[name].params.n > answer
            name = f"{name}#{answer}"
            lives &= name not in self.engine.results
        assert self.engine.abort(name) is lives
        check_invariants(self.engine, fcfs=self.fcfs)

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            if self._step() is None:
                break

    @invariant()
    def tokens_are_a_prefix_of_solo(self):
        for state in [*self.engine.active, *self.engine.queue]:
            name, _, index = state.request_id.partition("#")
            tokens = expected(self.submitted[name], int(index or 0), self.eos)
            assert tuple(state.generated) == tokens[: len(state.generated)]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if self._step() is None:
                break
        else:
            raise AssertionError("requests displace each other for ever")
        for what in sorted(+self.happenings.counts):
            event(what)
        for name, request in self.submitted.items():
            if name in self.refused:
                assert name not in self.engine.results
            else:
                check_tokens(self.engine, request, self.eos)
        reasons = [timeline.finish_reason for timeline in self.engine.trace.timelines]
        assert None not in reasons, "a request has no end"


EngineMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = EngineMachine.TestCase


class LongEngineMachine(EngineMachine):
    """The same, for longer."""


LongEngineMachine.TestCase.settings = settings(
    max_examples=800, stateful_step_count=50, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineForLong = pytest.mark.slow(LongEngineMachine.TestCase)


# ---------------------------------------------------------------- the sweep


def run_at_random(rng: Random) -> Happenings:
    """A run of some requests, with every invariant checked after every step."""
    pick = rng.choice
    scheduler, cache = make_scheduler(pick), make_cache(pick)
    order, eos, equal = ORDERS[pick(list(ORDERS))](), pick([None, 3]), pick([True, False])
    engine = Engine(ToyModel(VOCAB, eos), scheduler, cache, order=order, seed=0)
    fcfs = equal and keeps_arrival_order(engine)
    happenings, requests = Happenings(engine), {}
    for number in range(pick(range(3, 14))):
        request = make_request(pick, number, pick(range(12)) / 2)
        if equal:
            request = replace(request, priority=0)
        with contextlib.suppress(RequestRefused):
            requests[engine.submit(request)] = request
    aborts = [(pick(range(20)), pick([*requests, "-"]) + pick(["", "", "#0", "#1"])) for _ in range(pick([0, 0, 2]))]
    for step in range(3000):
        for when, name in aborts:
            if when == step:
                engine.abort(name)
                check_invariants(engine, fcfs=fcfs)
        poison_unused_rows(engine)
        if (report := engine.step()) is None:
            break
        check_invariants(engine, report, fcfs=fcfs)
        happenings.after(report)
    check_drained(engine)
    for request in requests.values():
        check_tokens(engine, request, eos)
    return happenings


@pytest.mark.slow
def test_everything_that_the_properties_are_about_really_happens():
    """Fault: a generator so tame that nobody is ever preempted or swapped, nothing is found, shared, copied or evicted,
    or one of the policies never runs; then the properties above hold of nothing."""
    counts, texts = Counter(), []
    for seed in range(150):
        try:
            happenings = run_at_random(Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        counts += happenings.counts
        texts.append(f"{happenings.engine.scheduler} {happenings.engine.queue}")
    rare = ("recompute", "swap", "swapped in", "host full", "displaced, by_priority", "displaced, ByTokensLeft")
    shared = ("prefix hit", "own prefix found again", "eviction", "fork", "copy on write")
    assert min(counts[what] for what in (*rare, *shared)) >= 5, counts
    orders, admissions = {repr(make()) for make in ORDERS.values()}, ("Watermark", "ReserveMaximum", "Forecast")
    for name in (*orders, *admissions, "Optimistic", "Never", "Recompute", "Swap", *(v.__name__ for v in VICTIMS)):
        assert any(name in text for text in texts), f"{name} never ran"


# ---------------------------------------------------------------- what the machine has found


def test_rows_shared_with_a_dead_member_of_a_static_batch_are_filled():
    """Fault: the snapshot takes the shared rows off ``filled`` though the member that is listed first has none filled:
    they are reserved, for it has ended."""
    engine = Engine(ToyModel(), StaticBatching(2), PrefixCachedKVCache(6, 2))
    requests = [ask("before", [1, 2, 3], 1), ask("dead", [1, 2, 3], 1, at=1.0), ask("alive", [1, 2, 3], 3, at=1.0)]
    engine.run(requests)
    assert [step.kv.filled for step in engine.trace.steps] == [3, 4, 4, 5]


def test_an_answer_that_is_aborted_before_the_fork_gives_back_what_was_reserved_for_it():
    """Fault: blocks that nobody will ever write are held, and others wait for them."""
    engine = Engine(ToyModel(), ChunkedPrefill(2, 4, admission=ReserveMaximum()), PagedKVCache(6, 4))
    engine.submit(ask("r", 4, 4, at=None, n=3))  # 1 block for the prompt and 1 for each answer
    engine.step()
    assert engine.kv.num_free == 2
    engine.abort("r#1")
    assert engine.kv.num_free == 3
