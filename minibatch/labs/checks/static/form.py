"""Checks of static.2: forming a rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.checks.static.batches import run_static
from minibatch.labs.plans import expect_plan, planned
from minibatch.labs.properties import for_all
from minibatch.labs.states import described, line_up, state
from minibatch.labs.trial import requests_of
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Admission, Chunk, Padding, Plan
from minibatch.policies.queueing import FCFS, Order, Priority
from minibatch.request import RequestState
from minibatch.static_batching import StaticBatching

RECTANGLE = "The prefill is a rectangle: left pads fill the shorter prompts up to the longest of the batch."
States = Sequence[RequestState]
ASKED = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5)


def check(part: type[StaticBatching]) -> None:
    _rectangles(part)
    _who_fits(part)
    _when_it_starts(part)
    limits = {
        "batch_size": st.integers(1, 4),
        "max_wait": st.integers(0, 16).map(lambda n: n / 4),
        "blocks": st.integers(5, 12),
    }
    for_all(lambda **drawn: _as_by_hand(part, **drawn), asked=ASKED, later=st.integers(0, 3), **limits)
    _starts([0, 2], [4, 4], "Two of three wait until the first has waited 4 s.")
    _starts([0, 2, 3], [3, 3, 3], "With the third the batch is full, and starts.")
    _starts([0, 1, 2, 3], [2, 2, 2, 7], "The fourth waits 4 s for others, or for the batch before: until 3 + 4.")


def _asks(*sizes: tuple[int, ...]) -> list[RequestState]:
    """Requests of (prompt, new tokens = 8, arrival = 0) each."""
    padded = [(*size, *(8, 0)[len(size) - 1 :]) for size in sizes]
    return [state("abcde"[i], prompt, new=new, arrival=at) for i, (prompt, new, at) in enumerate(padded)]


def _formed(
    part: type[StaticBatching],
    waiting: States,
    batch: States,
    idea: str,
    *,
    pads: str = RECTANGLE,
    now: float = 0.0,
    kv: KVCache | None = None,
    order: type[Order] = FCFS,
    wake_at: float | None = None,
    **settings: Any,
) -> None:
    """With these waiting, ``batch`` is to be formed now; if that is nobody, it is to be tried again at ``wake_at``.

    ``pads`` is the idea of a batch whose members are right and whose padding is not.
    """
    rows, kv = kv is not None, kv or ContiguousKVCache(8, 16)  # where memory is short, it matters how much is taken
    queue = line_up(order(), waiting)
    case = f"waiting{', by priority' if order is Priority else ''}: {described(waiting, new=True)}; t = {now:g}; "
    case += ", ".join(f"{name} {value:g}" for name, value in settings.items())
    case += f"; {kv.num_units} {kv.unit_name}s of {kv.unit_size}"
    scheduler = part(**settings)
    plan = planned(lambda: scheduler._form(queue, kv, now), queue, [], kv, case)
    longest = max((one.num_prompt for one in batch), default=0)
    want = Plan(
        tuple(Chunk(one, 0, one.num_prompt) for one in batch),
        tuple(Padding(one, longest - one.num_prompt, False) for one in batch if one.num_prompt < longest),
        tuple(Admission(one, one.max_cached_tokens) for one in batch),
        wake_at=wake_at,
    )
    say = partial(_idea, batch=batch, want=want, idea=idea, pads=pads)
    expect_plan(plan, want, case=case, idea=say, who=waiting, rows=rows)


def _idea(plan: Plan, batch: States, want: Plan, idea: str, pads: str) -> str:
    """What such a plan has got wrong, in general or in this case."""
    if not (plan.chunks or batch) and want.wake_at is not None:
        if plan.wake_at is None:
            return "A batch that waits has to say until when, in the plan's wake_at: else nobody asks again."
        return "The batch waits until its oldest has waited max_wait since it came: not since now, or the newest."
    if {chunk.request for chunk in plan.chunks} != set(batch):
        return idea
    if sorted(c[1:] for c in plan.chunks) != sorted(c[1:] for c in want.chunks):
        return "All prompts are computed whole, in this one iteration."
    if any(pad.num_tokens == 0 for pad in plan.padding):
        return "The longest prompt needs no padding, and a Padding of 0 tokens is none: leave it out."
    if any(pad.dead for pad in plan.padding):
        return "These are left pads of prompts that live: they are not dead."
    if sorted(p[1] for p in plan.padding) != sorted(p[1] for p in want.padding):
        return pads
    return "Rows are set aside for all that a request may become, P + G - 1: the last token is never fed back."


def _rectangles(part: type[StaticBatching]) -> None:
    abc = _asks((2,), (5,), (3,))
    _formed(part, abc, abc, RECTANGLE, batch_size=3)
    waiting = _asks((2,), (4,), (9,))
    idea = "A batch is padded to its own longest prompt, not to that of somebody who waits, or to a fixed length."
    _formed(part, waiting, waiting[:2], "At most batch_size requests, the first.", pads=idea, batch_size=2)
    _formed(part, waiting[:1], waiting[:1], "One request can be a batch.", pads=idea, batch_size=1)
    _formed(part, [], [], "With nobody to take there is no batch, and no error.", batch_size=2)


def _who_fits(part: type[StaticBatching]) -> None:
    """With six blocks of two."""
    idea = "A batch cannot be stopped once it runs: it takes those whose most rows, P + G - 1 each, fit together."
    waiting = _asks((3, 4), (2, 3), (1, 4))  # 3, 2 and 2 blocks
    _formed(part, waiting, waiting[:2], idea, batch_size=3, kv=PagedKVCache(6, 2))
    idea = "First come, first served: behind one who does not fit nobody is taken."
    waiting = _asks((3, 2), (6, 6), (1, 2))  # 2, 6 and 1 blocks
    _formed(part, waiting, waiting[:1], idea, batch_size=3, kv=PagedKVCache(6, 2))


def _when_it_starts(part: type[StaticBatching]) -> None:
    def two(idea: str, starts: bool = True, **how: Any) -> None:
        waiting = _asks((2, 4, 0), (3, 4, 2))
        waiting[0].request = state(priority=1 if "order" in how else 0).request
        how = {"batch_size": 3, "max_wait": 4, "now": 2, **how}
        _formed(part, waiting, waiting if starts else [], idea, wake_at=None if starts else 4, **how)

    two("A batch that is not full waits for more until its oldest has waited max_wait.", starts=False)
    two("When the oldest has waited max_wait, the batch starts, full or not.", now=4)
    two("A full batch does not wait.", batch_size=2)
    two("With max_wait 0 nobody is kept waiting for others.", max_wait=0)
    idea = "A batch that nobody else can join is full, whatever is missing: there is nothing to wait for."
    waiting = _asks((2, 4, 0), (3, 4, 2), (4, 4, 2))  # 3, 3 and 4 blocks
    _formed(part, waiting, waiting[:2], idea, batch_size=4, max_wait=4, now=2, kv=PagedKVCache(8, 2))
    two(idea, kv=ContiguousKVCache(2, 16))
    two(idea, kv=PagedKVCache(6, 2))
    idea = "The oldest is who came first, which need not be who is first in the queue."
    two(idea, starts=False, order=Priority)
    two(idea, order=Priority, now=4)


def _as_by_hand(
    part: type[StaticBatching], asked: list[tuple[int, ...]], batch_size: int, max_wait: float, blocks: int, later: int
) -> None:
    """With blocks of two."""
    waiting = _asks(*sorted(asked, key=lambda ask: ask[2]))
    batch: list[RequestState] = []
    left = blocks
    for one in waiting:
        need = (one.num_prompt + one.max_new_tokens) // 2  # half of P + G - 1, rounded up
        if len(batch) == batch_size or need > left:
            break
        batch.append(one)
        left -= need
    now, until = waiting[-1].arrival_time + later, waiting[0].arrival_time + max_wait
    full = len(batch) == batch_size or len(batch) < len(waiting) or left == 0
    how = {"now": now, "kv": PagedKVCache(blocks, 2), "batch_size": batch_size, "max_wait": max_wait}
    if full or now >= until:
        _formed(part, waiting, batch, "Full, or max_wait after the oldest came: then the batch starts.", **how)
    else:
        _formed(part, waiting, [], "It waits for more.", wake_at=until, **how)


def _starts(times: Sequence[float], want: Sequence[float], idea: str) -> None:
    """In a run with batches of three, of which none waits longer than 4 s."""
    trial = run_static(requests_of((2 + i, 3, at) for i, at in enumerate(times)), 3, max_wait=4.0)
    got = [timeline.scheduled for timeline in trial.trace.timelines]
    trial.expect(sorted(got), want, idea=idea, what="starts in seconds")
