"""Tests one exercise against one student's code, in this process."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from minibatch.labs.counterexample import CounterExample, Picture
from minibatch.labs.exercise import Exercise, Lab
from minibatch.labs.plug import plugged, reference
from minibatch.labs.trial import asked, told

PASSED, FAILED, NOT_DONE = "passed", "failed", "not done"


@dataclass
class Outcome:
    """What a check has found.

    ``status``   ``passed`` (all public checks), ``failed`` or ``not done``
    ``idea``     of a failure: what seems to have been got wrong; of a pass: a remark, if there is one
    ``case``, ``expected``, ``happened``, ``iteration``  of a failure, as in
                 :class:`~minibatch.labs.counterexample.CounterExample`; empty where there is none
    ``picture``  the file with a picture of it
    """

    id: str
    title: str
    status: str
    points: float
    max_points: int
    seconds: float = 0.0
    idea: str = ""
    case: str = ""
    expected: str = ""
    happened: str = ""
    iteration: int | None = None
    picture: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def outcome(exercise: Exercise, status: str, **more: Any) -> Outcome:
    points = exercise.points if status == PASSED else 0
    return Outcome(exercise.id, exercise.title, status, points, exercise.points, **more)


class Missing(Exception):
    """The student's code has no such part, or it is none."""


def check_part(exercise: Exercise, part: Any, in_file: bool = False) -> tuple[Outcome, Picture | None]:
    """Tests a function or class (for a method: a class that has it, or the function itself).

    ``in_file``  it is from a student's file, in a process of its own
    """
    start = time.perf_counter()
    check = exercise.check  # imported before anything is replaced
    picture = None
    try:
        part = _as_part(exercise, part)
        if undone := not_done(exercise, part):
            return outcome(exercise, NOT_DONE, idea=undone), None
        with plugged(exercise, part):
            earned = check(_seen(exercise, part))
        found = outcome(exercise, PASSED)
        if earned is not None:  # where there is more than right and wrong: a share of the points, and a remark
            share, found.idea = earned
            found.points = round(exercise.points * share, 1)
    except CounterExample as error:
        found = outcome(
            exercise,
            FAILED,
            idea=error.idea,
            case=error.case,
            expected=error.expected,
            happened=error.happened,
            iteration=error.iteration,
        )
        picture = error.picture
    except Missing as error:
        found = outcome(exercise, FAILED, idea=str(error))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not in_file:
            raise  # somebody who waits in a notebook
        idea = "Your code raises an exception."
        if f"'super' object has no attribute '{exercise.method}'" in str(error):
            idea = f"The package's own {exercise.name} is not there while yours is tested: it is what you are to write."
        found = outcome(exercise, FAILED, idea=idea, case=asked(error), expected="no exception", happened=told(error))
    found.seconds = time.perf_counter() - start
    return found, picture


def check_file(exercise: Exercise, lab: Lab, path: Path) -> tuple[Outcome, Picture | None]:
    """Tests what a student's module has for an exercise.

    All else is the reference's, that of other exercises in the same file too. The reference's answer to this exercise
    is not there while the module is imported and tested.
    """
    import_all(exercise)
    owner = reference(exercise)
    with plugged(exercise, _nothing(exercise)):
        try:
            module = load(path)
        except NotImplementedError as error:
            return outcome(exercise, NOT_DONE, idea=str(error)), None
        except BaseException as error:
            found = outcome(exercise, FAILED, idea=f"{path.name} cannot be imported.", happened=told(error))
            return found, None
        part = getattr(module, exercise.top, None)
        for other in lab.exercises:  # so that no exercise needs another one
            if other.top != exercise.top or exercise.method:
                setattr(module, other.top, owner if other.top == exercise.top else reference(other))
        return check_part(exercise, part, in_file=True)


def import_all(exercise: Exercise) -> None:
    """What a check needs, while everything is the reference's."""
    importlib.import_module(exercise.module)
    exercise.check  # noqa: B018 (a property that imports)


def load(path: Path) -> ModuleType:
    """A student's module; files beside it can be imported from it. Raises what importing it raises."""
    name, beside = f"lab_{path.stem}", str(path.resolve().parent)
    for other, known in list(sys.modules.items()):  # imported for another exercise: what they have is not what is now
        if str(getattr(known, "__file__", None)).startswith(beside + os.sep):
            del sys.modules[other]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    if beside not in sys.path:
        sys.path.append(beside)
    spec.loader.exec_module(module)
    return module


def not_done(exercise: Exercise, part: Any) -> str:
    """The error that a generated body would raise, if one is still there; else the empty string."""
    names = [exercise.method] if exercise.method else None
    for code in _codes(part, names):
        for constant in code.co_consts:
            if isinstance(constant, str) and constant.startswith(exercise.not_done):
                return constant
    return ""


def _codes(part: Any, names: list[str] | None) -> Iterator[CodeType]:
    if isinstance(part, type):
        for name, value in vars(part).items():
            if names is None or name in names:
                yield from _codes(value, None)
        return
    for value in (part, *(getattr(part, name, None) for name in ("fget", "fset", "__func__", "__wrapped__"))):
        if isinstance(value, FunctionType):
            yield value.__code__


def _as_part(exercise: Exercise, part: Any) -> Any:
    """Raises Missing if ``part`` is not something that can stand in place of the target."""
    kind = type(reference(exercise))
    if part is None:
        raise Missing(f"There is no {exercise.top} in your code.")
    if exercise.method:
        if isinstance(part, FunctionType):
            kind = type(vars(reference(exercise))[exercise.method])
            part = kind(part) if kind in (property, classmethod, staticmethod) else part
            return type(exercise.top, (), {exercise.method: part})
        if not (isinstance(part, type) and exercise.method in vars(part)):
            what = getattr(part, "__name__", repr(part))
            raise Missing(f"{what} has no {exercise.method} of its own: {exercise.id} tests {exercise.name}.")
    elif issubclass(kind, type) != isinstance(part, type):
        raise Missing(f"{exercise.top} has to be a {'class' if issubclass(kind, type) else 'function'}.")
    elif not callable(part):
        raise Missing(f"{exercise.top} is {part!r}, which cannot be called.")
    return part


def _seen(exercise: Exercise, part: Any) -> Any:
    """What a check is given: the function or the class; of a method, the class of the reference, which has it now."""
    return reference(exercise) if exercise.method else part


def _nothing(exercise: Exercise) -> Any:
    """What stands in place of the reference's answer while a student's code is imported."""

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"exercise {exercise.id}: this is what you are to write; the package's is not there")

    target = reference(exercise)
    if exercise.method:
        return type(exercise.top, (), {exercise.method: gone})
    if isinstance(target, type):
        bodies = {n: gone for n, value in vars(target).items() if inspect.isfunction(value)}
        return type(exercise.top, target.__bases__, bodies)
    return gone
