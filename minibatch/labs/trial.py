"""The real engine, run with a student's part in it and watched after every iteration.

The toy model computes, so what a part corrupts shows in the tokens. What is checked of every run: no more tokens than
the budget, no more members than places, every block accounted for, every cached token where its table says, the tokens
of a run alone, and that all of it ends with all memory given back.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import minibatch
from minibatch.engine import Engine
from minibatch.kv_cache import KVCache
from minibatch.labs.counterexample import CounterExample, Picture, expect, in_words
from minibatch.models.toy_model import ToyModel
from minibatch.plan import PlanError, Scheduler
from minibatch.policies import Order
from minibatch.request import EngineStalled, Request, RequestRefused, Result, SamplingParams
from minibatch.trace import StepReport, Trace

# Where code lies that is not the student's: this package, installed ones, the standard library.
NOT_THE_STUDENTS = (
    str(Path(minibatch.__file__).parent),
    *(sysconfig.get_path(n) for n in ("purelib", "stdlib")),
    "<frozen",
)
CHECKS = str(Path(__file__).parent / "checks")
Broken = tuple[str, str, str]  # idea, expected, happened
Watch = Callable[[Engine, StepReport], "Iterator[Broken] | None"]


@dataclass(frozen=True)
class Trial:
    """A run that has ended, of requests ``a``, ``b``, ..."""

    engine: Engine
    results: dict[str, Result]
    case: str

    @property
    def trace(self) -> Trace:
        return self.engine.trace

    def steps(self, label: str) -> list[int]:
        """The iterations, counted from 1, in which a request computed something."""
        return [s.index + 1 for s in self.trace.steps if any(m.request_id == label for m in s.members)]

    def emitted(self, label: str) -> list[int]:
        """The iterations, counted from 1, in which a request got a token."""
        reports = self.trace.steps
        found = [s for s in reports if any(m.request_id == label and m.emitted is not None for m in s.members)]
        return [s.index + 1 for s in found]

    def expect(self, got: Any, want: Any, *, idea: str, what: str = "", iteration: int | None = None) -> None:
        """:func:`minibatch.labs.counterexample.expect`, with this run as case and picture."""
        expect(got, want, case=self.case, idea=idea, what=what, iteration=iteration, picture=self.trace)

    def expect_tokens(self, label: str, want: Sequence[int], idea: str, picture: Picture | None = None) -> None:
        """In these iterations, counted from 1, the request gets a token."""
        got, what = self.emitted(label), f"iterations with a token of {label}"
        first = min({*got} ^ {*want}, default=None)
        expect(got, list(want), case=self.case, idea=idea, what=what, iteration=first, picture=picture or self.trace)


def request(
    prompt: int | Sequence[int],
    new: int,
    at: float | None = None,
    *,
    first: int = 0,
    priority: int = 0,
    client: str = "default",
    **params: Any,
) -> Request:
    """A request for tests: ``prompt`` tokens, all different from those of other ``first``; ``new`` tokens to generate;
    it arrives ``at`` a time (the toy's clock counts iterations: one a second)."""
    ids = [(first * 17 + i) % 200 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    given = SamplingParams(max_tokens=new, **params)
    return Request(ids, given, arrival_time=at, priority=priority, client=client)


def requests_of(sizes: Iterable[Sequence[int]]) -> list[Request]:
    """Of (prompt, new tokens) or (prompt, new tokens, arrival) each, with prompts that have nothing in common."""
    return [request(*size, first=i) for i, size in enumerate(sizes)]


def alone(request: Request) -> list[int]:
    """What the toy model says to one request that keeps all its K/V: from its definition, without an engine."""
    tokens = list(request.prompt)
    for _ in range(request.params.max_tokens):
        state = 0
        for position, token in enumerate(tokens):
            state = hash((state, position, token))
        tokens.append(int(np.random.Generator(np.random.PCG64(state % 2**64)).standard_normal(256).argmax()))
    return tokens[len(request.prompt) :]


def run(
    requests: Sequence[Request],
    scheduler: Scheduler,
    kv: KVCache,
    *,
    order: Order | None = None,
    watch: Watch | None = None,
    most: int = 300,
    model: Any = None,
    case: str = "",
) -> Trial:
    """Runs requests, named ``a``, ``b``, ... in their order, to their end.

    ``watch`` is called after every iteration and may yield what is wrong: (idea, expected, happened). Raises a
    CounterExample for the first law that is broken, for an exception in the student's code or because of it, and when
    it has not ended after ``most`` iterations.
    """
    named = {chr(97 + i): r for i, r in enumerate(requests)}
    engine = Engine(model or ToyModel(), scheduler, kv, order=order)
    case = case or describe(named, scheduler, kv, order)

    def fail(idea: str, expected: str, happened: str) -> None:
        number = engine.trace.num_steps or None
        raise CounterExample(
            idea, case=case, expected=expected, happened=happened, iteration=number, picture=engine.trace
        )

    try:
        for label, each in named.items():
            engine.submit(Request(**{**vars(each), "request_id": label}))
        for _ in range(most):
            report = engine.step()
            if report is None:
                break
            for broken in [*laws(engine, report), *((watch and watch(engine, report)) or ())]:
                fail(*broken)
        else:
            fail("It does not come to an end.", f"all done in fewer than {most} iterations", "still running")
    except (CounterExample, NotImplementedError):
        raise
    except (PlanError, EngineStalled) as error:
        fail(*refused(error))
    except RequestRefused as error:
        fail("A request is refused that could run.", "all requests accepted", f"{type(error).__name__}: {error}")
    except Exception as error:
        fail("The engine breaks on what your code does.", "no exception", told(error))
    trial = Trial(engine, {label: engine.results[label] for label in named if label in engine.results}, case)
    _check_end(trial, named, fail)
    return trial


def refused(error: PlanError | EngineStalled) -> Broken:
    """What it means that the engine stops a run."""
    if isinstance(error, PlanError):
        return "The plan cannot be carried out; the engine refuses it.", "a plan that keeps the rules", str(error)
    return "There is work, and nothing is planned: everybody waits for ever.", "progress", str(error)


def told(error: BaseException) -> str:
    """An exception with the place in the student's code where it comes from, if it was there."""
    own = [(frame.f_code.co_name, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_own(frame)]
    where = " (in {}, line {})".format(*own[-1]) if own else ""
    said = f"{type(error).__name__}: {error}{where}"
    return f"{said}: {error.text.strip()}" if isinstance(error, SyntaxError) and error.text else said


def asked(error: BaseException) -> str:
    """With what the student's code was called when it raised: the case in words, if the check has said so, or else the
    arguments."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [f for f in frames if f.f_code.co_filename.startswith(CHECKS) and isinstance(f.f_locals.get("case"), str)]
    if ours:
        return ours[-1].f_locals["case"]
    own = [frame for frame in frames if _is_own(frame)]
    if not own:
        return ""
    code = own[0].f_code
    names = [name for name in code.co_varnames[: code.co_argcount] if name not in ("self", "cls")]
    given = {name: in_words(own[0].f_locals[name], 120) for name in names if name in own[0].f_locals}
    told = [f"{name} = {value}" for name, value in given.items() if " at 0x" not in value]  # that would say nothing
    return f"{code.co_name} with {', '.join(told)}" if told else ""


def _is_own(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(NOT_THE_STUDENTS)


def describe(named: dict[str, Request], scheduler: Scheduler, kv: KVCache, order: Order | None) -> str:
    """The case in words."""
    asks = []
    for label, each in named.items():
        more = [f"arrives at {each.arrival_time:g}"] if each.arrival_time else []
        more += [f"priority {each.priority}"] if each.priority else []
        more += [f"client {each.client}"] if each.client != "default" else []
        more += [f"{each.params.n} answers"] if each.params.n > 1 else []
        more += [f"salt {each.cache_salt}"] if each.cache_salt else []
        asks.append(f"{label} {len(each.prompt)} + {each.params.max_tokens}{_in_brackets(more)}")
    settings = [type(scheduler).__name__]
    for name, text in (
        ("batch_size", "batch of {}"),
        ("max_wait", "max_wait {:g}"),
        ("token_budget", "{} tokens an iteration"),
        ("max_num_seqs", "places: {}"),
        ("max_chunk", "chunks of at most {}"),
    ):
        value = getattr(scheduler, name, None)
        if value and value < 256:
            settings.append(text.format(value))
    for name, usual in (("phase_order", "mixed"), ("first", "decode")):
        if (value := getattr(scheduler, name, usual)) != usual:
            settings.append(f"{name} {value}")
    memory = f"{kv.num_units} {kv.unit_name}s of {kv.unit_size}"
    queue = f"; {order!r}" if order is not None else ""
    return f"prompt + new tokens: {', '.join(asks)}; {', '.join(settings)}; {memory}{queue}"


def _in_brackets(more: Sequence[str]) -> str:
    return f" ({', '.join(more)})" if more else ""


def laws(engine: Engine, report: StepReport) -> Iterator[Broken]:
    """What is wrong after this iteration."""
    budget, places = report.token_budget, getattr(engine.scheduler, "max_num_seqs", None)
    if budget is not None and report.num_tokens > budget:
        yield "An iteration has more tokens than the budget.", f"at most {budget}", f"{report.num_tokens} tokens"
    if places is not None and len(report.kv.holdings) > places:
        yield "More requests are active than there are places.", f"at most {places}", f"{len(report.kv.holdings)}"
    kv = engine.kv
    held = Counter(unit for state in engine.active for unit in kv.units(state))
    if kv.num_free + len(held) != kv.num_units:
        what = f"{kv.num_free} free and {len(held)} held"
        yield f"{kv.unit_name.title()}s are lost, or there twice.", f"free + held = {kv.num_units}", what
    for state in engine.active:
        if state.is_finished or not isinstance(engine.model, ToyModel):
            continue
        rows = kv.rows(state, 0, state.num_computed).tolist()
        for position, row in enumerate(rows):
            token, entry = state.tokens(position, position + 1)[0], engine.store[row]
            if entry is None or entry[1:] != (position, token):
                have = "nothing" if entry is None else f"token {entry[2]} of position {entry[1]}"
                who = f"token {token} of position {position} of request {state.label} in row {row}"
                yield "A request's K/V are not where its table says: somebody has overwritten them.", who, have
                return


def _check_end(trial: Trial, named: dict[str, Request], fail: Callable[[str, str, str], None]) -> None:
    engine = trial.engine
    for label, each in named.items():
        result = trial.results.get(label)
        if result is None:
            fail("A request is lost.", f"an answer for {label}", "none")
        elif not (each.params.stop_token_ids or each.params.n > 1 or each.params.temperature):
            want = alone(each)
            if list(result.tokens) != want:
                idea = (
                    "Scheduling may change when a token is made, never which: these are not the tokens of a run alone."
                )
                fail(idea, f"request {label}: {want}", f"{list(result.tokens)}")
    if engine.kv.num_free != engine.kv.num_units:
        free = f"{engine.kv.num_free} free {engine.kv.unit_name}s"
        fail("All requests have ended, and memory is still held.", f"{engine.kv.num_units} free", free)
