"""Labs: exercises in which a student writes the engine's own functions, and sees them drive the real engine.

minibatch lab list | new | check | run | grade      on the command line
labs.check("paging.1", MyBlockPool)                 in a notebook

manifest.py    all exercises, as data              sources.py     the student's file, generated from the reference
plug.py        a part in place of the reference    checker.py     tests one exercise
checks/        what the tests are, a module a lab  trial.py       the real engine, watched after every iteration
fresh.py       in a process of its own, limited    grade.py       a class folder
"""

from __future__ import annotations

import base64
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minibatch.labs import checker, folder, fresh, words
from minibatch.labs.checker import FAILED, PASSED, Outcome
from minibatch.labs.exercise import Exercise, Lab
from minibatch.labs.manifest import EXERCISES, LABS
from minibatch.trace import Trace

if TYPE_CHECKING:
    from minibatch.labs.scorecard import Cards

__all__ = ["EXERCISES", "LABS", "Exercise", "Lab", "Outcome", "Verdict", "check", "demand", "ids", "run"]


@dataclass(frozen=True)
class Verdict:
    """What a check has found, to look at in a notebook. ``picture``: of a counter-example, a PNG file; or None."""

    outcome: Outcome
    picture: bytes | None

    @property
    def passed(self) -> bool:
        return self.outcome.status == PASSED

    def __repr__(self) -> str:
        outcome = self.outcome
        head = f"{outcome.id} {outcome.title}: {words.SAYS[outcome.status]}"
        return "\n".join([head, *words.failure(outcome)]) if outcome.status == FAILED else head

    def _repr_html_(self) -> str:
        image = ""
        if self.picture:
            data = base64.b64encode(self.picture).decode()
            image = (
                f'<img alt="picture of the counter-example" style="max-width:100%" src="data:image/png;base64,{data}">'
            )
        return words.as_html(self.outcome) + image


def check(exercise_id: str, part: Any = None) -> Verdict:
    """Tests ``part``, a function or class (for a method: a class that has it, or a function), in this process.

    Without a part: what the lab's file in the current directory has for the exercise, in a fresh process, so that a
    loop without end is stopped. Raises ValueError for an unknown exercise, or if there is no such file.
    """
    exercise = _exercise(exercise_id)
    if part is not None:
        fresh.require_hypothesis()
        outcome, picture = checker.check_part(exercise, part)
        return Verdict(outcome, None if picture is None else _png(exercise, picture))
    path = Path(f"{exercise.lab}.py")
    if not path.exists():
        raise ValueError(f"no {path} in {Path.cwd()}: run this where your file is, or give the part itself")
    with tempfile.TemporaryDirectory() as scratch:
        (outcome,) = fresh.check(path, [exercise], pictures=Path(scratch))
        picture = Path(outcome.picture).read_bytes() if outcome.picture else None
    outcome.picture = None
    return Verdict(outcome, picture)


def _png(exercise: Exercise, picture: Any) -> bytes:
    from minibatch.labs import pictures
    from minibatch.notebook import png

    return png(pictures.draw(picture, f"{exercise.id} {exercise.title}"))


def _exercise(exercise_id: str) -> Exercise:
    if exercise_id not in EXERCISES:
        raise ValueError(f"no exercise {exercise_id!r}: there are {', '.join(EXERCISES)}")
    return EXERCISES[exercise_id]


def ids(lab: str) -> list[str]:
    """The exercises of a lab."""
    return [exercise.id for exercise in folder.chosen([lab])[0].exercises]


def demand(exercise_id: str, path: Path) -> None:
    """For pytest: raises AssertionError, with the counter-example in words, unless the student's file passes."""
    __tracebackhide__ = True  # pytest shows the words, and not this code
    (outcome,) = fresh.check(path, [_exercise(exercise_id)], pictures=path.parent / COUNTEREXAMPLES)
    if outcome.status != PASSED:
        raise AssertionError(repr(Verdict(outcome, None)) if outcome.status == FAILED else outcome.idea)


COUNTEREXAMPLES = "counterexamples"  # the directory beside a student's file


class Ran(Mapping[str, Trace]):
    """A comparison that ran on a student's parts: a trace a configuration, and what ``compare`` says of them.

    ``calls``   how often each exercise's code was called, by id; ``paths``: what was written
    """

    def __init__(
        self, traces: Mapping[str, Trace], holds: bool, calls: Mapping[str, int], report: str, look: str
    ) -> None:
        self.traces, self.holds, self.calls, self.report, self.look = dict(traces), holds, dict(calls), report, look
        self.paths: list[Path] = []

    def __getitem__(self, name: str) -> Trace:
        return self.traces[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.traces)

    def __len__(self) -> int:
        return len(self.traces)

    def __repr__(self) -> str:
        used = [f"{id} {EXERCISES[id].title}: {words.calls(count)}" for id, count in self.calls.items()]
        look = textwrap.wrap(self.look, words.WIDTH, initial_indent="look        ", subsequent_indent=" " * 12)
        return "\n".join(["your parts in this run", *used, "", self.report, "", *look])


def run(place: str | Path = ".", model: Any = None, seed: int = 0, out: Path | None = None) -> Ran | Cards:
    """Runs ``compare`` with the parts of a student's file that are done; all others are the package's. Of the capstone:
    the scorecard.

    ``place``  the file, or the directory of one lab
    ``model``  default: the toy, at the times that a cost model gives to a model on a GPU
    ``seed``   of the workload
    ``out``    directory for pictures and traces; None: none are written

    Raises ValueError if there is no such file or nothing in it is done, and whatever the parts raise.
    """
    from minibatch import compare, compare_report
    from minibatch.labs import scorecard
    from minibatch.labs.parts import TimedToy, in_engine

    found = folder.find(Path(place))
    if len(found) > 1:
        raise ValueError(f"{place} has {len(found)} labs: name the file of one, such as {found[0][1]}")
    ((lab, path),) = found
    if lab.run is None:
        return scorecard.cards(checker.load(path).parts, seed)
    knobs = {"workload": "short", "num_requests": 12, "max_tokens": 32, "load": 12.0, **lab.run, "seed": seed}
    with in_engine(lab, path) as calls:  # numbers and pictures too: some parts make these
        comparison = compare.run(model or TimedToy(), compare.Setup(**knobs), progress=False)
        ran = Ran(comparison.traces, comparison.holds, calls, compare_report.describe(comparison), lab.look)
        if out is not None:
            ran.paths = compare_report.save(comparison, out)
    ran.calls = dict(calls)
    return ran
