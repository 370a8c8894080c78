"""Lab priority."""

from __future__ import annotations

import math
from fractions import Fraction

from lab_solutions import Wrong

# --- priority.1 ---


def _higher_is_more_urgent(self, request):
    return -request.priority + request.arrival_time / self.ageing


def _late_arrivals_gain(self, request):
    return request.priority - request.arrival_time / self.ageing


def _aged_at_the_latest_arrival(self, request):
    self.now = max(getattr(self, "now", 0.0), request.arrival_time)
    return request.priority - (self.now - request.arrival_time) / self.ageing


def _no_ageing(self, request):
    return request.priority, request.arrival_time


def _whole_levels(self, request):
    return request.priority + request.arrival_time // self.ageing


def _in_seconds(self, request):
    if self.ageing == math.inf:
        return request.priority
    return request.priority * self.ageing + request.arrival_time


def _exact_pair(self, request):
    waited = 0 if self.ageing == math.inf else Fraction(request.arrival_time) / Fraction(self.ageing)
    return Fraction(request.priority) + waited, request.rank


# --- priority.2 ---


def _strict(self, draft, now):
    for request in self:
        yield request
        if request not in draft.admissions:
            return


def _no_patience(self, draft, now):
    yield from self


def _impatient_not_asked(self, draft, now):
    for request in self:
        if now - request.arrival_time > self.patience:
            return
        yield request


def _admitted_stop_the_walk(self, draft, now):
    for request in self:
        yield request
        if now - request.arrival_time > self.patience:
            return


def _only_the_head(self, draft, now):
    head = next(iter(self), None)
    for request in self:
        yield request
        if head not in draft.admissions and now - head.arrival_time > self.patience:
            return


def _flag(self, draft, now):
    stop = False
    for request in list(self):
        if stop:
            break
        yield request
        deadline = request.arrival_time + self.patience
        stop = deadline < now and request not in draft.admissions


class _Walk:
    """Not a generator."""

    def __init__(self, order, draft, now):
        self.left, self.draft, self.now, self.patience = list(order)[::-1], draft, now, order.patience
        self.last = None

    def __iter__(self):
        return self

    def __next__(self):
        last = self.last
        waits = last is not None and last not in self.draft.admissions
        if not self.left or (waits and self.now - last.arrival_time > self.patience):
            raise StopIteration
        self.last = self.left.pop()
        return self.last


def _iterator(self, draft, now):
    return _Walk(self, draft, now)


WRONG = {
    "priority.1": [
        Wrong("a higher number is more urgent", _higher_is_more_urgent, "The lower the number"),
        Wrong("who comes later is sorted first", _late_arrivals_gain, "whoever came first has waited longest"),
        Wrong("levels gained until the newest arrival", _aged_at_the_latest_arrival, "must not change while it waits"),
        Wrong("no ageing", _no_ageing, "gains one level for every"),
        Wrong("only whole levels count", _whole_levels, "Parts of a level"),
    ],
    "priority.2": [
        Wrong("nobody overtakes, whatever lookahead is", _strict, "The walk goes on behind"),
        Wrong("no patience: a heavy request starves", _no_patience, "the walk ends"),
        Wrong("whoever waits too long is not asked any more", _impatient_not_asked, "must still be asked"),
        Wrong("one that has joined stops the walk", _admitted_stop_the_walk, "holds nobody back"),
        Wrong("only the head of the queue loses patience", _only_the_head, "not only the first"),
    ],
}
RIGHT = {"priority.1": [_in_seconds, _exact_pair], "priority.2": [_flag, _iterator]}
