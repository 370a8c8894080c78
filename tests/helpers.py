"""What the tests of the engine share: the four configurations, the solo oracles, and the invariants after every step.

    run_checked(engine, requests)   runs to the end with the invariants checked after each iteration
    drive(engine, before={3: f})    the same, one step at a time, calling f before step 3
    check_invariants(engine, report), check_drained(engine), check_solo(requests, results)

The toy's clock counts iterations, so step k (from 1) starts at time k - 1, and a request that has to be there before
step k arrives at k - 1.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

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
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import RequestState, Result
from minibatch.streaming import Delta
from minibatch.trace import StepReport, Timeline

CONFIGURATIONS = ("static", "continuous", "paged", "chunked")


# ---------------------------------------------------------------- engines and requests


def make_engine(
    configuration: str,
    model: Any = None,
    *,
    max_num_seqs: int = 4,
    token_limit: int = 64,
    token_budget: int = 8,
    max_chunk: int | None = None,
    num_slots: int = 4,
    slot_size: int = 16,
    num_blocks: int | None = None,
    block_size: int = 4,
    **options: Any,
) -> Engine:
    """One of the four configurations; by default all have the same 64 rows of cache."""
    if num_blocks is None:
        num_blocks = num_slots * slot_size // block_size
    scheduler = {
        "static": lambda: StaticBatching(max_num_seqs),
        "continuous": lambda: ContinuousBatching(max_num_seqs, token_limit),
        "paged": lambda: ContinuousBatching(max_num_seqs, token_limit),
        "chunked": lambda: ChunkedPrefill(token_budget, max_num_seqs, max_chunk),
    }[configuration]()
    contiguous = configuration in ("static", "continuous")
    kv = ContiguousKVCache(num_slots, slot_size) if contiguous else PagedKVCache(num_blocks, block_size)
    return Engine(ToyModel() if model is None else model, scheduler, kv, **options)


def ask(
    request_id: str, prompt: int | Sequence[int], max_tokens: int | None = 4, at: float | None = 0.0, **params: Any
) -> Request:
    """A request; a number as prompt stands for that many tokens, which differ from id to id."""
    if isinstance(prompt, int):
        start = sum(request_id.encode())
        prompt = [(start + 7 * i) % 100 for i in range(prompt)]
    return Request(prompt, SamplingParams(max_tokens=max_tokens, **params), request_id, at)


class ScriptedModel(ToyModel):
    """A toy that says what it is told: token i of the request with that prompt is ``scripts[prompt][i]``."""

    def __init__(self, scripts: Mapping[tuple[int, ...], Sequence[int]], **options: Any) -> None:
        super().__init__(**options)
        self.scripts = scripts

    def forward(self, plan: Any, kv: Any, store: Any) -> np.ndarray:
        logits, row = super().forward(plan, kv, store), 0
        for chunk in plan.chunks:
            row += chunk.num_logits
            script, index = self.scripts.get(tuple(chunk.request.prompt), ()), len(chunk.request.generated)
            if chunk.samples and index < len(script):
                logits[row - 1, script[index]] += 1000.0
        return logits


class FixedLogitsModel(ToyModel):
    """A toy whose logits are the same at every position, unless ``of`` gives others for a prompt."""

    def __init__(self, logits: Sequence[float], of: Mapping[tuple[int, ...], Sequence[float]] | None = None) -> None:
        super().__init__(vocab_size=len(logits))
        self.logits, self.of = logits, of or {}

    def forward(self, plan: Any, kv: Any, store: Any) -> np.ndarray:
        super().forward(plan, kv, store)
        rows = [[self.of.get(tuple(c.request.prompt), self.logits)] * c.num_logits for c in plan.chunks]
        return np.array([row for chunk in rows for row in chunk], dtype=float).reshape(-1, self.vocab_size)


# ---------------------------------------------------------------- oracles


_solo_runs: dict[tuple[Any, ...], tuple[int, ...]] = {}


def solo(request: Request, model: Any = None, max_model_len: int | None = None) -> tuple[int, ...]:
    """The tokens of the same request alone: one uncut prompt, one slot with room to spare."""
    if model is not None:
        return _solo(request, model, max_model_len)
    key = (tuple(request.prompt), repr(request.params), max_model_len)
    if key not in _solo_runs:
        _solo_runs[key] = _solo(request, ToyModel(), max_model_len)
    return _solo_runs[key]


def _solo(request: Request, model: Any, max_model_len: int | None) -> tuple[int, ...]:
    new = 256 if request.params.max_tokens is None else request.params.max_tokens
    size = len(request.prompt) + new + 3
    engine = Engine(model, ContinuousBatching(1, size), ContiguousKVCache(2, size), max_model_len=max_model_len)
    (result,) = engine.run([replace(request, arrival_time=None, request_id=None)])
    assert result.error is None, result.error
    return result.tokens


def cacheless(request: Request) -> tuple[int, ...]:
    """The greedy tokens of the plain toy, computed from the token list without engine, cache or rows."""
    return continuation(request.prompt, request.params.max_tokens)


def continuation(
    prompt: Sequence[int], num_tokens: int, eos: int | None = None, vocab_size: int = 256
) -> tuple[int, ...]:
    """What a toy model says after a prompt, from the list of its tokens alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        state = 0
        for position, token in enumerate(tokens):
            state = hash((state, position, token))
        logits = np.random.Generator(np.random.PCG64(state % 2**64)).standard_normal(vocab_size)
        tokens.append(int(logits.argmax()))
        if tokens[-1] == eos:
            break
    return tuple(tokens[len(prompt) :])


