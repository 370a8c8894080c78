"""Lab chunked."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict

from lab_solutions import Wrong
from minibatch.plan_draft import PlanDraft, least_recently_scheduled

# --- chunked.1 ---


def _least(self, pending, *limits):
    size = min(pending, *limits)
    return size if self.partial or size == pending else 0


def _all_or_nothing(self, pending):
    return pending if pending <= min(self.budget, self.max_chunk) else 0


def _of_the_whole_budget(self, pending):
    return _least(self, pending, self.token_budget, self.max_chunk)


def _no_cap(self, pending):
    return _least(self, pending, self.budget)


def _whole_chunks_only(self, pending):
    size = _of_the_whole_budget(self, pending)
    if self.partial and size > self.budget and self.max_chunk == math.inf:
        return self.budget
    return size if size <= self.budget else 0


def _always_cut(self, pending):
    return min(pending, self.budget, self.max_chunk)


def _cases(self, pending):
    if not self.partial:
        return 0 if pending > self.budget or pending > self.max_chunk else pending
    allowed = self.budget if self.budget < self.max_chunk else self.max_chunk
    if pending < allowed:
        return pending
    return allowed


def _sorted(self, pending):
    smallest = sorted((pending, self.budget, self.max_chunk))[0]
    return int(smallest) * (self.partial or smallest == pending)


# --- chunked.2 ---


def _draft(self, active, kv):
    cap = math.inf if self.max_chunk is None else self.max_chunk
    limits = self.token_budget, self.max_num_seqs
    return PlanDraft(active, kv, *limits, self.admission, self.preemption, partial=True, max_chunk=cap)


def _in_order(self, queue, active, kv, now, order, decodes=lambda request: request.is_decoding):
    """The groups in this order."""
    draft = _draft(self, active, kv)
    for group in order:
        if group == "decodes":
            draft.run(least_recently_scheduled(r for r in active if decodes(r)))
        elif group == "prompts":
            draft.run([r for r in active if not decodes(r)])
        else:
            draft.admit(queue, now)
    return draft.plan()


def _prompts_first(self, queue, active, kv, now):
    return _in_order(self, queue, active, kv, now, ("prompts", "newcomers", "decodes"))


def _newcomers_before_prompts(self, queue, active, kv, now):
    return _in_order(self, queue, active, kv, now, ("decodes", "newcomers", "prompts"))


def _one_prompt_at_a_time(self, queue, active, kv, now):
    prompts = any(not r.is_decoding for r in active)
    return _in_order(self, queue, active, kv, now, ("decodes", "prompts" if prompts else "newcomers"))


def _generated_decodes(self, queue, active, kv, now):
    groups = ("decodes", "prompts", "newcomers")
    return _in_order(self, queue, active, kv, now, groups, decodes=lambda request: bool(request.generated))


def _sorts_the_engines_list(self, queue, active, kv, now):
    active.sort(key=lambda r: (not r.is_decoding, r.last_scheduled if r.is_decoding else 0))
    draft = _draft(self, active, kv)
    draft.run(active)
    draft.admit(queue, now)
    return draft.plan()


def _one_sorted_list(self, queue, active, kv, now):
    draft = _draft(self, active, kv)
    places = {request: place for place, request in enumerate(active)}

    def turn(request):
        if request.is_decoding:
            return 0, request.last_scheduled, places[request]
        return 1, 0, places[request]

    draft.run(sorted(active, key=turn))
    draft.admit(queue, now)
    return draft.plan()


def _one_call_each(self, queue, active, kv, now):
    draft = _draft(self, active, kv)
    decoding = {r for r in active if r.generated and r.num_pending == 1}
    for request in least_recently_scheduled(r for r in active if r in decoding):
        draft.run([request])
    for request in active:
        if request not in decoding:
            draft.run([request])
    draft.admit(queue, now)
    return draft.plan()


# --- chunked.3 ---


def _as_admitted(requests):
    return list(requests)


def _most_recent_first(requests):
    return sorted(requests, key=lambda r: -r.last_scheduled)


def _newest_of_equals_first(requests):
    newest_first = list(requests)[::-1]
    return sorted(newest_first, key=lambda r: r.last_scheduled)


def _two_groups(requests):
    requests = list(requests)
    newest = max((r.last_scheduled for r in requests), default=0)
    return [r for r in requests if r.last_scheduled < newest] + [r for r in requests if r.last_scheduled == newest]


def _in_place(requests):
    requests = requests if isinstance(requests, list) else list(requests)
    requests.sort(key=lambda r: r.last_scheduled)
    return requests


def _buckets(requests):
    by_iteration = defaultdict(list)
    for request in requests:
        by_iteration[request.last_scheduled].append(request)
    return [request for iteration in sorted(by_iteration) for request in by_iteration[iteration]]


def _heap(requests):
    heap = [(request.last_scheduled, place, request) for place, request in enumerate(requests)]
    heapq.heapify(heap)
    return [heapq.heappop(heap)[2] for _ in range(len(heap))]


WRONG = {
    "chunked.1": [
        Wrong("a prompt that does not fit whole waits", _all_or_nothing, "uncut it would wait for ever"),
        Wrong("the whole budget for each request", _of_the_whole_budget, "what counts is what is left"),
        Wrong("max_chunk is ignored", _no_cap, "max_chunk is the most that one request may have"),
        Wrong("a chunk has to be full", _whole_chunks_only, "max_chunk is a limit, no unit"),
        Wrong("prompts are cut where they may not be", _always_cut, "all or nothing"),
    ],
    "chunked.2": [
        Wrong("prompts before decodes: they stall", _prompts_first, "Decodes come first"),
        Wrong("newcomers before prompts that were begun", _newcomers_before_prompts, "goes on before anybody joins"),
        Wrong("nobody joins while a prompt is under way", _one_prompt_at_a_time, "can admit as well"),
        Wrong("whoever has generated something decodes", _generated_decodes, "To have generated something"),
        Wrong("the engine's own list is sorted", _sorts_the_engines_list, "Planning changes nothing"),
    ],
    "chunked.3": [
        Wrong("the order of admission: some never get a turn", _as_admitted, "Whoever went without"),
        Wrong("the most recent first", _most_recent_first, "comes last in this one"),
        Wrong("of equals the newest first", _newest_of_equals_first, "the order stays as it was given"),
        Wrong("only the last iteration counts", _two_groups, "the one that has waited longest"),
        Wrong("the list that was given is sorted", _in_place, "Ordering makes a new list"),
    ],
}
RIGHT = {
    "chunked.1": [_cases, _sorted],
    "chunked.2": [_one_sorted_list, _one_call_each],
    "chunked.3": [_buckets, _heap],
}
