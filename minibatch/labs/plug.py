"""Puts a student's part where the reference was, so that the real engine runs on it, and takes it out again.

A function or class is replaced by name in every module that has it; a method is replaced in its class, and so in all
classes derived from that. ``super()`` in a student's method then means what it means in the reference.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import isfunction
from typing import Any

from minibatch.labs.exercise import Exercise

BELONG_TO_CLASSES = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__annotations__"}


def reference(exercise: Exercise) -> Any:
    """What stands in the package: the function, the class, or the class of the method."""
    return getattr(importlib.import_module(exercise.module), exercise.top)


@contextmanager
def plugged(exercise: Exercise, part: Any) -> Iterator[None]:
    """``part`` is a function or class in place of the reference; for a method, a class that has it.

    With a class for a method come the helpers that the student has added to it, and nothing that the reference has.
    """
    old = reference(exercise)
    undo = _methods(exercise, old, part) if exercise.method else _everywhere(old, part)
    try:
        yield
    finally:
        for action in reversed(undo):
            action()


def _methods(exercise: Exercise, owner: type, part: type) -> list[Callable[[], None]]:
    own = {name for name in vars(part) if name not in vars(owner) and name not in BELONG_TO_CLASSES}
    undo: list[Callable[[], None]] = []
    for name in (exercise.method, *own):
        value = vars(part)[name]
        for function in _functions(value):
            undo += _super_means(function, part, owner)
        undo.append(_set(owner, name, value))
    return undo


def _set(owner: type, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of a class; returns what takes it back."""
    was_there, old = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    return (lambda: setattr(owner, name, old)) if was_there else (lambda: delattr(owner, name))


def _functions(value: Any) -> list[Any]:
    """The plain functions in what a class has: itself, or those of a property, static or class method, and what they
    are wrapped around."""
    found = [f for f in (value, *(getattr(value, n, None) for n in ("fget", "fset", "__func__"))) if isfunction(f)]
    return [*found, *(inner for f in found if hasattr(f, "__wrapped__") for inner in _functions(f.__wrapped__))]


def _super_means(function: Any, part: type, owner: type) -> list[Callable[[], None]]:
    undo = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__" and cell.cell_contents is part:
            cell.cell_contents = owner
            undo.append(lambda cell=cell: setattr(cell, "cell_contents", part))
    return undo


def _everywhere(old: Any, new: Any) -> list[Callable[[], None]]:
    """Wherever a module of the package has ``old``, under any name or in a table, there is ``new``."""
    there, changed = set(sys.modules), _places(sys.modules, old)

    def undo() -> None:
        imported = {name: module for name, module in sys.modules.items() if name not in there}
        for table, key in (*changed, *_places(imported, new)):  # also in modules that were imported meanwhile
            table[key] = old

    for table, key in changed:
        table[key] = new
    return [undo]


def _places(modules: Mapping[str, Any], value: Any) -> list[tuple[dict[str, Any], str]]:
    """(table, key) of all places in these modules of the package that hold ``value``."""
    ours = [vars(m) for name, m in modules.items() if name == "minibatch" or name.startswith("minibatch.")]
    tables = [table for names in ours for k, table in names.items() if isinstance(table, dict) and k.isupper()]
    return [(table, key) for table in (*ours, *tables) for key, there in table.items() if there is value]
