"""Lab preemption."""

from __future__ import annotations

from lab_solutions import Wrong
from minibatch.plan import Preemption, Waiting
from minibatch.policies.preemption import by_priority
from minibatch.request import Status
from minibatch.trace import Preempted

# --- who outranks whom ---


def _equals_too(self, waiting, running):
    if self.displaces is None:
        return []
    return [request for request in running if self.displaces(request) >= self.displaces(waiting)]


def _older_among_equals(self, waiting, running):
    if self.displaces is None:
        return []
    own = (self.displaces(waiting), waiting.rank)
    return [request for request in running if (self.displaces(request), request.rank) > own]


def _greater_is_more_urgent(self, waiting, running):
    if self.displaces is None:
        return []
    return [request for request in running if self.displaces(request) < self.displaces(waiting)]


def _always_the_priority(self, waiting, running):
    if self.displaces is None:
        return []
    return [request for request in running if request.priority > waiting.priority]


def _one_is_enough(self, waiting, running):
    if self.displaces is None:
        return []
    least = max(running, key=self.displaces, default=None)
    return [least] if least is not None and self.displaces(least) > self.displaces(waiting) else []


def _without_displaces_by_priority(self, waiting, running):
    number = self.displaces or by_priority
    return [request for request in running if number(request) > number(waiting)]


def _outranked_by_loop(self, waiting, running):
    found = []
    if self.displaces is not None:
        for request in running:
            if not self.displaces(request) <= self.displaces(waiting):
                found.append(request)
    return found


def _outranked_by_filter(self, waiting, running):
    if (number := self.displaces) is None:
        return []
    numbers = dict(zip(running, map(number, running), strict=True))
    return list(filter(lambda request: numbers[request] - number(waiting) > 0, numbers))


# --- preempted ---


def _preempting(spoil_before=None, spoil_after=None):
    """A right solution, and something that is done wrong before the victim is queued, or after all."""

    def preempt(self, preemption, now):
        victim, timeline = preemption.request, preemption.request.timeline
        kept = victim.num_computed if preemption.swap else 0
        self.changes.preempted.append(
            Preempted(victim.label, preemption.by.label, victim.num_computed, preemption.swap)
        )
        if preemption.swap:
            self.kv.host[victim] = kept
            self.store.swap_out(victim, self.kv.rows(victim, 0, kept))
        self.kv.release(victim)
        del self.active[self.active.index(victim)]
        victim.num_computed, victim.status = kept, Status.WAITING
        timeline.num_swapped, timeline.num_preemptions = timeline.num_swapped + kept, timeline.num_preemptions + 1
        timeline.runs[-1] = [timeline.runs[-1][0], now]
        if spoil_before is not None:
            spoil_before(self, preemption)
        self.queue.add(victim)
        if spoil_after is not None:
            spoil_after(self, preemption)

    return preempt


def _answer_lost(life, preemption):
    victim = preemption.request
    victim.generated.clear()
    victim.num_tokens = victim.num_prompt


def _reported_too_late(life, preemption):
    told = life.changes.preempted.pop()
    life.changes.preempted.append(Preempted(told.request_id, told.by, preemption.request.num_computed, told.swapped))


def _last_in_line(life, preemption):
    preemption.request.rank = life._num_arrived
    life._num_arrived += 1


def _never_computed(life, preemption):
    preemption.request.high_water = preemption.request.num_computed


def _swapped_in_vain(life, preemption):
    preemption.request.num_computed = 0


def _in_other_words(self, preemption, now):
    request, by, swap = preemption.request, preemption.by, preemption.swap
    number = request.num_computed
    stay = request.timeline.runs.pop()
    request.timeline.runs.append([stay[0], now])
    request.timeline.num_preemptions += 1
    if not swap:
        request.num_computed = 0
    else:
        rows = self.kv.rows(request, 0, number)
        self.store.swap_out(request, rows)
        self.kv.host.update({request: number})
        request.timeline.num_swapped += number
    self.active[:] = [other for other in self.active if other is not request]
    self.kv.release(request)
    request.status = Status.WAITING
    self.queue.add(request)
    self.changes.preempted += [Preempted(request_id=request.label, by=by.label, num_tokens=number, swapped=swap)]


# --- making room ---


def _making_room(*, fits=None, choose=None, take=None, again=True):
    """A right solution, of which parts can be replaced by wrong ones."""

    def _make_room(self, request, num_tokens):
        while not (fits or _reserved)(self, request, num_tokens):
            victim = (choose or _newcomer_or_chosen)(self, request)
            if victim is None:
                self.waiting.append(Waiting(request, f"blocks: {self.memory.shortage(request, num_tokens)}"))
                return False
            (take or _displaced)(self, victim, request)
            if victim is request:
                return False
            if not again:
                return self.memory.reserve(request, num_tokens)
        return True

    return _make_room


