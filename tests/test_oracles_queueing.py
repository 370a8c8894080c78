"""The whole engine against queueing theory: formulas that were found without it, for times that it measures.

With a clock that charges a constant a step, a simulated request of G tokens and a one-token prompt is a customer whose
service takes G steps: the prefill emits the first token, so G tokens are G iterations. One slot is then a single
server, n slots are n servers, and steps that take as long as the batch is wide are processor sharing.

A mean of waits converges slowly (of a hundred thousand, at a load of 0.8, it has a standard error of 3 %), and an
engine cannot run millions in a test. So every claim has two halves. *Exactly*: each request of an engine's run starts
and ends when :func:`replay`, or Lindley's recursion, says; these are a few lines that know no schedulers, caches or
plans. *On average*: the same lines, over far more requests, give the formula, which is inside a 99 % confidence
interval from batch means (Law and Kelton, *Simulation Modeling and Analysis*, on steady-state output). Slow tests do
without the stand-in: there the interval is that of the engine's own times.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

import numpy as np
import pytest
from scipy import integrate, stats

from minibatch import ChunkedPrefill, ContiguousKVCache, ContinuousBatching, PagedKVCache, StaticBatching
from minibatch.arrival_processes import Evenly, Poisson
from minibatch.distributions import Empirical, Fixed, Geometric, LogNormal, Uniform
from minibatch.metrics import latencies
from minibatch.open_loop import synthetic
from minibatch.policies.predictors import Oracle
from minibatch.policies.preemption import ByTokensLeft, Swap
from minibatch.policies.queueing import ShortestFirst
from minibatch.simulation import simulate

ONE = Fixed(1)
LONGEST = 1 << 20


# ---------------------------------------------------------------- statistics


def batch_means(values, control=None, known=0.0, batches=25):
    """Mean, and half the width of its 99 % confidence interval: means of long batches are nearly independent, and
    Student's t says how far their mean may be off.

    ``control``  values of the same requests whose mean is ``known``: what of the scatter is theirs is taken out, by
                 regression (control variates)
    """
    means = _means(values, batches)
    freedom = batches - 1
    if control is not None:
        others = _means(control, batches)
        means = means - np.cov(means, others)[0, 1] / others.var(ddof=1) * (others - known)
        freedom -= 1
    return means.mean(), stats.t.ppf(0.995, freedom) * means.std(ddof=1) / math.sqrt(batches)


def _means(values, batches):
    return np.array([batch.mean() for batch in np.array_split(np.asarray(values, dtype=float), batches)])


def check_mean(values, expected, within, *, control=None, known=0.0, scale=None):
    """The formula lies in the interval, and the interval is narrow (in parts of ``scale``): else it says nothing."""
    mean, half = batch_means(values, control, known)
    assert half <= within * abs(expected if scale is None else scale), f"{mean:.5g} +- {half:.2g} is too wide"
    assert abs(mean - expected) <= half, f"{mean:.5g} +- {half:.2g}, and the formula says {expected:.5g}"


# ---------------------------------------------------------------- what a queue does, without an engine


def lindley(arrivals, services):
    """Waits of a single server, first come first served: W' = max(0, W + S - A) (Lindley 1952), all at once."""
    walk = np.concatenate([[0.0], np.cumsum(services[:-1] - np.diff(arrivals))])
    return walk - np.minimum.accumulate(walk)


