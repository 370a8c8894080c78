"""Policies of one's own: found by name, run in an engine; what one of them does wrong is stopped, in its name.

A policy is what a reader of this project changes first. So each mistake that is easily made in one has a test here.
"""

import importlib
import pickle
import re
import sys
from functools import partial

import pytest
from helpers import ask, check_invariants, check_solo, drive, run_checked

from minibatch import ChunkedPrefill, ContinuousBatching, Engine, PagedKVCache, ToyModel, policies
from minibatch.plan import PlanError
from minibatch.policies import (
    ADMISSIONS,
    ORDERS,
    PREEMPTIONS,
    ByTokensLeft,
    Optimistic,
    Order,
    Recompute,
    ShortestFirst,
)
from minibatch.policies.predictors import Noisy, Oracle, like_its_prompt

TABLES = {"order": ORDERS, "admission": ADMISSIONS, "preemption": PREEMPTIONS}
METHODS = {"order": ("add", "take", "end", "walk"), "admission": ("tokens", "objection"), "preemption": ("choose",)}
NAMES = [(kind, name) for kind, table in TABLES.items() for name in table]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_every_name_makes_a_new_policy_that_can_do_its_work(kind, name):
    """Fault: a name in a table makes nothing that works, or the same order for two engines."""
    made = [policies.make(name, TABLES[kind], METHODS[kind]) for _ in range(2)]
    assert made[0] is not made[1] and type(made[0]) is type(made[1])
    for policy in made:
        assert all(callable(getattr(policy, method)) for method in METHODS[kind])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module of policies in it."""
    (tmp_path / "policies_of_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("policies_of_mine", None)


MINE = """
from minibatch.policies import Fair, Order

number = 3


class Mine(Order):
    def key(self, request):
        return -request.num_prompt


def weighted():
    return Fair(weights={"x": 2.0})


class Half:
    add = take = end = None


def fails():
    raise KeyError("inside")
