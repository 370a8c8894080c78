"""Preempted, and back in the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.counterexample import CounterExample, expect
from minibatch.labs.facts import judge
from minibatch.labs.properties import for_all
from minibatch.labs.trial import Trial, alone, request, run, told
from minibatch.lifecycle import Lifecycle
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Preemption
from minibatch.policies import Priority, Recompute, Swap, by_priority, most_blocks
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import Request, RequestState, SamplingParams

ACTIVE = "It is active no more, and the others are: take out the victim, of the very list that the engine has."
WAITING = "It waits again, at the place that its arrival gives it: add it to the queue, it does not arrive anew."
MEMORY = "It gives up its place and its memory: all its blocks are free again."
ANSWER = "What it has generated stays: its user has read it. Only the K/V are lost."
COUNTED = "The timeline counts how often it has been preempted."
SWAPPED = "The timeline counts the tokens that were swapped, and only those."
STAYS = "Its stay among the active ends now: the timeline has [start, end] of every stay."
HIGH_WATER = "high_water stays: it tells computing again from computing for the first time."
ONCE = "Every token is given to the user once."
REPORT = "The report names the victim, for whom it goes, and how many computed tokens it had *before* that."
REPORTED_SWAP = "The report says whether the K/V were swapped or lost."
BACK = {  # by whether it was swapped
    True: "Swapped K/V come back, and only the newest token is computed.",
    False: "When it is back it computes its prompt and answer for the second time, but for the newest token.",
}
SAME = ("prompt", "rank", "num_tokens", "num_prompt", "num_cached", "last_scheduled", "arrival_time", "max_new_tokens")


def check(part: type[Lifecycle]) -> None:
    for kv, swap in ((PagedKVCache, False), (PagedKVCache, True), (PrefixCachedKVCache, False)):
        _one_victim(kv(9, 4), swap)
    _several_times(Recompute())
    _several_times(Swap())
    for_all(
        _nothing_is_lost,
        examples=25,
        sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4),
        way=st.sampled_from([Recompute(), Swap(), Swap(host_tokens=7), Recompute(victim=most_blocks)]),
        kind=st.sampled_from([PagedKVCache, PrefixCachedKVCache]),
    )
    _for_a_place(Recompute(displaces=by_priority))
    _for_a_place(Swap(displaces=by_priority))


# --- by hand: nobody needs the victim's memory, so it is back in the next iteration, and that shows what was kept ---


def _one_victim(kv: KVCache, swap: bool) -> None:
    engine = Engine(ToyModel(), ContinuousBatching(3), kv)
    asked = {label: request(6, 9, first=i) for i, label in enumerate("abcd")}
    prefix = isinstance(kv, PrefixCachedKVCache)
    if prefix:  # then this leaves the first block of b in it
        engine.run([Request(asked["b"].prompt, SamplingParams(max_tokens=1), "z")])
    for label, each in asked.items():
        engine.submit(Request(each.prompt, each.params, label))
    for _ in range(4):
        engine.step()
    a, b, _ = engine.active
    case = (
        f"a, b and c run (6 + 9 tokens, 4 generated, 9 computed, 3 blocks of 4 each), d waits for a place; "
        f"{'prefix cache; ' if prefix else ''}preempt: b gives way to a, swap={swap}, now={engine.clock.now():g}"
    )
    joined, before = b.timeline.runs[0][0], _kept(b)
    engine.life.preempt(Preemption(b, a, swap), engine.clock.now())
    _afterwards(engine, b, swap, joined, before, case)
    _comes_back(engine, swap, 9 if swap else 8 if prefix else 0, f"{case}; then one more iteration")
    _same_answers(engine, asked, case)


def _kept(victim: RequestState) -> dict[str, Any]:
    """What a preemption does not change, beside what has a row of its own."""
    timeline = victim.timeline
    times = {"token_times": list(timeline.token_times), "scheduled": timeline.scheduled, "finish": timeline.finish}
    return {**{name: getattr(victim, name) for name in SAME}, **times, "finish_reason": victim.finish_reason}


def _afterwards(
    engine: Engine, victim: RequestState, swap: bool, joined: float, before: Mapping[str, Any], case: str
) -> None:
    computed = "Without swap nothing counts as computed any more: its K/V are gone."
    on_host = "Without swap nothing of it is in host memory."
    if swap:
        computed = "With swap what it has computed stays computed: its K/V are only in another place."
        on_host = "kv.host says of each swapped request how many of its tokens are in host memory."
    kept, life, host = 9 if swap else 0, victim.timeline, engine.kv.host
    changed = [name for name, value in _kept(victim).items() if value != before[name]]
    facts = (
        ("active", _labels(engine.active), ["a", "c"], ACTIVE),
        ("waiting", _labels(engine.queue), ["b", "d"], WAITING),
        ("status", victim.status.value, "waiting", "Who is in the queue is waiting: its status says so."),
        ("blocks held", engine.kv.num_held(victim), 0, MEMORY),
        ("tokens computed", victim.num_computed, kept, computed),
        ("on the host", {each.label: number for each, number in host.items()}, {"b": 9} if swap else {}, on_host),
        ("tokens generated", len(victim.generated), 4, ANSWER),
        ("highest computed", victim.high_water, 9, HIGH_WATER),
        ("times preempted", life.num_preemptions, 1, COUNTED),
        ("stays", list(map(list, life.runs)), [[joined, engine.clock.now()]], STAYS),
        ("tokens swapped", life.num_swapped, kept, SWAPPED),
        ("also changed", changed, [], "All else stays: it is the same request, and will go on where it was."),
    )
    judge(facts, case)


def _labels(requests: Iterable[RequestState]) -> list[str]:
    return [each.label for each in requests]


def _comes_back(engine: Engine, swap: bool, start: int, case: str) -> None:
    """``start``: of its tokens, the first one that is computed when it is back."""
    report = _step(engine, case)
    back = next((f"{m.start}:{m.stop}, {m.recomputed} again" for m in report.members if m.request_id == "b"), "nothing")
    gone = [f"{p.request_id} gives way to {p.by}, {p.num_tokens} tokens" for p in report.preempted]
    facts = (
        ("reported", gone, ["b gives way to a, 9 tokens"], REPORT),
        ("swapped", [p.swapped for p in report.preempted], [swap], REPORTED_SWAP),
        ("arrivals", list(report.arrived), [], "To wait again is not to arrive."),
        ("b computes", back, f"{start}:10, {9 - start} again", BACK[swap]),
        ("K/V on the host", report.kv.host, 0, "When it is back, nothing of it is in host memory."),
    )
    judge(facts, case, engine.trace.num_steps)


def _step(engine: Engine, case: str) -> Any:
    """The report of one more iteration, or None if nobody is left."""
    try:
        return engine.step()
    except Exception as error:
        idea = "The engine cannot go on with what the preemption has left behind."
        said = {"expected": "one more iteration", "happened": told(error)}
        raise CounterExample(idea, case=case, **said, picture=engine.trace) from error


def _same_answers(engine: Engine, asked: Mapping[str, Request], case: str) -> None:
    while _step(engine, case) is not None:
        pass
    idea = "A preemption may change when a token is made, never which."
    for label, each in asked.items():
        result = engine.results[label]
        expect(list(result.tokens), alone(each), what=f"tokens of {label}", case=case, idea=idea)
        given = len(result.timeline.token_times)
        expect(given, 9, what=f"tokens given to the user of {label}", case=case, idea=ONCE)
    expect(engine.kv.num_free, engine.kv.num_units, what="free blocks", case=case, idea="All memory is given back.")


# --- in runs of the engine ---


def _several_times(way: Recompute) -> None:
    """One of four is preempted twice."""
    trial = run([request(4, 16, first=i) for i in range(4)], ContinuousBatching(preemption=way), PagedKVCache(8, 4))
    counts = [trial.results[label].timeline.num_preemptions for label in "abcd"]
    trial.expect(counts, [0, 1, 1, 2], what="preemptions of a, b, c, d", idea=COUNTED)
    _check_timelines(trial)
    idea = "What one gives up the others use: it takes 33 iterations."
    trial.expect(trial.trace.num_steps, 33, what="iterations", idea=idea)


def _nothing_is_lost(sizes: list[tuple[int, int]], way: Recompute, kind: type[PagedKVCache]) -> None:
    asked = [request(p, g, first=i) for i, (p, g) in enumerate(sizes)]
    _check_timelines(run(asked, ContinuousBatching(preemption=way), kind(5, 3)))


def _for_a_place(way: Recompute) -> None:
    """On slots nobody grows, and somebody is displaced for a place."""
    asked = [request(3, 6, priority=1), request(3, 2, 2, first=1)]
    trial = run(asked, ContinuousBatching(1, preemption=way), ContiguousKVCache(2, 16), order=Priority())
    idea = "b has the place of a for two iterations."
    trial.expect(trial.emitted("a"), [1, 2, 5, 6, 7, 8], what="iterations in which a gets a token", idea=idea)
    _check_timelines(trial)


def _check_timelines(trial: Trial) -> None:
    reports = trial.trace.steps
    for label, result in trial.results.items():
        timeline = result.timeline
        joined = [step.start for step in reports for change in step.admitted if change.request_id == label]
        gone = [(step.start, p) for step in reports for p in step.preempted if p.request_id == label]
        ends = [*(time for time, _ in gone), timeline.finish]
        swapped = sum(p.num_tokens for _, p in gone if p.swapped)
        fresh = sum(m.prefill + m.decode for step in reports for m in step.members if m.request_id == label)
        for got, want, what, idea in (
            (timeline.num_preemptions, len(gone), "preemptions", COUNTED),
            (timeline.num_swapped, swapped, "swapped tokens", SWAPPED),
            (timeline.runs, list(zip(joined, ends, strict=False)), "stays", STAYS),
            (fresh, timeline.num_prompt + len(result.tokens) - 1, "first computed", HIGH_WATER),
            (len(timeline.token_times), len(result.tokens), "token times", ONCE),
        ):
            trial.expect(got, want, what=f"{what} of {label}", idea=idea)
