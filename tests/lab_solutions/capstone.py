"""Lab capstone."""

from __future__ import annotations

from collections import Counter

from lab_solutions import Wrong
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.policies import Optimistic, Order, Recompute, ShortestFirst, Watermark, least_progress_lost
from minibatch.policies.predictors import like_its_prompt


class _InOrderOfArrival(Order):
    def key(self, request):
        return request.arrival_time


def _the_reference():
    return _InOrderOfArrival(), ChunkedPrefill(token_budget=256, max_num_seqs=200)


class _Peeking(Order):
    def key(self, request):
        return request.request.output_length or 0


def _peeks():
    return _Peeking(), ChunkedPrefill(token_budget=256)


def _shortest():
    return ShortestFirst(like_its_prompt), ChunkedPrefill(token_budget=256)


ONCE = _InOrderOfArrival()


def _once_for_all():
    return ONCE, ChunkedPrefill(token_budget=256)


def _aged(request):
    """A short prompt overtakes: 30 tokens are worth a second of waiting, and nobody falls back by more than 17 s."""
    return request.arrival_time + min(request.num_prompt, 500) / 30 + len(request.generated)


def _composed():
    """Built-in policies: short before long with a bound, a little memory kept free, the cheapest victim."""
    scheduler = ChunkedPrefill(token_budget=320, admission=Watermark(0.03), preemption=Recompute(least_progress_lost))
    return ShortestFirst(_aged), scheduler


class _InTime(Order):
    """Those who can still be good first; of these, clients within their equal share first, then short prompts.

    Who is late already waits until the rest is served, but no longer than ``patience`` seconds.
    """

    lookahead = 8
    patience, seconds_a_token = 12.0, 0.00027

    def __init__(self):
        super().__init__()
        self.came, self.joined = Counter(), Counter()

    def add(self, request):
        self.came[request.client] += not request.timeline.runs
        super().add(request)

    def take(self, request):
        self.joined[request.client] += not request.timeline.runs
        super().take(request)

    def walk(self, draft, now):
        equal = self.came.total() / max(1, len(self.came))

        def place(request):
            waited = now - request.arrival_time
            if request.generated:
                return 0, 0, request.rank
            if waited + request.num_prompt * self.seconds_a_token > 2.8:
                return 1 if waited > self.patience else 3, 0, request.rank
            return 2, self.joined[request.client] >= equal, request.num_prompt

        return iter(sorted(self, key=place))


def _in_time():
    scheduler = ChunkedPrefill(token_budget=320, admission=Watermark(0.03), preemption=Recompute(least_progress_lost))
    return _InTime(), scheduler


def _memory_for_the_first_chunk():
    """Short chats like it; where memory is tight, prompts get stuck half-way and are computed again and again."""
    return _InTime(), ChunkedPrefill(token_budget=320, admission=Optimistic())


WRONG = {
    "capstone.1": [
        Wrong("the reference, in other words", _the_reference, "no better than the reference"),
        Wrong("looks for the length of the answer in the request, where it is not", _peeks, "no better than"),
        Wrong("the shortest prompt first, for ever", _shortest, "A request starves"),
        Wrong("good for chats, and all others recompute", _memory_for_the_first_chunk, "loses by preemption tax"),
        Wrong("the same objects at every call", _once_for_all, "new objects at every call"),
    ],
}
RIGHT = {"capstone.1": [_composed, _in_time]}