def check_solo(
    requests: Sequence[Request], results: Sequence[Result], model: Any = None, cut: Collection[str] = ()
) -> None:
    """Each request has run to its own end, with the tokens of a solo run.

    Those whose ids are in ``cut`` were refused or aborted: they have a beginning of these tokens.
    """
    assert len(requests) == len(results)
    for request, result in zip(requests, results, strict=True):
        name = request.request_id
        expected = ("abort", "rejected") if name in cut else ("stop", "length")
        assert result.finish_reason in expected, f"{name}: {result.finish_reason}, {result.error}"
        if result.finish_reason == "rejected":
            assert result.tokens == ()
            continue
        tokens = solo(request, model)
        if name in cut:
            tokens = tokens[: len(result.tokens)]
        assert result.tokens == tokens, f"{name} does not have the tokens of its solo run"


# ---------------------------------------------------------------- driving


def run_checked(engine: Engine, requests: Sequence[Request], *, fcfs: bool = True) -> list[Result]:
    """``engine.run`` with the invariants checked after every iteration and at the end."""

    def on_step(report: StepReport) -> None:
        check_invariants(engine, report, fcfs=fcfs)
        poison_unused_rows(engine)

    results = engine.run(requests, on_step)
    check_drained(engine)
    return results


def drive(
    engine: Engine, before: Mapping[int, Callable[[], object]] | None = None, most: int = 2000, *, fcfs: bool = True
) -> list[StepReport]:
    """Steps to the end, checking after each; ``before[k]`` is called before step k."""
    reports: list[StepReport] = []
    for k in range(1, most):
        if before and k in before:
            before[k]()
            check_invariants(engine, fcfs=fcfs)
        poison_unused_rows(engine)
        report = engine.step()
        if report is None:
            check_drained(engine)
            return reports
        check_invariants(engine, report, fcfs=fcfs)
        reports.append(report)
    raise AssertionError(f"still running after {most} steps")


def read(deltas: Iterator[Delta], most: int = 200) -> list[Delta]:
    """The rest of a stream, which must have an end."""
    read = list(islice(deltas, most))
    assert len(read) < most, "the stream does not end"
    return read


def poison_unused_rows(engine: Engine) -> None:
    """Takes the content out of every row that holds nobody's token: the toy fails if it reads one."""
    for row in unused_rows(engine):
        engine.store[row] = None


def unused_rows(engine: Engine) -> list[int]:
    """Rows whose content nobody may ever read again: neither a live token's nor of a block that can still be found."""
    in_use: set[int] = set()
    for state in engine.active:
        in_use.update(engine.kv.rows(state, 0, 0 if state.is_finished else state.num_computed).tolist())
    if isinstance(engine.kv, PrefixCachedKVCache):
        size = engine.kv.unit_size
        for known in engine.kv.pool.known():
            in_use.update(range(known.block * size, (known.block + 1) * size))
    return sorted(set(range(engine.kv.num_rows)) - in_use)


def names(changes: Sequence[Any]) -> tuple[str, ...]:
    """Of what a report says about admissions, preemptions or forks: who."""
    return tuple(change.request_id for change in changes)


def token_steps(engine: Engine, label: str) -> list[int]:
    """The numbers (from 1) of the steps that emitted this request's tokens."""
    return [
        s.index + 1 for s in engine.trace.steps for m in s.members if m.request_id == label and m.emitted is not None
    ]


