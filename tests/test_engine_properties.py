"""Every invariant, after every step, on random workloads, schedulers and caches: the engine's strongest test.

The oracle of the tokens shares nothing with the engine: ``continuation`` hashes a plain list, as the toy model is meant
to when every row, position and neighbour is right.
"""

from __future__ import annotations

import pytest
from helpers import check_drained, check_invariants, continuation
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
from minibatch.request import RequestRefused

VOCAB, SLOT = 32, 24


schedulers = st.one_of(
    st.builds(StaticBatching, st.integers(1, 4), st.sampled_from([0.0, 2.5])),
    st.builds(
        ContinuousBatching,
        st.integers(1, 5),
        st.integers(SLOT, 40),
        st.sampled_from(["mixed", "prefill-first"]),
        st.sampled_from(["decode", "prefill"]),
    ),
    st.builds(ChunkedPrefill, st.integers(1, 12), st.integers(1, 5), st.sampled_from([None, 1, 5])),
)
caches = st.one_of(
    st.builds(ContiguousKVCache, st.integers(1, 4), st.just(SLOT)),
    st.integers(1, 5).flatmap(
        lambda size: st.builds(PagedKVCache, st.integers(-(-SLOT // size), -(-SLOT // size) + 3), st.just(size))
    ),
)


class EngineMachine(RuleBasedStateMachine):
    """Requests of all sizes come, are aborted and read, while the engine steps."""

    @initialize(
        scheduler=schedulers, cache=caches, eos=st.sampled_from([None, 3]), max_queue=st.sampled_from([None, None, 3])
    )
    def start(self, scheduler, cache, eos, max_queue):
        self.eos = eos
        self.engine = Engine(ToyModel(VOCAB, eos_token_id=eos), scheduler, cache, max_queue=max_queue, seed=0)
        self.submitted: dict[str, Request] = {}
        self.refused: set[str] = set()
        self.streams: dict[str, tuple] = {}
        self.read: dict[str, list[int]] = {}
        event(f"{type(scheduler).__name__} on {type(cache).__name__}")

    def _request(self, size, new, delay):
        name = f"q{len(self.submitted)}"
        arrival = None if delay is None else self.engine.clock.now() + delay
        prompt = [(7 * len(self.submitted) + i) % VOCAB for i in range(size)]
        self.submitted[name] = Request(prompt, SamplingParams(max_tokens=new), name, arrival_time=arrival)
        return self.submitted[name]

    lengths = st.integers(1, SLOT // 2)
    delays = st.sampled_from([None, None, 0.0, 0.5, 3.0, 40.0])

    @rule(burst=st.lists(st.tuples(lengths, lengths, delays), min_size=1, max_size=5))
    def submit(self, burst):
        for size, new, delay in burst:
            request = self._request(size, new, delay)
            try:
                self.engine.submit(request)
            except RequestRefused:
                self.refused.add(request.request_id)

    @rule(size=st.sampled_from([0, SLOT + 1, 200]), bad=st.booleans())
    def submit_impossible(self, size, bad):
        before = len(self.engine.queue), len(self.engine.active), self.engine.kv.num_free
        prompt = [VOCAB] if bad else [0] * (size + 200 * bool(size))
        with pytest.raises(RequestRefused):
            self.engine.submit(Request(prompt, SamplingParams(max_tokens=4)))
        assert (len(self.engine.queue), len(self.engine.active), self.engine.kv.num_free) == before

    @rule(size=lengths, new=lengths)
    def open_stream(self, size, new):
        request = self._request(size, new, None)
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
    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        name = sorted(self.submitted)[pick % len(self.submitted)]
        ended = name in self.engine.results or name in self.refused
        assert self.engine.abort(name) is not ended

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            report = self.engine.step()
            if report is None:
                check_drained(self.engine)
                break
            check_invariants(self.engine, report)

    @invariant()
    def tokens_are_a_prefix_of_solo(self):
        for state in [*self.engine.active, *self.engine.queue]:
            assert tuple(state.generated) == continuation(state.prompt, len(state.generated), self.eos, VOCAB)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while (report := self.engine.step()) is not None:
            check_invariants(self.engine, report)
        check_drained(self.engine)
        event(f"preemptions: {any(timeline.num_preemptions for timeline in self.engine.trace.timelines)}")
        for name, request in self.submitted.items():
            if name in self.refused:
                assert name not in self.engine.results
                continue
            result = self.engine.results[name]
            alone = continuation(request.prompt, request.params.max_tokens, self.eos, VOCAB)
            if result.finish_reason in ("stop", "length"):
                assert result.tokens == alone
                assert (result.finish_reason == "stop") == (self.eos is not None and alone[-1] == self.eos)
            else:
                assert result.tokens == alone[: len(result.tokens)]
        reasons = [timeline.finish_reason for timeline in self.engine.trace.timelines]
        assert None not in reasons, "a request has no end"


EngineMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = EngineMachine.TestCase


class LongEngineMachine(EngineMachine):
    """The same, for longer."""


LongEngineMachine.TestCase.settings = settings(
    max_examples=1500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineForLong = pytest.mark.slow(LongEngineMachine.TestCase)