def _reserved(draft, request, num_tokens):
    return draft.memory.reserve(request, num_tokens)


def _displaced(draft, victim, request):
    draft._displace(victim, request, "needs its blocks")


def _newcomer_or_chosen(draft, request):
    return list(draft.admissions)[-1] if draft.admissions else _chosen(draft, request)


def _chosen(draft, request):
    return draft._choose(draft._candidates(), draft.memory)


def _there(draft, request, num_tokens):
    return draft.memory.need(request, num_tokens) <= draft.memory.free


def _another_one(draft, request):
    if draft.admissions:
        return list(draft.admissions)[-1]
    others = [other for other in draft.running if other is not request]
    return draft._choose(others, draft.memory) if others else None


def _stays_planned(draft, victim, request):
    chunk, budget = draft.chunks.get(victim), draft.budget
    draft._displace(victim, request, "needs its blocks")
    draft.budget = budget
    if chunk is not None:
        draft.chunks[victim] = chunk


def _room_by_recursion(self, request, num_tokens):
    if self.memory.reserve(request, num_tokens):
        return True
    *_, victim = self.admissions or [self._choose(self._candidates(), self.memory)]
    if victim is None:
        reason = "memory: " + self.memory.shortage(request, num_tokens)
        self.waiting.append(Waiting(request, reason))
        return False
    self._displace(victim, request, "is short of memory")
    return victim is not request and self._make_room(request, num_tokens)


class _RoomByHand:
    """Without the other methods of the draft."""

    def _make_room(self, request, num_tokens):
        memory = self.memory
        while memory.need(request, num_tokens) > memory.free and request in self.running:
            joined = [other for other in self.running if other in self.admissions]
            victim = joined[-1] if joined else self._who(memory)
            if victim is None:
                self.waiting.append(Waiting(request, "no room"))
                return False
            self._out(victim, request)
        return request in self.running and memory.reserve(request, num_tokens)

    def _who(self, memory):
        oldest = sorted(self.running, key=self.preemption.seniority)[0]
        return self.preemption.choose([r for r in self.running if r is not oldest] or [oldest], memory)

    def _out(self, victim, by):
        self.running.remove(victim)
        self.memory.release(victim)
        self.num_seqs -= victim.num_seqs
        self.num_displaced += 1
        chunk = self.chunks.pop(victim, None)
        self.budget += 0 if chunk is None else chunk.stop - chunk.start
        if self.admissions.pop(victim, None) is None:
            room = self.preemption.host_tokens - self.on_host
            swap = 0 < victim.num_computed <= room
            self.on_host += swap * victim.num_computed
            self.preempted[victim] = Preemption(victim, by, swap)
        self.waiting.append(Waiting(victim, "gave way"))


WRONG = {
    "preemption.1": [
        Wrong("equals displace each other", _equals_too, "Equals never displace each other"),
        Wrong("of equals the older one goes first", _older_among_equals, "Who arrived first does not count"),
        Wrong("the greater number is more urgent", _greater_is_more_urgent, "A lower number is more urgent"),
        Wrong("the priority counts, whatever the policy says", _always_the_priority, "the one that displaces gives"),
        Wrong("one victim is named, and no more", _one_is_enough, "All that are outranked"),
    ],
    "preemption.2": [
        Wrong("the answer so far is lost with the K/V", _preempting(_answer_lost), "What it has generated stays"),
        Wrong(
            "reported when it had forgotten", _preempting(None, _reported_too_late), "how many computed tokens it had"
        ),
        Wrong("it goes to the end of the queue", _preempting(_last_in_line), "the place that its arrival gives it"),
        Wrong("computing again counts as new work", _preempting(_never_computed), "high_water stays"),
        Wrong("swapped, and computed again all the same", _preempting(_swapped_in_vain), "stays computed"),
    ],
    "preemption.3": [
        Wrong("rows are looked at, not promised", _making_room(fits=_there), "promised to the one that"),
        Wrong("one victim is always enough", _making_room(again=False), "One victim need not be enough"),
        Wrong("who asks is never the victim", _making_room(choose=_another_one), "may be the victim itself"),
        Wrong("those who run give way to a newcomer", _making_room(choose=_chosen), "newcomers of the same plan"),
        Wrong("a victim keeps its place in the plan", _making_room(take=_stays_planned), "planned already"),
    ],
}
RIGHT = {
    "preemption.1": [_outranked_by_loop, _outranked_by_filter],
    "preemption.2": [_preempting(), _in_other_words],
    "preemption.3": [_room_by_recursion, _RoomByHand],
}