def replay(arrivals, lengths, slots=math.inf, step=lambda batch: 1.0, shortest=False, displace=False):
    """When each request starts and ends: arrays. It jumps from change to change, so long requests cost nothing.

    ``step``      seconds of an iteration with so many requests
    ``shortest``  the shortest is next, not the first; ``displace``: and it displaces the one that runs, which resumes
                  where it was (one slot)
    """
    n, now, rounds, coming = len(arrivals), 0.0, 0, 0
    arrivals, lengths = arrivals.tolist(), lengths.tolist()
    waiting, running = [], []  # heaps: (order, request), (round in which it ends, request)
    left, start, finish = list(lengths), np.full(n, np.nan), np.empty(n)
    while coming < n or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[coming])
        while coming < n and arrivals[coming] <= now:
            heappush(waiting, (left[coming] if shortest else coming, coming))
            coming += 1
        if displace and waiting and running and waiting[0][0] < running[0][0] - rounds:
            end, who = heappop(running)
            left[who] = end - rounds
            heappush(waiting, (left[who], who))
        while waiting and len(running) < slots:
            _, who = heappop(waiting)
            start[who] = now if math.isnan(start[who]) else start[who]
            heappush(running, (rounds + left[who], who))
        duration, turns = step(len(running)), running[0][0] - rounds
        if coming < n:
            turns = min(turns, max(1, math.ceil((arrivals[coming] - now) / duration)))
        now, rounds = now + turns * duration, rounds + turns
        while running and running[0][0] == rounds:
            finish[heappop(running)[1]] = now
    return start, finish


def columns(workload):
    """Arrival times and output lengths."""
    arrivals = np.array([request.arrival_time for request in workload.requests])
    return arrivals, np.array(list(workload.output_lengths.values()))


def draw(n, load, lengths, slots=1, seed=0):
    """The same without requests, for many: service takes a second a token."""
    for_times, for_lengths = np.random.default_rng(seed).spawn(2)
    outputs = lengths.draw(for_lengths, n)
    return Poisson(slots * load / Law(lengths).mean).times(for_times, n), outputs


class Law:
    """Probabilities ``p`` of the lengths ``k``, to the last that matters, with the moments that theory asks for."""

    def __init__(self, lengths):
        if isinstance(lengths, Geometric):
            self.k = np.arange(1, int(40 * lengths.mean) + 2)
            self.p = (1 - 1 / lengths.mean) ** (self.k - 1) / lengths.mean
        elif isinstance(lengths, LogNormal):
            self.k = np.arange(1, lengths.cap + 1)
            edges = np.append(np.log(self.k[:-1] + 0.5), np.inf) - math.log(lengths.median)
            below = stats.norm.cdf(edges * stats.norm.ppf(0.9) / math.log(lengths.p90 / lengths.median))
            self.p = np.diff(below, prepend=0.0)
        else:
            values = {Fixed: lambda: [lengths.tokens], Empirical: lambda: lengths.values}
            values = values.get(type(lengths), lambda: np.arange(lengths.low, lengths.high + 1))()
            self.k, counts = np.unique(values, return_counts=True)
            self.p = counts / counts.sum()
        self.mean, self.square = float(self.k @ self.p), float(self.k**2 @ self.p)


# ---------------------------------------------------------------- and with one


def queue(workload, scheduler, kv=None, step=1.0, **options):
    """The waits and the times in the system that an engine measures; ``step``: seconds, or a function of the plan."""
    duration = step if callable(step) else lambda plan: step
    trace = simulate(workload, scheduler, kv or PagedKVCache(1 << 16, 1), duration, **options)
    measured = latencies(trace)
    return measured["queueing_delay"], measured["e2e"]


def poisson(n, load, lengths, slots=1, seed=0):
    """A workload for the engine: prompts of one token, service takes a second a token."""
    return synthetic(n, Poisson(slots * load / Law(lengths).mean), ONE, lengths, seed)


def same_times(measured, expected):
    np.testing.assert_allclose(measured, expected, rtol=0, atol=1e-6)


def pollaczek_khinchine(lengths, load):
    """Mean wait of M/G/1 in steps, lambda E[S^2] / 2(1 - rho): of whole lengths, so that nothing has to be small."""
    law = Law(lengths)
    return load / law.mean * law.square / (2 * (1 - load))


def fcfs(arrivals, outputs, lengths, load, slots=1):
    """For ``check_mean``: what the same requests would wait at one server as fast as all slots, in order of arrival."""
    return {"control": lindley(arrivals, outputs / slots), "known": pollaczek_khinchine(lengths, load) / slots}


# ---------------------------------------------------------------- one server

