"""A student's parts in the engine, all that are done at once: what ``minibatch lab run`` runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

from minibatch.clock import Clock, VirtualClock
from minibatch.cost_model import CostModel
from minibatch.gpus import GPUS
from minibatch.labs import checker
from minibatch.labs.exercise import Exercise, Lab
from minibatch.labs.packed_toy import PackedToy
from minibatch.labs.plug import plugged, reference
from minibatch.model_shapes import MODELS


class TimedToy(PackedToy):
    """The toy's tokens, at the times that a cost model gives to a model of 8 billion weights on an A100. Every
    sixteenth token ends an answer, so that some are short."""

    name = "toy (time: llama-3-8b on A100-80GB)"

    def __init__(self) -> None:
        super().__init__()
        self.eos_token_ids = frozenset(range(0, self.vocab_size, 16))

    def clock(self) -> Clock:
        return VirtualClock(CostModel(MODELS["llama-3-8b"], GPUS["a100-80"]))


class NothingDone(ValueError):
    """All that a file has are the bodies that it was handed out with."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]  # what a notebook shows: there is no mistake to look for


@contextmanager
def in_engine(lab: Lab, path: Path) -> Iterator[Counter[str]]:
    """Puts the parts of a student's file into the package while the block runs; those that are not done are the
    reference's. Yields how often each exercise's code has been called so far, by id; undone ones are missing.

    Raises what importing the file raises, and NothingDone if nothing in it is done.
    """
    for exercise in lab.exercises:
        reference(exercise)  # imports what is to be replaced
    module = checker.load(path)
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for exercise in lab.exercises:
            part = getattr(module, exercise.top, None)
            done = part is not None and part is not reference(exercise) and not checker.not_done(exercise, part)
            if done:
                calls[exercise.id] = 0
                stack.enter_context(plugged(exercise, counting(exercise, part, calls)))
        if not calls:
            raise NothingDone(f"nothing in {path} is done yet")
        for exercise in lab.exercises:  # the classes that only hold methods have served
            if exercise.method or exercise.id not in calls:
                setattr(module, exercise.top, reference(exercise))
        yield calls


def counting(exercise: Exercise, part: Any, calls: Counter[str]) -> Any:
    """The part, with a count of its calls."""
    if isinstance(part, FunctionType):
        return _counted(part, exercise.id, calls)
    for name, value in list(vars(part).items()):
        if exercise.method not in (None, name):
            continue
        if isinstance(value, FunctionType):
            setattr(part, name, _counted(value, exercise.id, calls))
        elif isinstance(value, property):
            setattr(part, name, property(_counted(value.fget, exercise.id, calls)))
        elif isinstance(value, (classmethod, staticmethod)):
            setattr(part, name, type(value)(_counted(value.__func__, exercise.id, calls)))
    return part


def _counted(function: Callable, key: str, calls: Counter[str]) -> Callable:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[key] += 1
        return function(*args, **kwargs)

    return call