def chunk_sizes(engine: Engine, label: str) -> list[int]:
    """How many tokens of the request each of its iterations computed."""
    return [m.stop - m.start for s in engine.trace.steps for m in s.members if m.request_id == label]


def timeline(engine: Engine, label: str) -> Timeline:
    (found,) = (t for t in engine.trace.timelines if t.request_id == label)
    return found


def num_rejected(engine: Engine) -> int:
    return sum(t.finish_reason == "rejected" for t in engine.trace.timelines)


# ---------------------------------------------------------------- invariants


@dataclass
class _Ledger:
    """The history of one engine, rebuilt from its reports alone. Keys are labels."""

    num_steps: int = 0
    timelines: dict[str, Timeline] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)  # leading tokens that are cached
    high_water: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    rank: dict[str, float] = field(default_factory=dict)  # in order of arrival
    host: dict[str, int] = field(default_factory=dict)  # tokens that are swapped out
    ran: set[str] = field(default_factory=set)  # have been active
    results: dict[str, Result] = field(default_factory=dict)
    holders: set[RequestState] = field(default_factory=set)  # have been active


_ledgers: weakref.WeakKeyDictionary[Engine, _Ledger] = weakref.WeakKeyDictionary()


def check_invariants(engine: Engine, report: StepReport | None = None, *, fcfs: bool = True) -> None:
    """Asserts everything that must hold between two iterations of any engine.

    Give ``report`` right after the step that returned it; without one (after a submit or an abort) only what is true at
    any time is checked. Iterations since the last call are caught up from the trace. ``fcfs`` False leaves out that
    the queue and the active requests are in order of arrival.
    """
    ledger = _ledgers.setdefault(engine, _Ledger())
    for known in engine.trace.timelines[len(ledger.timelines) :]:
        assert known.request_id not in ledger.timelines, f"two timelines of {known.request_id}"
        ledger.timelines[known.request_id] = known
    for step in engine.trace.steps[ledger.num_steps :]:
        _check_step(engine, step, ledger)
        ledger.num_steps += 1
    if report is not None:
        assert report is engine.trace.steps[-1], "the report is not the newest of the trace"
        assert report.num_waiting == len(engine.queue)
    _check_memory(engine)
    _check_room(engine, ledger)
    _check_states(engine, ledger)
    _check_places(engine, ledger, report)
    _check_results(engine, ledger)
    if fcfs:
        late = len(ledger.rank)
        order = [ledger.rank.get(s.label, late) for s in [*engine.active, *engine.queue]]
        assert order == sorted(order), "active and waiting requests are not in order of arrival"


def check_drained(engine: Engine) -> None:
    """Nothing is left, nothing leaks, and every request that was ever submitted has ended."""
    assert engine.step() is None
    check_invariants(engine)
    assert not engine.queue and not engine.active
    assert engine.kv.num_free == engine.kv.num_units, "units have leaked"
    assert not engine.kv.host, "host memory has leaked"
    assert not getattr(engine.store, "_host", None), "the store keeps somebody's K/V on the host"
    for known in engine.trace.timelines:
        assert known.finish_reason in ("stop", "length", "abort", "rejected"), f"{known.request_id} never ended"


