"""Fairness by virtual token counters: two clients on one GPU, one of which asks for twice as much.

Sheng et al., Fairness in Serving Large Language Models, OSDI 2024: Llama-2-7B on one A10G with room for the K/V of
10,000 tokens. Service is one for an input token and two for an output token. While two clients both have requests
waiting, the services that they get in any interval differ by at most 2U, U = max(w_p * longest prompt, w_q * K/V
tokens), if the one whose counter is lowest is served next (VTC); first come, first served gives to those who ask more.

What a simulation can show: all of it, for it is a matter of who is admitted next; the GPU only decides how many
requests there are a minute. That no work-conserving scheduler without preemption can keep below w_q * M on every
workload is a theorem, and no run shows it.

Our bound is wider by one input token: see :class:`~minibatch.policies.queueing.Fair`. It is proved where the maximum is
reserved and nobody preempted, so that is how requests are admitted here, in all runs. Chosen before any run: blocks of
one token, so that M is what the paper's is. Lengths, and the rates of the two and of the three clients, are the
paper's; the other rates are ours, all high enough that both wait, but for the client that is on and off: while it is
on, it asks for less than its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from minibatch.arrival_processes import ArrivalProcess, OnOff, Poisson
from minibatch.continuous_batching import ContinuousBatching
from minibatch.cost_model import CostModel
from minibatch.distributions import Fixed
from minibatch.engine import Engine
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.models.simulated_model import SimulatedModel
from minibatch.open_loop import Client, clients
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.parallel import run_all
from minibatch.policies.admission import ReserveMaximum
from minibatch.policies.queueing import FCFS, Fair, Order
from minibatch.studies.study import Claim, Study
from minibatch.studies.vtc_plot import draw
from minibatch.trace import Timeline, Trace

COST = CostModel(MODELS["llama-2-7b"], GPUS["a10g"])
CAPACITY, LONGEST = 10_000, 512  # tokens of K/V, and of a prompt
INPUT, OUTPUT = 1.0, 2.0  # service a token
COUNTERS = max(INPUT * LONGEST, OUTPUT * CAPACITY) + INPUT  # U, and our one token more
SERVICES = 2 * COUNTERS
POINTS = 500  # of a line in the figure
ORDERS: dict[str, Callable[[], Order]] = {"FCFS": FCFS, "VTC": Fair, "no lift": lambda: Fair(lift=False)}
TWO, UNEQUAL, THREE, ON_OFF, LATE = "two clients", "unequal lengths", "three clients", "on and off", "one comes late"
CASES = [*((suite, order) for suite in (TWO, UNEQUAL, THREE, ON_OFF) for order in ("FCFS", "VTC"))]
CASES += [(LATE, "VTC"), (LATE, "no lift")]


def suites(minutes: float) -> dict[str, list[Client]]:
    """By name: the clients, who send until the time is up."""
    seconds = 60 * minutes

    def client(name: str, arrivals: ArrivalProcess, prompt: int = 256, output: int = 256, start: float = 0.0) -> Client:
        return Client(name, arrivals, Fixed(prompt), Fixed(output), start, seconds - start)

    def rate(a_minute: float) -> Poisson:
        return Poisson(a_minute / 60)

    return {
        TWO: [client("a", rate(90)), client("b", rate(180))],
        UNEQUAL: [client("a", rate(120), 64, 512), client("b", rate(120), 512, 64)],
        THREE: [client("a", rate(15)), client("b", rate(30)), client("c", rate(90))],
        ON_OFF: [client("a", OnOff(0.5, seconds / 10, seconds / 10)), client("b", rate(180))],
        LATE: [client("a", rate(180)), client("b", rate(180), start=seconds / 3)],
    }


@dataclass(frozen=True)
class Served:
    """What one run says about its clients, in service (weighted tokens) and seconds.

    ``times``, ``service``  after each event, what each client has had so far; arrays of the same length
    ``waits``               by client, whether it had a request waiting, at the same times
    ``share``               of the service that it asked for within the time, what each client got
    ``delay``               median seconds from arrival to first token; of those that got one within the time
    ``total``               service of all together
    ``lead``                largest difference of two counters while both clients wait; NaN if nothing counts
    """

    times: np.ndarray
    service: dict[str, np.ndarray]
    waits: dict[str, np.ndarray]
    share: dict[str, float]
    delay: dict[str, float]
    total: float
    lead: float


def serve(suite: str, order: str, minutes: float, seed: int) -> Served:
    """Runs until nobody sends any more, and looks at what has been served by then."""
    queue, several = ORDERS[order](), suites(minutes)[suite]
    scheduler = ContinuousBatching(max_num_batched_tokens=CAPACITY, admission=ReserveMaximum())
    engine = Engine(SimulatedModel(COST), scheduler, PagedKVCache(CAPACITY, 1), order=queue, record_steps=False)
    for request in clients(several, seed).requests:
        engine.submit(request)
    names, leads = [client.name for client in several], [0.0]
    while engine.clock.now() < 60 * minutes and engine.step() is not None:
        if isinstance(queue, Fair):
            waiting = [name for name in names if any(request.client == name for request in queue)]
            counters = [queue.counter(name) for name in waiting]
            leads.append(max(counters) - min(counters) if len(counters) > 1 else 0.0)
    return account(engine.trace, names, 60 * minutes, max(leads) if isinstance(queue, Fair) else float("nan"))


def account(trace: Trace, names: Sequence[str], until: float, lead: float = float("nan")) -> Served:
    """Who had had how much, when: input is charged when a request is first scheduled, output when it is made."""
    of = {name: [t for t in trace.timelines if t.client == name and t.arrival < until] for name in names}
    events = {name: _events(timelines, until) for name, timelines in of.items()}
    times = np.unique(np.concatenate([times for times, _ in events.values()]))
    service, waits = {}, {}
    for name, (at, amounts) in events.items():
        service[name] = np.concatenate([[0.0], np.cumsum(amounts)])[np.searchsorted(at, times, side="right")]
        arrived = np.sort([t.arrival for t in of[name]])
        begun = np.sort([t.scheduled for t in of[name] if t.scheduled is not None])
        waits[name] = np.searchsorted(arrived, times, "right") > np.searchsorted(begun, times, "right")
    asked = {name: sum(INPUT * t.num_prompt + OUTPUT * t.max_new_tokens for t in of[name]) for name in names}
    firsts = {name: [t.token_times[0] - t.arrival for t in of[name] if t.token_times] for name in names}
    return Served(
        times=times,
        service=service,
        waits=waits,
        share={name: float(service[name][-1] / asked[name]) for name in names},
        delay={name: float(np.median(firsts[name])) for name in names},
        total=float(sum(service[name][-1] for name in names)),
        lead=lead,
    )


def _events(timelines: Sequence[Timeline], until: float) -> tuple[np.ndarray, np.ndarray]:
    """Times, ascending, and the service that each adds."""
    begun = [(t.scheduled, INPUT * t.num_prompt) for t in timelines if t.scheduled is not None]
    made = [(time, OUTPUT) for t in timelines for time in t.token_times]
    rows = np.array(sorted(row for row in begun + made if row[0] <= until)).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def largest_gap(served: Served, first: str, second: str, since: float = 0.0) -> float:
    """The most by which the services of two clients differ over any interval in which both always wait."""
    difference = served.service[first] - served.service[second]
    both = served.waits[first] & served.waits[second] & (served.times >= since)
    largest, low, high = 0.0, np.inf, -np.inf
    for value, waiting in zip(difference.tolist(), both.tolist(), strict=True):
        low, high = (min(low, value), max(high, value)) if waiting else (np.inf, -np.inf)
        largest = max(largest, high - low) if waiting else largest
    return largest


# ---------------------------------------------------------------- verdicts

Runs = dict[tuple[str, str], list[Served]]  # by suite and order, then by seed


def fcfs_claim(runs: Runs) -> Claim:
    several = runs[TWO, "FCFS"]
    ratios = [served.service["b"][-1] / served.service["a"][-1] for served in several]
    worst = min(largest_gap(served, "a", "b") for served in several)
    return Claim(
        claim="first come, first served gives to those who ask: services diverge like the demands, 2 to 1",
        conditions="two clients, 90 and 180 requests a minute, 256 / 256 tokens",
        published="the difference grows without bound",
        ours=f"b gets {_span(ratios, '.2f')} times what a gets, and is {worst:,.0f} ahead at least "
        f"(2U = {SERVICES:,.0f}; holds: ratio within 15 % of 2, difference above 2U)",
        holds=bool(max(abs(ratio / 2 - 1) for ratio in ratios) <= 0.15 and worst > SERVICES),
    )


def bound_claim(runs: Runs) -> Claim:
    several = runs[TWO, "VTC"] + runs[UNEQUAL, "VTC"]
    gap = max(largest_gap(served, "a", "b") for served in several)
    lead = max(served.lead for served in several)
    return Claim(
        claim="under VTC counters differ by at most U, and services over any interval by at most 2U",
        conditions="the same two clients; one with long answers (64 / 512) against one with long prompts (512 / 64)",
        published="U = max(w_p L_input, w_q M) = 20,000; both always wait",
        ours=f"counters {lead:,.0f} of {COUNTERS:,.0f} apart at most, services {gap:,.0f} of {SERVICES:,.0f} "
        f"({gap / SERVICES:.0%}: the bound is for the worst workload)",
        holds=bool(lead <= COUNTERS and gap <= SERVICES),
    )


def work_claim(runs: Runs) -> Claim:
    fair, plain = runs[THREE, "VTC"], runs[THREE, "FCFS"]
    lost = max(1 - a.total / b.total for a, b in zip(fair, plain, strict=True))
    shares = {name: min(served.share[name] for served in fair) for name in "abc"}
    return Claim(
        claim="VTC conserves work: who asks for less than a third gets all of it, the third gets what is left",
        conditions="three clients, 15, 30 and 90 requests a minute, 256 / 256 tokens",
        published="the small clients are served in full",
        ours=f"of what they asked, a gets {shares['a']:.0%}, b {shares['b']:.0%}, c {shares['c']:.0%} at least; in all "
        f"at most {lost:.1%} less than FCFS (holds: a and b 95 %, for the last are still running; 2 %)",
        holds=bool(min(shares["a"], shares["b"]) >= 0.95 and lost <= 0.02),
    )


def isolation_claim(runs: Runs) -> Claim:
    fair, plain = ([served.delay["a"] for served in runs[ON_OFF, order]] for order in ("VTC", "FCFS"))
    return Claim(
        claim="a client within its share is not made to wait by one that floods the server",
        conditions="30 requests a minute every other period, against 180 a minute",
        published="response times of the client within its share stay low",
        ours=f"median time to its first token: VTC {_span(fair, '.1f')} s, FCFS {_span(plain, '.0f')} s (holds: "
        "VTC below a tenth, in each run)",
        holds=all(a < b / 10 for a, b in zip(fair, plain, strict=True)),
    )


def lift_claim(runs: Runs, since: float) -> Claim:
    gaps = {
        order: [largest_gap(served, "a", "b", since) for served in runs[LATE, order]] for order in ("VTC", "no lift")
    }
    fair, unfair = max(gaps["VTC"]), min(gaps["no lift"])
    return Claim(
        claim="without the lift, a client that comes late is served alone until it has caught up",
        conditions=f"two clients, 180 requests a minute each, one of them from {since:g} s on",
        published="least counter first fails after a shift",
        ours=f"services while both wait: {fair:,.0f} apart at most with the lift, {unfair:,.0f} at least without "
        f"(holds: within 2U = {SERVICES:,.0f}, and beyond it)",
        holds=bool(fair <= SERVICES < unfair),
    )


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


# ---------------------------------------------------------------- tables, and all of it


def tabulate(runs: Runs) -> pd.DataFrame:
    """Means over the seeds, by suite, order and client."""
    rows = [
        {
            "suite": suite,
            "order": order,
            "client": name,
            "service": np.mean([served.service[name][-1] for served in several]),
            "of what it asked": np.mean([served.share[name] for served in several]),
            "first token, s": np.mean([served.delay[name] for served in several]),
        }
        for (suite, order), several in runs.items()
        for name in several[0].service
    ]
    return pd.DataFrame(rows).set_index(["suite", "order", "client"])


def over_time(runs: Runs, suite: str, orders: Sequence[str], since: float = 0.0) -> pd.DataFrame:
    """The services of the first seed's run, at no more than ``POINTS`` of the events from ``since`` on."""
    parts = []
    for order in orders:
        served = runs[suite, order][0]
        inside = np.flatnonzero(served.times >= since)
        shown = inside[np.unique(np.linspace(0, len(inside) - 1, POINTS).astype(int))]
        columns = {"time, s": served.times[shown], **{name: served.service[name][shown] for name in "ab"}}
        parts.append(pd.DataFrame({"order": order, **columns}))
    return pd.concat(parts, ignore_index=True)


