"""Requests of clients."""

from __future__ import annotations

from typing import Any

from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs import plans
from minibatch.labs.counterexample import expect
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.policies import Order, Recompute, by_priority
from minibatch.request import Request

CLIENTS = "XYZ"
Twice = plans.twice(ContinuousBatching)


def of(client: str, number: int, prompt: int = 2, new: int = 1, at: float | None = None, **more: Any) -> list[Request]:
    """Requests of one client that arrive together."""
    return [request(prompt, new, at, first=i + 5 * CLIENTS.index(client), client=client, **more) for i in range(number)]


def serve(asked: list[Request], places: int, order: Order, case: str, want: str, idea: str) -> None:
    """Runs them, with all the memory they want; ``want``: the clients in the order of their admissions."""
    scheduler = Twice(places, preemption=Recompute(displaces=by_priority))
    trial = run(asked, scheduler, PagedKVCache(64, 4), order=order, case=case)
    client = {timeline.request_id: timeline.client for timeline in trial.trace.timelines}
    got = [client[change.request_id] for step in trial.trace.steps for change in step.admitted][: len(want)]
    expect(got, list(want), what="clients, as they are served", case=trial.case, idea=idea)