def _check_step(engine: Engine, step: StepReport, ledger: _Ledger) -> None:
    """One iteration against all that went before it: limits, token kinds, positions, emitted tokens."""
    where = f"step {step.index + 1}: "
    assert step.index == ledger.num_steps, where + "reports are not numbered in order"
    assert step.start <= step.end, where + "ends before it starts"
    if ledger.num_steps:
        assert engine.trace.steps[ledger.num_steps - 1].end <= step.start, where + "overlaps the step before it"
    for label in step.arrived:
        assert label not in ledger.rank, where + f"{label} arrived twice"
        ledger.rank[label] = len(ledger.rank)
    ended_before = set(ledger.finished)
    for label, reason in step.finished:
        assert label not in ledger.finished, where + f"{label} ended twice"
        ledger.finished[label] = reason

    for label, by in ((p.request_id, p.by) for p in step.preempted):
        assert label in ledger.ran and label not in ledger.host, where + f"{label} was preempted but was not active"
        assert by in ledger.rank, where + f"{label} was preempted by {by}, which never came"
    for change in step.preempted:
        assert change.num_tokens == ledger.computed[change.request_id] > 0, where + f"{change.request_id} lost"
        if change.swapped:
            ledger.host[change.request_id] = change.num_tokens
        else:
            ledger.computed[change.request_id] = 0
    for change in step.admitted:
        label = change.request_id
        assert change.resumed == (label in ledger.ran), where + f"{label}: resumed"
        ledger.ran.add(label)
        if change.swapped_in:
            assert not change.cached and ledger.host.pop(label) == change.swapped_in, where + f"{label}: swapped in"
        else:
            assert not ledger.computed.get(label), where + f"{label} was admitted and had tokens computed"
            assert change.cached % engine.kv.unit_size == 0, where + f"{label}: part of a block is cached"
            ledger.computed[label] = change.cached
    for label, _ in step.finished:
        ledger.host.pop(label, None)  # it has ended while it was swapped out
    labels = [m.request_id for m in step.members]
    assert labels, where + "no progress: nothing was computed"
    assert len(set(labels)) == len(labels), where + "a request has two chunks"
    for member in step.members:
        label = member.request_id
        assert label not in ended_before, where + f"{label} was computed after its end"
        assert label in ledger.rank, where + f"{label} was computed before its arrival"
        assert label not in names(step.preempted), where + f"{label} was preempted and computed"
        assert label in ledger.ran, where + f"{label} was computed and never admitted"
        num_prompt, tokens = ledger.timelines[label].num_prompt, ledger.tokens.setdefault(label, [])
        num_tokens, high = num_prompt + len(tokens), ledger.high_water.get(label, 0)
        size = member.stop - member.start
        assert size >= 1, where + f"{label} has an empty chunk"
        assert member.start == ledger.computed.get(label, 0), where + f"{label} skips or repeats positions"
        assert member.stop <= num_tokens, where + f"{label} computes tokens that do not exist"
        assert member.recomputed == max(0, min(member.stop, high) - member.start), where + f"{label}: recomputed"
        fresh = range(member.start + member.recomputed, member.stop)
        assert member.prefill == sum(i < num_prompt for i in fresh), where + f"{label}: prefill"
        assert member.prefill + member.decode + member.recomputed == size, where + f"{label}: kinds do not add up"
        ledger.computed[label], ledger.high_water[label] = member.stop, max(high, member.stop)
        if member.emitted is None:
            broken = ledger.finished.get(label) == "abort"  # its logits were no distribution
            assert member.stop < num_tokens or broken, where + f"{label} reached its newest token but emitted none"
        else:
            assert member.stop == num_tokens, where + f"{label} emitted a token in the middle of its prompt"
            tokens.append(member.emitted)
            assert len(tokens) <= ledger.timelines[label].max_new_tokens, where + f"{label} emitted too many tokens"
            assert ledger.timelines[label].token_times[len(tokens) - 1] == step.end, where + f"{label}: token time"

    for fork in step.forked:
        label, parent = fork.request_id, fork.parent
        assert parent in labels and ledger.timelines[label].group == ledger.timelines[parent].group is not None
        assert ledger.computed[parent] == ledger.timelines[parent].num_prompt == ledger.timelines[label].num_cached
        assert label not in ledger.ran and not ledger.tokens.get(label), where + f"{label} forked twice"
        ledger.computed[label] = ledger.high_water[label] = ledger.computed[parent]
        ledger.rank[label] = ledger.rank[parent] + (1 + int(label.rsplit("#")[1].split("~")[0])) / 1e6
        ledger.ran.add(label)
        assert (fork.emitted is None) == (ledger.finished.get(label) == "abort"), where + f"{label} has no first token"
        if fork.emitted is not None:
            ledger.tokens[label] = [fork.emitted]
            assert ledger.timelines[label].token_times[0] == step.end, where + f"{label}: token time"

    for pad in step.padding:
        assert pad.num_tokens >= 1, where + "padding of nothing"
        expected = pad.request_id in ended_before or ledger.finished.get(pad.request_id) == "abort"
        assert expected if pad.dead else pad.request_id in labels, where + f"padding for {pad.request_id}"
    assert step.num_tokens == step.prefill + step.decode + step.recomputed + step.padded, where + "tokens executed"
    assert step.num_tokens == sum(m.stop - m.start for m in step.members) + sum(p.num_tokens for p in step.padding)
    if step.token_budget is not None:
        assert step.num_tokens <= step.token_budget, where + "above the token budget"
    assert step.token_budget == engine.scheduler.token_budget

    for label, reason in step.waiting:
        assert reason, where + f"{label} waits for no reason"
        assert label not in labels, where + f"{label} waits and runs"
    _check_snapshot(engine, step, ledger, ended_before, where)


