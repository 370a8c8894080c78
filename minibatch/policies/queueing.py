"""Order: who is asked first. The engine's queue *is* an order: it keeps the waiting requests, and knows who is next.

The engine tells it what happens (``add``, ``take``, ``end``); a plan asks it, and changes nothing (``walk``). An order
of your own is usually one method::

    class ShortPromptsFirst(Order):
        def key(self, request):
            return request.num_prompt

Orders keep an index up to date as requests come and go, so that a plan looks at the few requests it can use and does
not sort thousands that it cannot. An order belongs to one engine.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any

from minibatch.checks import check_float, check_int
from minibatch.policies.base import named
from minibatch.policies.predictors import Predictor, tokens_left, upper_bound
from minibatch.request import RequestState

if TYPE_CHECKING:
    from minibatch.plan_draft import PlanDraft


class Order:
    """By ``key``, which may not change while a request waits; of equal keys, by arrival.

    So a preempted request returns to its place. Iterating gives the waiting requests in that order.
    """

    lookahead = 0  # how many requests may be asked after one that does not fit

    def __init__(self) -> None:
        self.used = False  # whether an engine has it
        self._waiting: list[tuple[Any, int, RequestState]] = []
        self._entries: dict[RequestState, tuple[Any, int, RequestState]] = {}

    def key(self, request: RequestState) -> Any:
        """Whoever has the smallest is next.

        A request has ``num_prompt``, ``max_new_tokens``, ``generated``, ``priority``, ``client``, ``arrival_time``,
        ``rank`` (its number in the order of arrival) and more: see ``request.RequestState``.
        """
        return request.rank

    def note(self, request: RequestState) -> str:
        """What this order thinks of a request, for those who have to wait behind it."""
        return ""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        return (request for _, _, request in self._waiting)

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # --- what the engine tells it ---

    def add(self, request: RequestState) -> None:
        """It waits from now on: it has arrived, or has been preempted."""
        key = self.key(request)
        if key is None or key != key:  # a forgotten return; NaN, which has no place in any order
            raise ValueError(f"{self!r} gives {request.label} the key {key!r}")
        entry = (key, request.rank, request)
        insort(self._waiting, entry)
        self._entries[request] = entry

    def take(self, request: RequestState) -> None:
        """It is admitted."""
        self._remove(request)

    def end(self, request: RequestState) -> None:
        """It has ended, waiting or not."""
        if request in self._entries:
            self._remove(request)

    def _remove(self, request: RequestState) -> None:
        del self._waiting[bisect_left(self._waiting, self._entries.pop(request))]

    # --- what a plan asks ---

    def walk(self, draft: PlanDraft, now: float) -> Iterator[RequestState]:
        """The waiting requests, the next one first. When it goes on, ``draft.admissions`` says who has been admitted.

        It is left when one cannot be admitted, or after ``lookahead`` more. Changes nothing.
        """
        return iter(self)


class FCFS(Order):
    """First come, first served. Strict: nobody overtakes a request that does not fit.

    ``lookahead``  up to so many requests behind one that does not fit are asked as well (no head-of-line blocking)
    ``patience``   seconds after which nobody overtakes a request any more: without it, a large one may starve
    """

    def __init__(self, lookahead: int = 0, patience: float = math.inf) -> None:
        super().__init__()
        check_int("lookahead", lookahead, 0)
        self.lookahead, self.patience = lookahead, checked_patience(patience)

    def walk(self, draft: PlanDraft, now: float) -> Iterator[RequestState]:
        for request in self:
            yield request
            if request not in draft.admissions and now - request.arrival_time > self.patience:
                return

    def __repr__(self) -> str:
        return f"FCFS(lookahead={self.lookahead}{said_patience(self)})" if self.lookahead else "FCFS()"


class Priority(Order):
    """The most urgent first: the lowest ``priority``. A request gains one level for every ``ageing`` seconds it waits.

    Priority minus gained levels is ``priority - (now - arrival) / ageing``. ``now`` is the same for all, so the order
    of two requests never changes, and needs no sorting again. Hence a bound: a request is overtaken only by those that
    come less than ``ageing * (its priority - theirs)`` seconds later (as long as nobody displaces by priority, which
    does not age).
    """

    def __init__(self, ageing: float = math.inf) -> None:
        super().__init__()
        if ageing != math.inf:
            check_float("ageing", ageing, 0.0, math.inf, above=True)
        self.ageing = ageing

    def key(self, request: RequestState) -> float:
        return request.priority + request.arrival_time / self.ageing

    def note(self, request: RequestState) -> str:
        return f"priority {request.priority}"

    def __repr__(self) -> str:
        return "Priority()" if self.ageing == math.inf else f"Priority(ageing={self.ageing:g})"


class ShortestFirst(Order):
    """The one that is expected to generate the fewest tokens first; of a preempted one, what is left counts.

    Minimises the mean wait of requests that are all there and run one at a time, if predictions are right; where they
    share a batch and its memory it need not, and a long request may wait for ever. With
    ``Recompute(displaces=ByTokensLeft(predictor))`` or ``Swap`` it becomes shortest-*remaining*-first, preemptive.
    """

    def __init__(self, predictor: Predictor = upper_bound) -> None:
        super().__init__()
        self.predictor = predictor

    def key(self, request: RequestState) -> float:
        return tokens_left(self.predictor, request)

    def note(self, request: RequestState) -> str:
        return f"{self.key(request):.4g} tokens expected"

    def __repr__(self) -> str:
        return f"ShortestFirst({named(self.predictor)})"


class LongestPrefix(Order):
    """Among the first ``window`` of the queue, the one first of which a prefix cache has most (SGLang's LPM).

    Requests that share a prefix so run while it is still cached. A request without one is overtaken until it has
    waited ``patience`` seconds; then arrival counts.
    """

    def __init__(self, window: int = 16, patience: float = math.inf) -> None:
        super().__init__()
        check_int("window", window, 1)
        self.window, self.patience = window, checked_patience(patience)

    def walk(self, draft: PlanDraft, now: float) -> Iterator[RequestState]:
        queue, cached = iter(self), draft.memory.cached_tokens
        window = {request: cached(request) for request in islice(queue, self.window)}
        while window:
            request = next(iter(window))
            if now - request.arrival_time <= self.patience:
                request = max(window, key=window.__getitem__)
            yield request
            del window[request]
            window.update((newcomer, cached(newcomer)) for newcomer in islice(queue, 1))

    def __repr__(self) -> str:
        return f"LongestPrefix(window={self.window}{said_patience(self)})"


def checked_patience(seconds: float) -> float:
    if seconds != math.inf:
        check_float("patience", seconds, 0.0, math.inf)
    return seconds


def said_patience(order: FCFS | LongestPrefix) -> str:
    return "" if order.patience == math.inf else f", patience={order.patience:g}"


# --- by client ---


class ByClient(Order):
    """A queue a client, each in order of arrival, and a number a client: whoever has the lowest is next.

    Subclasses say what the number is (``standing``) and what an admission makes of it (``after``). The index is sorted
    by ``bound``, which may lag behind the standing but never exceeds it, and changes only when the engine tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, list[tuple[int, RequestState]]] = {}  # of clients with waiting requests
        self._index: list[tuple[float, int, str]] = []  # (bound, rank of its first request, client)
        self._indexed: dict[str, tuple[float, int, str]] = {}

    def standing(self, client: str) -> float:
        raise NotImplementedError

    def bound(self, client: str) -> float:
        return self.standing(client)

    def after(self, standing: float, request: RequestState, draft: PlanDraft) -> float:
        """A client's standing once the plan has admitted this request of it."""
        raise NotImplementedError

    def walk(self, draft: PlanDraft, now: float) -> Iterator[RequestState]:
        """Draws clients from the index only until the next one cannot be lower than those already drawn."""
        index = iter(self._index)
        upcoming = next(index, None)
        drawn: list[tuple[float, int, str, int]] = []  # a heap; the last is how many of the client have been asked
        while drawn or upcoming:
            while upcoming and (not drawn or upcoming[:2] <= drawn[0][:2]):
                _, rank, client = upcoming
                heappush(drawn, (self.standing(client), rank, client, 0))
                upcoming = next(index, None)
            standing, _, client, asked = heappop(drawn)
            queue = self._queues[client]
            request = queue[asked][1]
            yield request
            if request in draft.admissions:
                standing = self.after(standing, request, draft)
            if asked + 1 < len(queue):
                heappush(drawn, (standing, queue[asked + 1][0], client, asked + 1))

    def add(self, request: RequestState) -> None:
        super().add(request)
        insort(self._queues.setdefault(request.client, []), (request.rank, request))
        self._reindex(request.client)

    def take(self, request: RequestState) -> None:
        super().take(request)
        self._leave(request)

    def end(self, request: RequestState) -> None:
        waits = request in self._entries
        super().end(request)
        if waits:
            self._leave(request)

    def _leave(self, request: RequestState) -> None:
        queue = self._queues[request.client]
        del queue[bisect_left(queue, (request.rank, request))]
        if not queue:
            del self._queues[request.client]
        self._reindex(request.client)

    def _reindex(self, client: str) -> None:
        if (entry := self._indexed.pop(client, None)) is not None:
            del self._index[bisect_left(self._index, entry)]
        if client in self._queues:
            entry = self._indexed[client] = (self.bound(client), self._queues[client][0][0], client)
            insort(self._index, entry)