"""


def make(name):
    return policies.make(name, ORDERS, METHODS["order"])


def test_a_dotted_name_is_a_class_or_a_function_of_the_working_directory_or_of_a_package(here):
    """Fault: a policy beside the user's files is not found, or the search path stays changed."""
    before = list(sys.path)
    assert type(make("policies_of_mine:Mine")).__name__ == "Mine"
    assert make("policies_of_mine:weighted").weights == {"x": 2.0}
    assert isinstance(make("minibatch.policies.queueing:Fair"), policies.Fair)
    assert make("policies_of_mine:Mine") is not make("policies_of_mine:Mine")
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fsfs", "no policy 'fsfs': there are fcfs, skip, priority, .*or a dotted name such as mymodule:MyOrder"),
        ("FCFS", "no policy 'FCFS'"),
        ("", "no policy ''"),
        ("fcfs:", "no policy 'fcfs:'"),
        ("no_such_module:X", "no policy 'no_such_module:X': No module named 'no_such_module'"),
        ("policies_of_mine:Nobody", "no policy 'policies_of_mine:Nobody': module .* has no attribute 'Nobody'"),
        ("policies_of_mine:number", "policies_of_mine:number is 3: give a class, or a function that makes the policy"),
        ("policies_of_mine:Half", "which has no add, take, end, walk"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_there_is(name, words, here):
    """Fault: a typing error ends in an ImportError or AttributeError from somewhere, or makes another policy."""
    before = list(sys.path)
    with pytest.raises(ValueError, match=words):
        make(name)
    assert sys.path == before


# ---------------------------------------------------------------- what a policy is called in traces and errors


class Constant:
    """A predictor that is an object of a class without a repr."""

    def __call__(self, request):
        return 1


def times(factor, request):
    return factor


OBJECTS = {
    **{f"{kind} {name}": TABLES[kind][name] for kind, name in NAMES},
    "shortest by its prompt": lambda: ShortestFirst(like_its_prompt),
    "shortest by a noisy oracle": lambda: ShortestFirst(Noisy(Oracle({"a": 3}), sigma=1.0, seed=5)),
    "preemptive shortest": lambda: Recompute(displaces=ByTokensLeft(Noisy())),
    "a rule without a name": lambda: Recompute(victim=lambda candidates, memory: candidates[0]),
    "an own order": lambda: Longest(),
    "an own admission": lambda: Patient(),
    "a predictor that is an object": lambda: ShortestFirst(Constant()),
    "a predictor that is a partial function": lambda: Recompute(displaces=ByTokensLeft(partial(times, 2))),
}


@pytest.mark.parametrize("build", OBJECTS.values(), ids=OBJECTS)
def test_a_policy_is_called_the_same_in_every_run(build):
    """Fault: an address in a trace's header makes two equal runs differ, and a reader none the wiser."""
    one, other = build(), build()
    assert repr(one) == repr(other) and type(one).__name__ in repr(one)
    assert not re.search(r" at 0x|object at", repr(one))


def test_equal_policies_are_equal_and_different_ones_are_called_differently():
    """Fault: two configurations that differ in a policy look the same in their headers."""
    for kind in ("admission", "preemption"):
        for name, factory in TABLES[kind].items():
            assert factory() == factory(), name
    for table in TABLES.values():
        assert len({repr(factory()) for factory in table.values()}) == len(table)


# ---------------------------------------------------------------- ten lines of one's own


class Longest(Order):
    """The longest prompts first."""

    def key(self, request):
        return -request.num_prompt

    def note(self, request):
        return f"{request.num_prompt} prompt tokens"


class Patient(Optimistic):
    """Nobody joins while more than two run."""

    def objection(self, request, num_tokens, draft):
        return f"{len(draft.running)} run" if len(draft.running) > 2 else ""


def oldest_first(candidates, memory):
    return min(candidates, key=lambda request: request.arrival_time)


OWN = {
    "order": {"order": Longest},
    "admission": {"admission": Patient},
    "victim rule": {"preemption": lambda: Recompute(victim=oldest_first)},
}


def an_engine(kind=ContinuousBatching, num_blocks=8, order=None, **decisions):
    limits = (4, 64) if kind is ContinuousBatching else (8, 4)
    return Engine(ToyModel(), kind(*limits, **decisions), PagedKVCache(num_blocks, 4), order=order)


@pytest.mark.parametrize("kind", [ContinuousBatching, ChunkedPrefill])
@pytest.mark.parametrize("name", OWN)
def test_ten_lines_are_a_policy(name, kind):
    """Fault: a policy of one's own needs to know more than its own question; or it changes tokens."""
    engine = an_engine(kind, **{part: build() for part, build in OWN[name].items()})
    requests = [ask(f"r{i}", 3 + i % 5, 9, at=0.5 * i) for i in range(9)]
    results = run_checked(engine, requests, fcfs=name == "admission")
    check_solo(requests, results)
    said = {reason for step in engine.trace.steps for _, reason in step.waiting}
    said |= {step.rest for step in engine.trace.steps}
    if name == "order":
        assert any(re.fullmatch(r"behind r\d \(\d prompt tokens\): \d more", reason) for reason in said)
    elif name == "admission":
        assert "3 run" in said and max(len(step.members) for step in engine.trace.steps) == 3
    else:
        victims = [p for step in engine.trace.steps for p in step.preempted]
        assert victims and repr(engine.scheduler.preemption) == "Recompute(victim=oldest_first, displaces=None)"


# ---------------------------------------------------------------- mistakes


class Wrong:
    """A policy's method that goes wrong until it is mended; ``make`` gets the engine, and then the arguments."""

    mended = True
    engine = None
    make = None

    def wrong(self, *arguments):
        return type(self).make(type(self).engine, *arguments)


class WrongOrder(Wrong, Order):
    def walk(self, draft, now):
        return super().walk(draft, now) if self.mended else self.wrong(draft, now)


class WrongNote(Wrong, Order):
    def note(self, request):
        return "" if self.mended else self.wrong(request)


class WrongTokens(Wrong, Optimistic):
    def tokens(self, request, size):
        return size if self.mended else self.wrong(request, size)


class WrongObjection(Wrong, Optimistic):
    def objection(self, request, num_tokens, draft):
        return "" if self.mended else self.wrong(request, num_tokens, draft)


class WrongChoice(Wrong, Recompute):
    def choose(self, running, memory):
        return super().choose(running, memory) if self.mended else self.wrong(running, memory)


class WrongVictim(Wrong, Recompute):
    """``Recompute(victim=...)`` with a rule that goes wrong."""

    def choose(self, running, memory):
        if self.mended:
            return super().choose(running, memory)
        return Recompute(victim=lambda candidates, memory: self.wrong(candidates, memory)).choose(running, memory)


class WrongDisplacing(Wrong, Recompute):
    def __init__(self):
        super().__init__(displaces=self.rank)

    def rank(self, request):
        return 0 if self.mended else self.wrong(request)


def boom(engine, *arguments):
    raise KeyError("boom")


def state(engine, name):
    return engine.life.live[name]


MISTAKES = {
    "names a request twice": (WrongOrder, lambda e, d, now: [state(e, "w"), state(e, "w")], "named w, twice"),
    "names one that runs": (WrongOrder, lambda e, d, now: [state(e, "a")], "named a, which does not wait in it"),
    "names one that is to come": (WrongOrder, lambda e, d, now: [state(e, "far")], "named far, which does not wait"),
    "forgets to return the walk": (WrongOrder, lambda e, d, now: None, "walks over None"),
    "names no request": (WrongOrder, lambda e, d, now: [3], "named 3, which does not wait in it"),
    "sets too few tokens aside": (
        WrongTokens,
        lambda e, r, size: size - 1,
        "sets aside 2 tokens for w: this has",
    ),
    "sets too many tokens aside": (
        WrongTokens,
        lambda e, r, size: 10**6,
        "sets aside 1000000 tokens for w: this has",
    ),
    "sets a fraction aside": (WrongTokens, lambda e, r, size: size + 0.5, "sets aside 3.5 tokens for w"),
    "sets nothing aside": (WrongTokens, lambda e, r, size: None, "sets aside None tokens for w"),
    "displaces one that waits": (WrongChoice, lambda e, r, m: state(e, "w"), "chose w, which is no candidate"),
    "displaces one that is to come": (WrongChoice, lambda e, r, m: state(e, "far"), "chose far, which is no candidate"),
    "displaces no request": (WrongChoice, lambda e, r, m: "a", "chose str 'a', which is no candidate"),
    "has a rule that picks another": (WrongVictim, lambda e, c, m: state(e, "w"), "chose w, which"),
}
RAISING = {
    "has an error in walk": (WrongOrder, boom),
    "has an error in walk after one request": (
        WrongOrder,
        lambda e, d, now: (boom(e) if i else state(e, "w") for i in (0, 1)),
    ),
    "has an error in its note": (WrongNote, boom),
    "has an error in tokens": (WrongTokens, boom),
    "has an error in objection": (WrongObjection, boom),
    "has an error in choose": (WrongChoice, boom),
    "has an error in its victim rule": (WrongVictim, boom),
    "has an error in displaces": (WrongDisplacing, boom),
}
UNNOTICED = {"has a rule that picks nobody": (WrongVictim, lambda e, candidates, memory: None)}


def check_mistake(kind, make, fragment, monkeypatch, error=PlanError):
    """``a`` and ``b`` run; ``w``, ``x`` and ``y`` wait, of which ``x`` finds no room; ``far`` is to come.

    For a choice of victims, the pool is so small that ``a`` and ``b`` cannot both have their next token.
    """
    policy = kind()
    part = "order" if isinstance(policy, Order) else "admission" if isinstance(policy, Optimistic) else "preemption"
    chooses = kind in (WrongChoice, WrongVictim)
    engine = an_engine(num_blocks=5 if chooses else 8, **{part: policy})
    running = [ask("a", 7, 6, at=None), ask("b", 6, 6, at=None), ask("far", 3, 4, at=50.0)]
    waiting = [ask("w", 3, 4, at=None), ask("x", 20, 1, at=None), ask("y", 3, 4, at=None)]
    for request in running:
        engine.submit(request)
    for _ in range(3 if chooses else 2):
        engine.step()
    for request in waiting:
        engine.submit(request)
    monkeypatch.setattr(kind, "engine", engine)
    monkeypatch.setattr(kind, "make", make)
    monkeypatch.setattr(kind, "mended", False)
    calls = []
    forward = engine.model.forward
    monkeypatch.setattr(engine.model, "forward", lambda *arguments: calls.append(arguments) or forward(*arguments))
    before = pickle.dumps((engine.queue, engine.active, engine.kv, engine.trace, engine.store))
    with pytest.raises(error) as refusal:
        engine.step()
    if error is PlanError:
        assert type(policy).__name__ in str(refusal.value) or "Recompute" in str(refusal.value)
    assert fragment in str(refusal.value)
    assert pickle.dumps((engine.queue, engine.active, engine.kv, engine.trace, engine.store)) == before
    assert not calls
    monkeypatch.setattr(kind, "mended", True)
    check_invariants(engine)
    drive(engine)
    requests = [*running, *waiting]
    check_solo(requests, [engine.results[request.request_id] for request in requests])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_answer_of_a_policy_is_refused_by_its_name_before_anything_has_run(name, monkeypatch):
    """Fault: half of an impossible plan is carried out; or the error names the engine's innards, not the policy."""
    check_mistake(*MISTAKES[name], monkeypatch)


@pytest.mark.parametrize("name", RAISING)
def test_an_error_inside_a_policy_comes_out_as_it_is_and_nothing_has_run(name, monkeypatch):
    """Fault: the planner swallows it, or is half-way when it comes; its own traceback says most to its author."""
    kind, make = RAISING[name]
    check_mistake(kind, make, "boom", monkeypatch, error=KeyError)


class FailingKey(Order):
    def key(self, request):
        if request.request_id.startswith("b"):
            raise KeyError("boom")
        return request.rank


class UnlikeKeys(Order):
    def key(self, request):
        return "late" if request.request_id.startswith("b") else request.rank


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("at", [None, 2.0])
@pytest.mark.parametrize("order", [FailingKey, UnlikeKeys])
def test_a_request_that_an_order_cannot_place_is_refused_and_the_others_run(order, at, n):
    """Fault: it is neither in the queue nor ended, and waits for ever."""
    engine = an_engine(order=order())
    good = [ask("a", 3, 4, at=None), ask("w", 3, 4, at=None), ask("x", 20, 1, at=1.0), ask("y", 3, 4, at=2.0)]
    for request in good:
        engine.submit(request)
    with pytest.raises((KeyError, TypeError)):
        engine.submit(ask("b", 3, 4, at=at, n=n))
        for _ in range(4):
            engine.step()
    drive(engine)
    check_solo(good, [engine.results[request.request_id] for request in good])
    assert engine.results["b"].finish_reason == "rejected" and "Error" in engine.results["b"].error


@pytest.mark.parametrize("name", UNNOTICED)
def test_a_victim_rule_that_picks_nobody_is_a_mistake(name, monkeypatch):
    """Fault: a rule that forgets to return is taken for ``Never``, and the engine runs on, slower."""
    check_mistake(*UNNOTICED[name], "None", monkeypatch)


def test_an_order_that_does_not_call_its_base_is_not_taken_by_an_engine():
    """Fault: the first request that arrives finds an order without an index."""

    class Bare(Order):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match="Bare has no queue yet: its __init__ has to call"):
        an_engine(order=Bare())


def test_the_tables_and_the_docstring_of_policies_name_the_same_modules():
    """Fault: a policy file is added, and the overview does not know it."""
    for module in re.findall(r"^    (\w+)\.py", policies.__doc__, re.MULTILINE):
        importlib.import_module(f"minibatch.policies.{module}")