def _check_snapshot(engine: Engine, step: StepReport, ledger: _Ledger, ended_before: set[str], where: str) -> None:
    kv, held = step.kv, [unit for h in step.kv.holdings for unit in h.units]
    size, distinct = engine.kv.unit_size, set(held)
    assert kv.capacity == engine.kv.num_rows
    parts = (kv.filled, kv.reserved, kv.fragmentation, kv.cached, kv.free)
    assert min(parts) >= 0 and sum(parts) == kv.capacity, where + f"rows do not add up: {parts}"
    assert kv.cached + kv.free + len(distinct) * size == kv.capacity, where + "units do not add up"
    assert kv.cached == 0 or isinstance(engine.kv, PrefixCachedKVCache)
    filled: dict[int, int] = {}
    for h in kv.holdings:
        for index, unit in enumerate(h.units):
            filled[unit] = max(filled.get(unit, 0), min(max(h.filled - index * size, 0), size))
    assert kv.filled == sum(filled.values()), where + "filled rows are not those of the holders, each counted once"
    if len(distinct) == len(held):
        for name in ("reserved", "fragmentation"):
            assert getattr(kv, name) == sum(getattr(h, name) for h in kv.holdings), where + name
    else:
        assert engine.kv.shares, where + "a unit has two owners"
    assert kv.host == sum(ledger.host.values()), where + "host rows"
    holders = [h.request_id for h in kv.holdings]
    assert {m.request_id for m in step.members} <= set(holders), where + "a member holds no memory"
    most = getattr(engine.scheduler, "max_num_seqs", getattr(engine.scheduler, "batch_size", None))
    assert most is None or len(holders) <= most, where + f"{len(holders)} active requests"
    for h in kv.holdings:
        assert min(h.filled, h.reserved, h.fragmentation) >= 0, where + f"{h.request_id} holds {h}"
        assert h.filled + h.reserved + h.fragmentation == len(h.units) * engine.kv.unit_size, where + h.request_id
        dead = h.request_id in ended_before or (
            ledger.finished.get(h.request_id) == "abort"
            and h.request_id not in {*names(step.members), *names(step.forked)}
        )
        assert h.filled == (0 if dead else ledger.computed.get(h.request_id, 0)), where + f"{h.request_id}: filled"