class RoundRobin(ByClient):
    """One request a client in turn, whatever its length: the simple baseline.

    Fair in the number of requests, not in service: a client with long requests gets more than one with short ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_turns = 0
        self._last_turn: dict[str, int] = {}

    def standing(self, client: str) -> float:
        return self._last_turn.get(client, 0)

    def after(self, standing: float, request: RequestState, draft: PlanDraft) -> float:
        return standing if request.timeline.runs else self._num_turns + len(draft.admissions)

    def take(self, request: RequestState) -> None:
        if not request.timeline.runs:  # else it is back from a preemption, and has had its turn
            self._num_turns += 1
            self._last_turn[request.client] = self._num_turns
        super().take(request)

    def note(self, request: RequestState) -> str:
        return f"the turn of client {request.client}"


class Fair(ByClient):
    """Virtual token counters (VTC: Sheng et al., *Fairness in Serving Large Language Models*, OSDI 2024, algorithm 2).

    Each client has a counter of the service it has had: ``input_weight`` a prompt token, charged when the request is
    admitted, and ``output_weight`` a generated token, charged when it is made. The backlogged client with the lowest
    counter (divided by its weight) is next. A client that comes back from idleness is *lifted* to the lowest counter of
    those who wait: what it did not use while it was away, it does not get back.

    Under the conditions of the paper (the maximum is reserved, nobody is preempted, nothing cached, equal weights, one
    answer a request, an output token not cheaper than an input token) the counters of two backlogged clients never
    differ by more than ``output_weight * (KV capacity in tokens) + input_weight``, and the services that they get in
    any interval by more than twice that. (The paper's bound has no last term: it counts the newest token as cached,
    and here it is not yet.)

    What is charged for a request follows from its state alone, so it cannot drift: recomputation after a preemption is
    free, so are prompt tokens from a prefix cache, and an aborted request pays for what was computed.

    ``weights``  by client, default 1: twice the weight, twice the service
    ``lift``     False: the paper's *least counter first*, with which a client that comes back is served alone for long

    It remembers every client that it has ever seen.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        lift: bool = True,
    ) -> None:
        super().__init__()
        self.weights = dict(weights or {})
        for client, weight in self.weights.items():
            check_float(f"weights[{client!r}]", weight, 0.0, math.inf, above=True)
        check_float("input_weight", input_weight, 0.0, math.inf)
        check_float("output_weight", output_weight, 0.0, math.inf)
        if not input_weight + output_weight:
            raise ValueError("input_weight and output_weight are both 0: no service would ever be counted")
        self.input_weight, self.output_weight, self.lift = input_weight, output_weight, lift
        self.settled: dict[str, float] = {}  # service of ended requests, and lifts
        self._served: dict[str, dict[RequestState, None]] = {}  # by client: admitted once, and not ended
        self._last_client: str | None = None  # whose last waiting request left the queue last

    def charge(self, request: RequestState) -> float:
        """What an admitted request has cost so far."""
        prompt = request.num_prompt
        if request.finish_reason == "abort":
            prompt = min(request.high_water, prompt)
        return self._of_input(prompt - request.num_cached) + self.output_weight * len(request.generated)

    def counter(self, client: str) -> float:
        """The service that the client has had, and what it was lifted by."""
        return self.settled.get(client, 0.0) + sum(map(self.charge, self._served.get(client, ())))

    def standing(self, client: str) -> float:
        return self.counter(client) / self.weights.get(client, 1.0)

    def bound(self, client: str) -> float:
        return self.settled.get(client, 0.0) / self.weights.get(client, 1.0)

    def after(self, standing: float, request: RequestState, draft: PlanDraft) -> float:
        if request in self._served.get(request.client, ()):  # back from a preemption: it has paid
            return standing
        cost = self._of_input(request.num_prompt - draft.admissions[request].cached)
        return standing + cost / self.weights.get(request.client, 1.0)

    def add(self, request: RequestState) -> None:
        """It waits from now on; its client is lifted if none of its requests did, unless this one was preempted."""
        client = request.client
        if self.lift and client not in self._queues and request not in self._served.get(client, ()):
            missing = self._lowest() - self.standing(client)
            if missing > 0:
                self.settled[client] = self.settled.get(client, 0.0) + missing * self.weights.get(client, 1.0)
        super().add(request)

    def take(self, request: RequestState) -> None:
        served = self._served.setdefault(request.client, {})
        served.update(dict.fromkeys((request, *request.siblings)))
        super().take(request)

    def end(self, request: RequestState) -> None:
        super().end(request)
        served = self._served.get(request.client, {})
        if request in served:
            del served[request]
            if not served:
                del self._served[request.client]
            self.settled[request.client] = self.settled.get(request.client, 0.0) + self.charge(request)
            self._reindex(request.client)

    def note(self, request: RequestState) -> str:
        """Counters, each divided by its weight: how far the others are ahead is what they owe it."""
        others = list(islice((client for _, _, client in self._index if client != request.client), 3))
        more = len(self._index) - 1 - len(others)
        had = [f"{client} {self.standing(client):,.0f}" for client in others]
        had += [f"{more:,} more clients"] if more > 0 else []
        return f"client {request.client} is at {self.standing(request.client):,.0f}; {', '.join(had)}".strip("; ")

    def _of_input(self, num_tokens: int) -> float:
        return self.input_weight * max(num_tokens, 0)

    def _lowest(self) -> float:
        """Of the counters of the clients that wait; if none does, that of the one that waited last."""
        if not self._index:
            return 0.0 if self._last_client is None else self.standing(self._last_client)
        lowest = math.inf
        for bound, _, client in self._index:
            if bound >= lowest:
                break
            lowest = min(lowest, self.standing(client))
        return lowest

    def _leave(self, request: RequestState) -> None:
        super()._leave(request)
        if request.client not in self._queues:
            self._last_client = request.client

    def __repr__(self) -> str:
        weights = f", weights={self.weights}" if self.weights else ""
        lift = "" if self.lift else ", lift=False"
        return f"Fair(input_weight={self.input_weight:g}, output_weight={self.output_weight:g}{weights}{lift})"