LAWS = [Geometric(8), Fixed(8), Uniform(1, 15), LogNormal(5, 20, 60)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.describe())
def test_on_one_slot_each_request_waits_as_lindley_says(law):
    """One slot. Fault: the first token takes an iteration of its own, a request is seen, admitted or let go an
    iteration late, or what arrives in an idle engine waits for the tick of a clock."""
    workload = poisson(150, 0.7, law)
    arrivals, lengths = columns(workload)
    for scheduler in (ContinuousBatching(1), StaticBatching(1), ChunkedPrefill(1, 1)):
        waits, times = queue(workload, scheduler, step=1.125)
        same_times(waits, lindley(arrivals, 1.125 * lengths))
        same_times(times, waits + 1.125 * lengths)


@pytest.mark.parametrize("load", [0.8, 0.9])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.describe())
def test_on_one_slot_the_mean_wait_is_that_of_pollaczek_and_khinchine(law, load):
    """One slot. Fault: waits that are right one by one, for lengths or arrivals that are not what they should be."""
    arrivals, lengths = draw(3_000_000, load, law)
    check_mean(lindley(arrivals, lengths), pollaczek_khinchine(law, load), within=0.04)


def test_the_mean_waits_of_long_requests_are_the_textbook_s():
    """Pollaczek and Khinchine's formula itself, in units of the mean service. Fault: a moment of whole lengths."""
    for load, exponential, deterministic in ((0.8, 4.0, 2.0), (0.9, 9.0, 4.5)):
        assert pollaczek_khinchine(Geometric(4000), load) / 4000 == pytest.approx(exponential, rel=2e-4)
        assert pollaczek_khinchine(Fixed(8), load) / 8 == pytest.approx(deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("law", [Fixed(1), Geometric(2)], ids=lambda law: law.describe())
def test_on_one_slot_the_engine_s_own_mean_wait_is_that_of_the_formula(law):
    """The same without a stand-in: twenty thousand requests through the engine, M/D/1 and Geo/1 at a load of 0.8."""
    waits, _ = queue(poisson(20_000, 0.8, law, seed=1), ContinuousBatching(1))
    check_mean(waits, pollaczek_khinchine(law, 0.8), within=0.25)


# ---------------------------------------------------------------- n servers


def erlang_c(slots, load):
    """P(wait) and the mean wait in mean services, of M/M/n."""
    offered = slots * load
    terms = [offered**k / math.factorial(k) for k in range(slots)]
    last = offered**slots / math.factorial(slots) / (1 - load)
    p_wait = last / (sum(terms) + last)
    return p_wait, p_wait / (slots * (1 - load))


def slotted(slots, load, mean, most=400):
    """The same where service is geometric, and begins and ends between steps of one second: exact.

    A Markov chain of the requests in the system at the beginning of a step (``most`` at most): a binomial number of
    them ends in it, a Poisson number arrives. If then nobody is there, the next arrival begins a step. Little's law
    turns the number that waits into a wait; who comes during a step waits half a step on average for its end.
    """
    rate = slots * load / mean
    ends = [stats.binom.pmf(np.arange(k + 1), k, 1 / mean) for k in range(slots + 1)]
    come = stats.poisson.pmf(np.arange(60), rate)
    move, delayed = np.zeros((most, most)), np.zeros(most)
    for there in range(1, most):
        for ended, p in enumerate(ends[min(there, slots)]):
            into = there - ended + np.arange(len(come))
            np.add.at(move[there], np.minimum(into, most - 1), p * come)
            delayed[there] += p * come @ np.minimum(np.arange(len(come)), np.maximum(into - slots, 0))
    idle = move[:, 0].copy()
    move[:, 1] += idle
    move[:, 0] = 0.0
    equations = (move - np.eye(most)).T[1:, 1:]
    equations[-1] = 1.0  # one follows from the others; instead, the shares add up to 1
    share = np.linalg.solve(equations, np.append(np.zeros(most - 2), 1.0))
    arrivals = rate + share @ idle[1:]  # a step, and the idle time after it
    waiting = share @ np.maximum(np.arange(1, most) - slots, 0) + rate / 2
    return share @ delayed[1:] / arrivals, waiting / arrivals / mean


TABLE = [(8, 0.8, 0.4576, 0.2860), (16, 0.9, 0.5913, 0.3696)]


@pytest.mark.parametrize(("slots", "load", "p_wait", "wait"), TABLE)
def test_as_steps_become_small_the_slots_become_those_of_erlang(slots, load, p_wait, wait):
    """The two formulas, not the engine. Fault: an oracle that is wrong. Whole steps add less than one to a wait."""
    assert erlang_c(slots, load) == pytest.approx((p_wait, wait), abs=5e-5)
    biases = [slotted(slots, load, mean)[1] - erlang_c(slots, load)[1] for mean in (250, 1000, 4000)]
    assert biases == pytest.approx([biases[0], biases[0] / 4, biases[0] / 16], rel=0.02)
    assert 0 < biases[0] < 1 / 250
    assert slotted(slots, load, 4000) == pytest.approx((p_wait, wait), rel=2e-3)


@pytest.mark.parametrize(("slots", "load"), [(8, 0.8), (16, 0.9)])
def test_on_n_slots_the_mean_wait_is_that_of_erlang_in_steps(slots, load):
    """Fault: whoever finds a free slot waits for somebody else's, or a slot that was left stays empty for a step."""
    law = Geometric(30)
    arrivals, lengths = draw(120_000, load, law, slots)
    start, _ = replay(arrivals, lengths, slots)
    p_wait, wait = slotted(slots, load, 30)
    control = fcfs(arrivals, lengths, law, load, slots)
    check_mean(start - arrivals, 30 * wait, within=0.06, **control)
    check_mean(start - arrivals >= 1, p_wait, within=0.04, **control)


@pytest.mark.parametrize("slots", [2, 8])
def test_on_n_slots_each_request_starts_and_ends_when_the_replay_says(slots):
    """Fault: as for one slot; and a request that joins a running batch is aligned to its steps by too much."""
    workload = poisson(200, 0.85, Geometric(20), slots)
    arrivals, lengths = columns(workload)
    start, finish = replay(arrivals, lengths, slots)
    schedulers = ContinuousBatching(slots), ContinuousBatching(slots, first="prefill"), ChunkedPrefill(slots, slots)
    for scheduler, kv in zip(schedulers, (ContiguousKVCache(slots, LONGEST), None, None), strict=True):
        waits, times = queue(workload, scheduler, kv)
        same_times(waits, start - arrivals)
        same_times(times, finish - arrivals)


@pytest.mark.slow
def test_on_eight_slots_the_engine_s_own_mean_wait_is_that_of_erlang():
    """The same without a stand-in: 1200 requests of 250 tokens, where Erlang's C is right within a step."""
    law, slots, load = Geometric(250), 8, 0.8
    workload = poisson(1200, load, law, slots)
    waits, _ = queue(workload, ContinuousBatching(slots))
    control = fcfs(*columns(workload), law, load, slots)
    check_mean(waits / 250, slotted(slots, load, 250)[1], within=0.35, **{k: v / 250 for k, v in control.items()})


# ---------------------------------------------------------------- shared, and by size

INSENSITIVE = [Geometric, Fixed, lambda mean: Empirical((mean // 2,) * 9 + (11 * mean // 2,))]


@pytest.mark.parametrize("kind", INSENSITIVE, ids=["exponential", "deterministic", "two sizes"])
def test_steps_in_proportion_to_the_batch_are_processor_sharing(kind):
    """Unlimited slots, an iteration takes a second a request: everybody is five times as slow as alone, T = S / (1 -
    rho), whatever the lengths (Kleinrock, *Queueing Systems* II). Fault: a batch that is charged for more or fewer
    requests than it has, or newcomers that wait for others to end."""
    workload = poisson(250, 0.8, kind(20))
    start, finish = replay(*columns(workload), step=float)
    waits, times = queue(workload, ContinuousBatching(10**6, 10**6), step=lambda plan: float(plan.num_tokens))
    same_times(waits, start - columns(workload)[0])
    same_times(times, finish - columns(workload)[0])

    arrivals, lengths = draw(50_000, 0.8, kind(4000))
    _, finish = replay(arrivals, lengths, step=float)
    control = fcfs(arrivals, lengths, kind(4000), 0.8)
    check_mean((finish - arrivals) / 4000, 5.0, within=0.025, **{k: v / 4000 for k, v in control.items()})


@pytest.mark.slow
def test_the_engine_s_own_mean_time_is_that_of_processor_sharing():
    """The same without a stand-in. An iteration in progress ends before a newcomer joins: that adds less than 5 %."""
    workload = poisson(2500, 0.8, Geometric(40))
    _, times = queue(workload, ContinuousBatching(10**6, 10**6), step=lambda plan: float(plan.num_tokens))
    arrivals, lengths = columns(workload)
    mean, half = batch_means(times / 40, lindley(arrivals, lengths) / 40, pollaczek_khinchine(Geometric(40), 0.8) / 40)
    assert half < 0.6 and 5.0 - half < mean < 5.25 + half


def cobham(lengths, load):
    """Mean wait in steps, the shortest first and nobody interrupted: non-preemptive priorities (Cobham 1954), one
    class a length, first come first served within it."""
    law = Law(lengths)
    upto = load / law.mean * np.cumsum(law.k * law.p)
    below = np.concatenate([[0.0], upto[:-1]])
    return load / law.mean * law.square / 2 * np.sum(law.p / ((1 - below) * (1 - upto)))


def schrage_miller(load):
    """Mean time in the system under shortest-remaining-first, exponential service of mean 1 (Schrage and Miller,
    *Operations Research* 1966)."""
    x = np.linspace(0.0, 50.0, 200_001)
    tail = np.exp(-x)
    below = load * (1 - tail * (1 + x))  # load of those shorter than x
    square = 2 - tail * (x**2 + 2 * x + 2) + x**2 * tail
    stay = integrate.cumulative_trapezoid(1 / (1 - below), x, initial=0.0)
    return integrate.trapezoid(tail * (load * square / (2 * (1 - below) ** 2) + stay), x)


def by_size(workload, displace):
    """Schedulers see 999 tokens for everybody; only the oracle knows better. One that is displaced is swapped, so it
    loses no iteration: it comes back with one token to compute."""
    oracle = Oracle(workload.output_lengths)
    preemption = Swap(displaces=ByTokensLeft(oracle)) if displace else Swap()
    return {"scheduler": ContinuousBatching(1, 1024, preemption=preemption), "order": ShortestFirst(oracle)}


@pytest.mark.parametrize("displace", [False, True])
@pytest.mark.parametrize("law", [Geometric(8), Uniform(1, 30)], ids=lambda law: law.describe())
def test_by_size_each_request_starts_and_ends_when_the_replay_says(law, displace):
    """ShortestFirst, and ByTokensLeft with Swap. Fault: an index that is sorted by something else, a displaced one
    counts with all its tokens, equals displace each other, or resuming costs an iteration."""
    workload = synthetic(200, Poisson(0.85 / Law(law).mean), ONE, law, max_tokens=999)
    arrivals, lengths = columns(workload)
    start, finish = replay(arrivals, lengths, 1, shortest=True, displace=displace)
    waits, times = queue(workload, **by_size(workload, displace))
    same_times(waits, start - arrivals)
    same_times(times, finish - arrivals)


def test_with_the_shortest_first_the_mean_wait_is_that_of_cobham():
    """Fault: as above, where it hides in single requests. FCFS would be 4.0."""
    assert cobham(Geometric(4000), 0.8) / 4000 == pytest.approx(1.882, abs=1e-3)
    for law in (Geometric(4000), Geometric(8)):
        arrivals, lengths = draw(100_000, 0.8, law)
        start, _ = replay(arrivals, lengths, 1, shortest=True)
        check_mean(start - arrivals, cobham(law, 0.8), within=0.03, **fcfs(arrivals, lengths, law, 0.8))


def test_with_the_least_left_first_the_mean_time_is_that_of_schrage_and_miller():
    """Fault: as above. FCFS would be 5.0."""
    assert schrage_miller(0.8) == pytest.approx(2.353, abs=1e-3)
    law = Geometric(4000)
    arrivals, lengths = draw(100_000, 0.8, law)
    _, finish = replay(arrivals, lengths, 1, shortest=True, displace=True)
    control = fcfs(arrivals, lengths, law, 0.8)
    check_mean(finish - arrivals, 4000 * schrage_miller(0.8), within=0.03, **control)


@pytest.mark.slow
@pytest.mark.parametrize("displace", [False, True])
def test_by_size_the_engine_s_own_means_are_those_of_the_formulas(displace):
    """The same without a stand-in; who comes waits for the end of a step, which lengthens a time by at most that."""
    law = Geometric(12)
    workload = synthetic(4000, Poisson(0.8 / 12), ONE, law, max_tokens=999)
    waits, times = queue(workload, **by_size(workload, displace))
    control = fcfs(*columns(workload), law, 0.8)
    if displace:
        mean, half = batch_means(times, **control)
        assert half < 0.15 * mean and abs(mean - 12 * schrage_miller(0.8)) < half + 1
    else:
        check_mean(waits, cobham(law, 0.8), within=0.15, **control)


# ---------------------------------------------------------------- how much is too much


def mean_longest(law, n):
    """E[max of n lengths]."""
    return float(np.sum(1 - (np.cumsum(law.p) - law.p) ** n))


def growth(scheduler, rate, law, steps, seed=0):
    """How many wait, and when, at the start of each iteration that admits somebody or, with continuous batching, of
    any; after a tenth of the run."""
    workload = synthetic(int(rate * steps), Evenly(rate), ONE, law, seed)
    counts = simulate(workload, scheduler, ContiguousKVCache(8, 64), lambda plan: 1.0).counts
    last = workload.requests[-1].arrival_time
    every = isinstance(scheduler, ContinuousBatching)
    kept = [c for c in counts if steps / 10 < c.start < last and (every or c.admitted)]
    return np.array([c.start for c in kept]), np.array([c.num_waiting for c in kept])


@pytest.mark.parametrize("kind", [StaticBatching, ContinuousBatching])
def test_above_its_limit_a_queue_grows_by_what_is_too_much(kind):
    """Eight slots, one step a second: a static batch serves ``8 / E[max of 8]`` requests a second, continuous batching
    ``8 / E[S]``. Fault: a batch that is left early or late, slots that stay empty, or a queue that is counted wrong.

    Arrivals come evenly: what is random is the service."""
    law = Law(Uniform(1, 39))
    limit = 8 / (mean_longest(law, 8) if kind is StaticBatching else law.mean)
    start, waiting = growth(kind(8), 1.2 * limit, Uniform(1, 39), 4000)
    slope = 0.2 * limit
    check_mean(np.diff(waiting) - slope * np.diff(start), 0.0, within=0.25, scale=slope * np.diff(start).mean())
    assert waiting[-1] - waiting[0] == pytest.approx(slope * (start[-1] - start[0]), rel=0.25)


@pytest.mark.parametrize("kind", [StaticBatching, ContinuousBatching])
def test_below_its_limit_a_queue_stays_short(kind):
    """The same at nine tenths of the limit. Fault: as above, but smaller."""
    law = Law(Uniform(1, 39))
    limit = 8 / (mean_longest(law, 8) if kind is StaticBatching else law.mean)
    _, waiting = growth(kind(8), 0.9 * limit, Uniform(1, 39), 4000)
    assert waiting.max() <= 16


def test_between_the_two_limits_only_a_static_batch_is_too_slow():
    """What continuous batching is for: the same requests, at a rate that keeps its slots four fifths busy."""
    law = Law(Uniform(1, 39))
    rate = 0.8 * 8 / law.mean
    start, waiting = growth(StaticBatching(8), rate, Uniform(1, 39), 3000)
    assert waiting[-1] == pytest.approx((rate - 8 / mean_longest(law, 8)) * start[-1], rel=0.1)
    assert growth(ContinuousBatching(8), rate, Uniform(1, 39), 2000)[1].max() <= 8