def _check_memory(engine: Engine) -> None:
    """Every unit is free or held, reference counts are right, and every row holds the token that it should."""
    kv, holders = engine.kv, Counter()
    for state in engine.active:
        units = kv.units(state)
        holders.update(units)
        assert all(0 <= unit < kv.num_units for unit in units), f"{state.label} holds {units} of {kv.num_units}"
        assert len(set(units)) == len(units) == kv.num_held(state), f"{state.label} holds a unit twice"
        assert len(units) * kv.unit_size >= state.num_computed, f"{state.label} has more tokens than rows"
        most = kv.need(state, state.max_cached_tokens)
        assert len(units) <= most, f"{state.label} holds more than it can ever need"
        rows = kv.rows(state, 0, state.num_computed).tolist()
        assert len(set(rows)) == len(rows), f"two tokens of {state.label} share a row"
        assert {row // kv.unit_size for row in rows} <= set(units), f"{state.label} uses rows of others"
        if isinstance(engine.model, ToyModel) and not state.is_finished:
            stored = [entry and entry[1:] for entry in (engine.store[row] for row in rows)]
            expected = list(enumerate(state.tokens(0, state.num_computed)))
            assert stored == expected, f"the cached tokens of {state.label} are not its own"
    for state in engine.queue:
        assert not kv.units(state), f"{state.label} waits and holds memory"
        assert state.num_computed == kv.host.get(state, 0), f"{state.label} waits and has tokens computed"
    assert set(kv.host) <= set(engine.queue), "somebody's K/V was forgotten on the host"
    assert kv.num_free + len(holders) == kv.num_units, "free and held units do not add up to the pool"
    assert kv.shares or max(holders.values(), default=1) == 1, "a unit has two owners"
    if isinstance(kv, PagedKVCache):
        assert kv.pool.references == [holders[block] for block in range(kv.num_units)], "reference counts"
        assert kv.pool.num_shares == sum(count - 1 for count in holders.values()), "shares"
    if isinstance(kv, PrefixCachedKVCache) and isinstance(engine.model, ToyModel):
        for known in kv.pool.known():
            depth, parent = 0, known.parent
            while parent is not None:
                depth, parent = depth + 1, parent.parent
            rows = range(known.block * kv.unit_size, (known.block + 1) * kv.unit_size)
            stored = [entry and entry[1:] for entry in (engine.store[row] for row in rows)]
            expected = list(enumerate(known.tokens, start=depth * kv.unit_size))
            assert stored == expected, f"block {known.block} can be found and does not hold its tokens"


def _check_room(engine: Engine, ledger: _Ledger) -> None:
    """What may be written without asking the cache is there, and nobody else's; who holds nothing has no room."""
    kv = engine.kv
    for state in engine.active:
        room, units = state.room, kv.units(state)
        assert 0 <= room <= len(units) * kv.unit_size, f"{state.label} may write {room} tokens and holds {len(units)}"
        if isinstance(kv, PagedKVCache) and not state.is_finished:
            to_write = units[state.num_computed // kv.unit_size : -(-room // kv.unit_size)]
            shared = [unit for unit in to_write if kv.pool.references[unit] != 1]
            assert not shared, f"{state.label} may write into the shared blocks {shared}"
    ledger.holders.update(engine.active)
    waiting = [*engine.queue, *(sibling for state in engine.active for sibling in state.siblings)]
    for state in [*ledger.holders.difference(engine.active), *waiting]:
        assert state.room == 0, f"{state.label} has given back its memory and may write {state.room} tokens"
    ledger.holders.intersection_update([*engine.active, *engine.queue])


def _check_states(engine: Engine, ledger: _Ledger) -> None:
    """What the engine knows about its live requests is what its reports have said."""
    for state in [*engine.active, *engine.queue]:
        label = state.label
        assert state.generated == ledger.tokens.get(label, []), f"{label}: generated"
        assert len(state.timeline.token_times) == len(state.generated), f"{label}: token times"
        if not state.is_finished:
            assert state.num_pending >= 1, f"{label} lives and has nothing pending"
            assert state.num_computed == ledger.computed.get(label, 0), f"{label}: num_computed"
            assert state.high_water == ledger.high_water.get(label, 0), f"{label}: high_water"
            assert len(state.generated) < state.max_new_tokens, f"{label} should have ended"


def _check_places(engine: Engine, ledger: _Ledger, report: StepReport | None) -> None:
    """Each submitted request is in exactly one place: arriving, waiting, active, or ended."""
    waiting = [state.label for state in engine.queue]
    active = [state.label for state in engine.active]
    places = waiting + active + [s.label for state in [*engine.queue, *engine.active] for s in state.siblings]
    assert len(set(places)) == len(places), "a request is in two places"
    states: list[RequestState] = [*engine.queue, *engine.active]
    for state in states:
        assert state.timeline is ledger.timelines[state.label], f"{state.label} has lost its timeline"
        assert (state.result is not None) == state.is_finished == (state.timeline.finish_reason is not None)
    assert not any(state.is_finished for state in engine.queue), "an ended request waits"
    if any(state.is_finished for state in engine.active):
        assert hasattr(engine.scheduler, "batch_size"), "an ended request has kept its place"
        assert not all(state.is_finished for state in engine.active), "a batch of the dead"
    for label, known in ledger.timelines.items():
        if known.finish_reason is None and label not in places:
            assert known.scheduled is None, f"{label} has run and is lost"
            assert report is None or known.arrival > report.start, f"{label} should have arrived"
        if label in ledger.finished:
            assert known.finish_reason == ledger.finished[label], f"{label} was reported to end otherwise"
        times = [known.arrival, known.scheduled, *known.token_times, known.finish]
        times = [t for t in times if t is not None]
        assert known.finish_reason == "rejected" or times == sorted(times), f"{label}: times out of order"


def _check_results(engine: Engine, ledger: _Ledger) -> None:
    """One Result a request, and it says what the reports have said."""
    for request_id, result in engine.results.items():
        if ledger.results.get(request_id) is result:
            continue
        ledger.results[request_id] = result
        known = result.timeline
        assert result.request_id == request_id
        if result.samples:
            assert [engine.results[sample.request_id] for sample in result.samples] == list(result.samples)
            assert all(sample.timeline.group == known.group for sample in result.samples)
            assert result.tokens == result.samples[0].tokens
            continue
        assert known is ledger.timelines[known.request_id], f"the timeline of {request_id} is not in the trace"
        assert result.finish_reason == known.finish_reason
        assert list(result.tokens) == ledger.tokens.get(known.request_id, []), f"{request_id}: tokens"
        assert len(known.token_times) == len(result.tokens)
        if result.finish_reason == "length":
            assert len(result.tokens) == known.max_new_tokens
