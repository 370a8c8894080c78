"""What an exercise is: a function, method or class of the engine that a student writes again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """
    ``id``        stable, ``lab.number``: what graders and notes refer to
    ``title``     a few words
    ``target``    what is to be written, ``module:qualified name``; the reference is what stands there
    ``task``      what it has to do, beyond what the docstring of the target says, for somebody who has not read it
    ``points``    for passing all checks
    ``notebook``  the walk-through that it belongs to, without its ending
    ``checks``    the module that tests it, below ``minibatch.labs.checks``
    ``open_ended`` whether what stands in the package is only one of many answers
    """

    id: str
    title: str
    target: str
    task: str
    points: int
    notebook: str
    checks: str
    open_ended: bool = False

    @property
    def lab(self) -> str:
        return self.id.partition(".")[0]

    @property
    def module(self) -> str:
        """The module of the reference."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """Of the target in its module: ``gaps``, ``BlockPool`` or ``Fair.add``."""
        return self.target.partition(":")[2]

    @property
    def top(self) -> str:
        """What a student's module defines at its top level: the function, or the class of the method."""
        return self.name.partition(".")[0]

    @property
    def method(self) -> str | None:
        """The method's name; None if the target is a whole class or a function."""
        return self.name.partition(".")[2] or None

    @property
    def check(self) -> Any:
        """The function that tests a part."""
        return importlib.import_module(f"minibatch.labs.checks.{self.checks}").check

    @property
    def not_done(self) -> str:
        """With this the error of a generated body begins."""
        return f"exercise {self.id} is not done yet"


@dataclass(frozen=True)
class Lab:
    """Exercises that belong together: one file for a student, one session for a class.

    ``minutes``  for a student who has read the notebooks
    ``goals``    what a student can do afterwards
    ``run``      knobs of the comparison that shows the parts at work (fields of :class:`minibatch.compare.Setup`);
                 None: there is something else to show
    ``shows``    the configuration of which the notebook draws the run
    ``look``     what to look at in the run
    """

    name: str
    title: str
    minutes: int
    goals: tuple[str, ...]
    exercises: tuple[Exercise, ...]
    run: Mapping[str, Any] | None = field(default_factory=dict)
    shows: str = "paged"
    look: str = ""

    @property
    def points(self) -> int:
        return sum(exercise.points for exercise in self.exercises)