def run(seed: int = 0, quick: bool = False, progress: bool = True) -> Study:
    minutes, number = (2.0, 1) if quick else (6.0, 3)
    seeds, since = [1000 * seed + k for k in range(number)], 20 * minutes
    found = run_all(serve, [(*case, minutes, s) for case in CASES for s in seeds], progress=progress)
    runs = {case: found[i * number : (i + 1) * number] for i, case in enumerate(CASES)}
    data = {
        "together": over_time(runs, TWO, ("FCFS", "VTC")),
        "late": over_time(runs, LATE, ("no lift", "VTC"), since),
    }
    footer = (
        f"simulated: Llama-2-7B, A10G, K/V of {CAPACITY:,} tokens; 256 / 256 tokens, Poisson, seed {seeds[0]}; "
        "service: 1 an input token, 2 an output token"
    )
    return Study(
        name="vtc",
        title="VTC: two clients, one of which asks for twice as much",
        source="Sheng et al., Fairness in Serving Large Language Models, OSDI 2024",
        setting=f"Llama-2-7B on A10G by roofline, {CAPACITY:,} tokens of K/V in blocks of one, the maximum reserved; "
        "prompts and answers of 256 tokens unless said otherwise, Poisson arrivals; service 1 an input token, 2 an "
        f"output token; {minutes:g} minutes, {number} seed{'' if number == 1 else 's'} from {seeds[0]}, the same "
        "requests for all orders",
        claims=[fcfs_claim(runs), bound_claim(runs), work_claim(runs), isolation_claim(runs), lift_claim(runs, since)],
        differences=DIFFERENCES,
        tables={"Service by client, mean of the seeds": tabulate(runs)},
        data=data,
        footer=footer,
        figure=figure(data, footer),
    )


def figure(data: dict[str, pd.DataFrame], footer: str) -> Figure:
    return draw(data["together"].set_index("order"), data["late"].set_index("order"), SERVICES, footer)


DIFFERENCES = (
    "The bound is one input token wider, 20,001 and 40,002: here the newest token is not yet in the cache.",
    "How many requests the server can take is a roofline's; every suite asks for at least a quarter more.",
    "The maximum is reserved and prompts and decodes share iterations; the paper's server admitted new requests "
    "between iterations of decodes.",
    "Rates of the suites with unequal lengths, with a client that is on and off, and with a late one, are ours.",
    "Clients with weights of 1 to 4 are not rebuilt.",
)
