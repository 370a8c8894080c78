"""Requests as an engine knows them, without an engine: what a check hands to a part that plans or counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from minibatch.continuous_batching import ContinuousBatching
from minibatch.door import Door
from minibatch.kv_cache import KVCache
from minibatch.models.toy_model import ToyModel
from minibatch.policies.queueing import Order
from minibatch.request import Request, RequestState, SamplingParams, Status
from minibatch.trace import Timeline


def state(
    label: str = "a",
    prompt: int | Sequence[int] = 4,
    generated: int | Sequence[int] = 0,
    computed: int = 0,
    *,
    new: int = 16,
    status: Status = Status.WAITING,
    ended: str | None = None,
    arrival: float = 0.0,
    rank: float = 0.0,
    last: int = -1,
    priority: int = 0,
    client: str = "default",
    salt: str | None = None,
    **params: Any,
) -> RequestState:
    """A request with these tokens (numbers of tokens, or the ids), of which the first ``computed`` are cached.

    ``ended``  its ``finish_reason``; ``last``: the iteration that computed something of it last
    """
    ids = range(prompt) if isinstance(prompt, int) else tuple(prompt)
    made = list(range(100, 100 + generated)) if isinstance(generated, int) else list(generated)
    given = SamplingParams(max_tokens=new, **params)
    asked = Request(ids, given, label, arrival, priority, client, salt)
    timeline = Timeline(label, client, priority, len(ids), new, arrival)
    one = RequestState(asked, label, label, ids, arrival, new, frozenset(), 0, timeline, made, rank)
    one.num_computed = one.high_water = computed
    one.status = Status.FINISHED if ended else status
    one.finish_reason, one.last_scheduled = ended, last
    return one


def decoding(label: str = "a", prompt: int = 3, generated: int = 2, **more: Any) -> RequestState:
    """An active request of which all but the newest token is cached."""
    return state(label, prompt, generated, prompt + generated - 1, **{"status": Status.ACTIVE, **more})


def described(requests: Iterable[RequestState], new: bool = False) -> str:
    """Requests in words: ``a (prompt of 3, 2 generated, 4 computed)``; ``new``: and how many tokens they ask for."""
    said = []
    for one in requests:
        facts = [f"prompt of {one.num_prompt}", f"up to {one.max_new_tokens} new" if new else ""]
        facts += [f"{len(one.generated)} generated" if one.generated else ""]
        facts += [f"{one.num_computed} computed" if one.num_computed else ""]
        facts += [f"last ran in {one.last_scheduled}" if one.last_scheduled > 0 else ""]
        facts += [f"arrived at {one.arrival_time:g}" if one.arrival_time else ""]
        facts += [f"priority {one.request.priority}" if one.request.priority else ""]
        facts += [f"finished ({one.finish_reason})" if one.is_finished else ""]
        said.append(f"{one.label} ({', '.join(filter(None, facts))})")
    return ", ".join(said) or "nobody"


def accepted(kv: KVCache, *asked: Request) -> list[RequestState]:
    """Requests ``a``, ``b``, ... as the door of an engine with this cache makes them, with all answers (``n``)."""
    door = Door(ToyModel(), ContinuousBatching(), kv, None)
    named = [replace(each, request_id=chr(97 + i)) for i, each in enumerate(asked)]
    return [door.accept(each, door.timeline(each, 0.0), ()) for each in named]


def line_up(queue: Order, requests: Iterable[RequestState]) -> Order:
    """The queue, in which these wait now; they have come in this order."""
    for rank, request in enumerate(requests):
        request.rank = rank
        queue.add(request)
    return queue


def holding(kv: KVCache, active: Iterable[RequestState]) -> KVCache:
    """The cache, in which these have room for all that they may become."""
    for request in active:
        kv.reserve(request, request.max_cached_tokens)
    return kv
