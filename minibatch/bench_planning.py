"""``minibatch bench --planning``: what a decision costs, for hundreds that run and thousands that wait.

A scheduler plans before every iteration, and while it does the model has nothing to do. So a plan has to be cheap, also
for a long queue: the goal is 2 ms for 256 running and 10,000 waiting requests. Each state here is that of a real engine
that has run on the toy model up to this point, with memory so tight that something has to be decided: a few waiting
requests fit and the next does not, or running ones find no block and somebody has to give way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from tqdm.auto import tqdm

from minibatch.bench import Times, table, timed
from minibatch.checks import check_int
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Plan, Scheduler, check_plan
from minibatch.policies import (
    ADMISSIONS,
    FCFS,
    ORDERS,
    PREEMPTIONS,
    AdmissionPolicy,
    ByTokensLeft,
    Fair,
    Forecast,
    LongestPrefix,
    Order,
    Priority,
    Recompute,
    RoundRobin,
    ShortestFirst,
    Watermark,
)
from minibatch.policies.admission import Future
from minibatch.policies.predictors import Noisy, upper_bound
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import Request, SamplingParams

GOAL = 2.0  # ms
BLOCK = 16
VOCAB = 64
STEPS = BLOCK  # that all the running ones have decoded
ROOM = 24  # blocks for newcomers: a few fit
PREFIXES = 8  # shared ones, of 16 blocks each


@dataclass(frozen=True)
class Load:
    running: int = 256
    waiting: int = 10_000
    plans: int = 64

    def __post_init__(self) -> None:
        """Raises ValueError for a number that makes no sense."""
        for name in ("running", "waiting", "plans"):
            check_int(name, getattr(self, name), 1)


@dataclass(frozen=True)
class Case:
    """A state to plan in.

    ``clients``  over whom the requests are spread
    ``shares``   the requests begin with one of a few long prefixes, which the cache finds again
    ``short``    there is no room at all: those who run have to displace each other
    ``aligned``  all running requests have filled their last block, so that each needs one at the same time
    """

    name: str
    order: Callable[[], Order] = FCFS
    admission: AdmissionPolicy = field(default_factory=Watermark)
    preemption: Recompute = field(default_factory=Recompute)
    clients: int = 100
    shares: bool = False
    short: bool = False
    aligned: bool = False


@dataclass(frozen=True)
class Timing:
    """One case under one scheduler: what the plan decided (numbers of requests), and the times of making it and of
    checking it (``check_plan``). ``cpu`` leaves out the time in which other processes had the core."""

    case: str
    scheduler: str
    computed: int
    admitted: int
    left_waiting: int
    preempted: int
    plan: Times
    cpu: Times
    check: Times


@dataclass(frozen=True)
class Planning:
    load: Load
    goal_ms: float
    timings: tuple[Timing, ...]


def cases(load: Load) -> Iterator[Case]:
    """Every order, admission and preemption policy with a name, and their harder variants."""
    for name, order in ORDERS.items():
        yield Case(f"order: {name}", order)
    yield Case("order: skip, 64 ahead", lambda: FCFS(lookahead=64))
    yield Case("order: prefix, window 64", lambda: LongestPrefix(window=64))
    for clients in sorted({1, min(100, load.waiting), load.waiting}):
        yield Case(f"order: round-robin, {clients:,} clients", RoundRobin, clients=clients)
        yield Case(f"order: fair, {clients:,} clients", Fair, clients=clients)
    yield Case("prefix cache, fcfs", FCFS, shares=True)
    yield Case("prefix cache, prefix", LongestPrefix, shares=True)
    yield Case("prefix cache, prefix, window 64", lambda: LongestPrefix(window=64), shares=True)
    for name, admission in ADMISSIONS.items():
        yield Case(f"admission: {name}", admission=admission())
    displacing = {"priority": Priority}  # it shows only where the urgent are asked first
    for name, preemption in PREEMPTIONS.items():
        yield Case(f"short: {name}", displacing.get(name, FCFS), preemption=preemption(), short=True)
    for name in ("recompute", "swap", "most-blocks"):
        yield Case(f"all short at once: {name}", preemption=PREEMPTIONS[name](), short=True, aligned=True)
    yield Case("displacing: priority", Priority, preemption=PREEMPTIONS["priority"]())
    for name, predictor in (("", upper_bound), (", noisy guesses", Noisy())):
        left = Recompute(displaces=ByTokensLeft(predictor))
        yield Case(f"displacing: shortest remaining{name}", lambda p=predictor: ShortestFirst(p), preemption=left)


def run(load: Load, progress: bool = True) -> Planning:
    """Times every case under both schedulers that re-decide membership."""
    timings: list[Timing] = []
    todo = list(cases(load))
    for case in tqdm(todo, desc="planning", disable=not progress):
        timings += measure(case, load)
    return Planning(load, GOAL, tuple(timings))


def measure(case: Case, load: Load) -> list[Timing]:
    """The same state for both schedulers, their plans in turns. Raises RuntimeError if a plan depends on the plans
    before it: planning may change nothing."""
    engine = prepare(case, load)
    policies = {"admission": case.admission, "preemption": case.preemption}
    places = load.running + load.running // 4
    schedulers = (ContinuousBatching(places, 2048, **policies), ChunkedPrefill(2048, places, **policies))
    first = [_plan(engine, scheduler) for scheduler in schedulers]
    live = {state.request_id: state for state in [*engine.active, *engine.queue]}
    seconds: list[tuple[list[float], ...]] = [([], [], []) for _ in schedulers]
    for _ in range(load.plans):
        for scheduler, expected, (wall, cpu, check) in zip(schedulers, first, seconds, strict=True):
            *spent, plan = timed(lambda s=scheduler: _plan(engine, s))
            if plan != expected:
                raise RuntimeError(f"{case.name}: {scheduler!r} planned differently in the same state")
            wall.append(spent[0])
            cpu.append(spent[1])
            check.append(timed(lambda p=plan, s=scheduler: check_plan(p, s, engine.kv, live, engine.active))[1])
    return [_timing(case, *one) for one in zip(schedulers, first, seconds, strict=True)]


def _plan(engine: Engine, scheduler: Scheduler) -> Plan:
    return scheduler.plan(engine.queue, engine.active, engine.kv, engine.clock.now())


def _timing(case: Case, scheduler: Scheduler, plan: Plan, seconds: tuple[list[float], ...]) -> Timing:
    left = sum(waiting.request not in {p.request for p in plan.preemptions} for waiting in plan.waiting)
    decided = (len(plan.chunks), len(plan.admissions), left, len(plan.preemptions))
    return Timing(case.name, type(scheduler).__name__, *decided, *map(Times.of, seconds))


# ------------------------------------------------------------------------------------------------- the state to plan in


def prepare(case: Case, load: Load) -> Engine:
    """An engine whose running requests have decoded for a while, and to which all the others have just come."""
    held, growing = _held(case.admission, case.shares, case.aligned, load)
    num_blocks = held
    if not case.short:
        num_blocks += growing + ROOM
        num_blocks += int(num_blocks * getattr(case.admission, "share", 0.0))  # a watermark
    engine = _run_up(case, load, num_blocks)
    for i, request in enumerate(_requests(1, load.waiting, case.shares, case.aligned)):
        engine.submit(replace(request, request_id=f"w{i}", client=f"c{i % case.clients}"))
    return engine


@cache
def _held(admission: AdmissionPolicy, shares: bool, aligned: bool, load: Load) -> tuple[int, int]:
    """Blocks that the running requests hold, or that their admission policy counts on; and how many blocks they need
    for the next iteration."""
    engine = _run_up(Case("", admission=admission, shares=shares, aligned=aligned), load, 64 * load.running)
    held = engine.kv.num_units - engine.kv.num_free
    if isinstance(admission, Forecast):
        return Future(engine.active, lambda r: r.max_new_tokens - len(r.generated), BLOCK).peak, 0
    draft = engine.kv.draft()
    return held, sum(draft.need(request, request.num_tokens) for request in engine.active)


def _run_up(case: Case, load: Load, num_blocks: int) -> Engine:
    """Those who run, ``STEPS`` decodes after their prompts. Of those with one prefix the first computes it for all."""
    kv = (PrefixCachedKVCache if case.shares else PagedKVCache)(num_blocks, BLOCK)
    scheduler = ContinuousBatching(load.running, 1 << 20, admission=case.admission)
    engine = Engine(ToyModel(VOCAB), scheduler, kv, order=case.order())
    for i, request in enumerate(_requests(0, load.running, case.shares, case.aligned)):
        if case.shares and i == PREFIXES:
            engine.step()
        engine.submit(replace(request, request_id=f"r{i}", client=f"c{i % case.clients}"))
    for _ in range(STEPS + 1):
        engine.step()
    if len(engine.active) != load.running or engine.queue:
        raise RuntimeError(
            f"{case.name}: {len(engine.active)} run, {len(engine.queue)} wait: {load.running} should run"
        )
    return engine


@cache
def _requests(seed: int, number: int, shares: bool, aligned: bool) -> list[Request]:
    rng = random.Random(seed)
    prefixes = [_tokens(random.Random(i), 16 * BLOCK) if shares else [] for i in range(PREFIXES)]
    made = []
    for i in range(number):
        size = 3 * BLOCK if aligned else BLOCK * rng.randint(2, 5) + i % BLOCK  # one in 16 at the end of its block
        prompt = prefixes[i % PREFIXES] + _tokens(rng, size)
        params = SamplingParams(max_tokens=rng.randint(64, 192), seed=i)
        made.append(Request(prompt, params, priority=rng.randrange(4)))
    return made


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(number)]


# ------------------------------------------------------------------------------------------------------------ in words


def describe(planning: Planning) -> str:
    load, goal = planning.load, planning.goal_ms
    slow = sum(timing.cpu.median > goal for timing in planning.timings)
    tails = sum(timing.cpu.p99 > goal for timing in planning.timings)
    titles = ("case", "prompts", "run", "join", "wait", "lose", "median", "P99", "CPU median", "P99 ", "check")
    return "\n".join(
        [
            f"planning    one iteration for {load.running:,} running and {load.waiting:,} waiting requests, planned "
            f"{load.plans} times; times in ms",
            "            run, join, wait, lose: requests computed, admitted, examined and left waiting, preempted",
            "            CPU: without the time in which the core did something else. check: the median of check_plan",
            "",
            table(titles, (_row(timing, goal) for timing in planning.timings)),
            "",
            f"goal of {goal:g} ms: of {len(planning.timings)} CPU times {slow} medians are above it, {tails} P99 (*)",
        ]
    )


def _row(timing: Timing, goal: float) -> list[str]:
    decided = (timing.computed, timing.admitted, timing.left_waiting, timing.preempted)
    whole = timing.scheduler == ContinuousBatching.__name__
    plan, cpu, above = timing.plan, timing.cpu, "*" if timing.cpu.p99 > goal else " "
    times = (f"{plan.median:.2f}", f"{plan.p99:.2f}", f"{cpu.median:.2f}", f"{cpu.p99:.2f}{above}")
    return [timing.case, "whole" if whole else "cut", *map(str, decided), *times, f"{timing.check.median:.2f}"]
