"""Lab fairness."""

from __future__ import annotations

from collections import defaultdict

from lab_solutions import Wrong
from minibatch.policies.queueing import ByClient, Fair, Order

# --- round robin ---


class _Turns(ByClient):
    """A right solution; wrong ones differ from it."""

    def __init__(self):
        super().__init__()
        self.turns = []  # the clients, as they had them

    def standing(self, client):
        return next((n for n in range(len(self.turns), 0, -1) if self.turns[n - 1] == client), 0)

    def after(self, standing, request, draft):
        if request.timeline.runs:
            return standing
        return len(self.turns) + list(draft.admissions).index(request) + 1

    def take(self, request):
        super().take(request)
        if not request.timeline.runs:
            self.turns.append(request.client)

    def note(self, request):
        return ""


class _TurnsAreCounted(_Turns):
    def standing(self, client):
        return self.turns.count(client)

    def after(self, standing, request, draft):
        return standing if request.timeline.runs else standing + 1


class _OnePlanOneTurn(_Turns):
    def after(self, standing, request, draft):
        return standing if request.timeline.runs else len(self.turns) + 1


class _ReturnIsATurn(_Turns):
    def after(self, standing, request, draft):
        return len(self.turns) + list(draft.admissions).index(request) + 1

    def take(self, request):
        super(_Turns, self).take(request)
        self.turns.append(request.client)


class _PlanTakesTheTurn(_Turns):
    def after(self, standing, request, draft):
        if not request.timeline.runs:
            self.turns.append(request.client)
        return self.standing(request.client)

    def take(self, request):
        super(_Turns, self).take(request)


class _ForgetsWhoIsAway(_Turns):
    def take(self, request):
        super().take(request)
        if all(other.client != request.client for other in self):
            self.turns = [client if client != request.client else None for client in self.turns]


class _OwnWalk(Order):
    """Not by client in its data: all that wait are looked at for every request that is asked."""

    def __init__(self):
        super().__init__()
        self.last, self.count = defaultdict(int), 0

    def take(self, request):
        super().take(request)
        if not request.timeline.runs:
            self.count += 1
            self.last[request.client] = self.count

    def walk(self, draft, now):
        left, last, count = list(self), dict(self.last), self.count
        while left:
            request = min(left, key=lambda each: (last.get(each.client, 0), each.rank))
            left.remove(request)
            yield request
            if request in draft.admissions and not request.timeline.runs:
                count += 1
                last[request.client] = count


# --- what a request has cost ---


def _price(order, prompt, generated):
    return order.input_weight * prompt + order.output_weight * generated


def _the_limit(self, request):
    return _price(self, request.num_prompt - request.num_cached, request.max_new_tokens)


def _every_admission(self, request):
    stays = max(len(request.timeline.runs), 1)
    return _price(self, stays * (request.num_prompt - request.num_cached), len(request.generated))


def _as_computed(self, request):
    prompt = min(request.num_computed, request.num_prompt)
    return _price(self, max(prompt - request.num_cached, 0), len(request.generated))


def _cached_too(self, request):
    prompt = min(request.high_water, request.num_prompt) if request.finish_reason == "abort" else request.num_prompt
    return _price(self, prompt, len(request.generated))


def _aborted_pays_all(self, request):
    return _price(self, request.num_prompt - request.num_cached, len(request.generated))


def _charge_by_positions(self, request):
    reach = request.high_water if request.finish_reason == "abort" else request.num_prompt
    positions = range(request.num_cached, request.num_prompt)
    cost = sum(self.input_weight for position in positions if position < reach)
    for _ in request.generated:
        cost += self.output_weight
    return cost


# --- no credit for idleness ---


def _lifting(*, idle=None, to=None, raise_=None):
    """A right solution, of which parts can be replaced by wrong ones."""

    def add(self, request):
        if self.lift and (idle or _was_idle)(self, request):
            lowest = (to or _lowest)(self, request.client)
            (raise_ or _raised)(self, request.client, lowest)
        super(Fair, self).add(request)

    return add


def _was_idle(order, request):
    return not request.timeline.runs and all(other.client != request.client for other in order)


def _lowest(order, client):
    return order._lowest()


def _lowest_other(order, client):
    return min((order.standing(other.client) for other in order if other.client != client), default=0.0)


def _raised(order, client, lowest):
    weight = order.weights.get(client, 1.0)
    missing = max(lowest * weight - order.counter(client), 0.0)
    order.settled[client] = order.settled.get(client, 0.0) + missing


def _nobody(order, request):
    return False


def _every_arrival(order, request):
    return not request.timeline.runs


def _also_returns(order, request):
    return all(other.client != request.client for other in order)


def _set(order, client, lowest):
    weight = order.weights.get(client, 1.0)
    order.settled[client] = order.settled.get(client, 0.0) + lowest * weight - order.counter(client)


def _without_weight(order, client, lowest):
    order.settled[client] = order.settled.get(client, 0.0) + max(lowest - order.standing(client), 0.0)


class _LiftByHand(Fair):
    def add(self, request):
        client = request.client
        if self.lift and request not in self._served.get(client, {}) and not self._queues.get(client):
            waiting = {other.client for other in self}
            floor = min(map(self.standing, waiting)) if waiting else self._lowest()
            own = self.weights.get(client, 1.0)
            running = self.counter(client) - self.settled.get(client, 0.0)
            self.settled[client] = max(self.settled.get(client, 0.0), floor * own - running)
        super().add(request)


WRONG = {
    "fairness.1": [
        Wrong("the number of turns counts, so late clients catch up", _TurnsAreCounted, "no turns to catch up"),
        Wrong("all of a plan have the same turn", _OnePlanOneTurn, "Those who join in the same plan"),
        Wrong("coming back from a preemption is a turn", _ReturnIsATurn, "that is no new one"),
        Wrong("the plan takes the turn", _PlanTakesTheTurn, "Planning changes nothing"),
        Wrong("a client with nothing to ask is forgotten", _ForgetsWhoIsAway, "it is not new"),
    ],
    "fairness.2": [
        Wrong("what might be generated is charged", _the_limit, "not what might have been"),
        Wrong("the prompt is charged at every admission", _every_admission, "A preemption costs the client nothing"),
        Wrong("the prompt is charged as far as it is computed", _as_computed, "from the admission on"),
        Wrong("cached prompt tokens are charged", _cached_too, "that a prefix cache had cost nothing"),
        Wrong("an aborted request pays its whole prompt", _aborted_pays_all, "An aborted request pays"),
    ],
    "fairness.3": [
        Wrong("idleness is credit", _lifting(idle=_nobody), "it does not get back"),
        Wrong(
            "every arrival lifts", _lifting(idle=_every_arrival, to=_lowest_other), "its further arrivals lift nothing"
        ),
        Wrong("coming back from a preemption lifts", _lifting(idle=_also_returns), "comes back from a preemption"),
        Wrong("the counter is set to the lowest, though above it", _lifting(raise_=_set), "never lowers"),
        Wrong("weights are forgotten", _lifting(raise_=_without_weight), "counter / weight"),
    ],
}
RIGHT = {
    "fairness.1": [_Turns, _OwnWalk],
    "fairness.2": [_charge_by_positions],
    "fairness.3": [_lifting(), _LiftByHand],
}
