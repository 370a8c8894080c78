"""Grades a class folder: a directory a student, in each the files of their labs.

A submission is copied before its code runs, runs in a process of its own, and is limited in time and memory. So one
that never ends, takes all memory, deletes its files or leaves with ``os._exit`` costs its own points and nobody else's.
That protects from accidents. It is no sandbox: code that means harm has the rights of whoever grades.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minibatch.labs import fresh
from minibatch.labs.checker import FAILED, Outcome, outcome
from minibatch.labs.exercise import Lab
from minibatch.labs.fresh import SKIP, Limits
from minibatch.labs.manifest import LABS

MISSING = "missing"
COLUMNS = ("submission", "lab", "exercise", "title", "status", "points", "max_points", "seconds", "idea", "case")


@dataclass(frozen=True)
class Graded:
    """One student's outcomes in one lab."""

    submission: str
    lab: Lab
    outcomes: tuple[Outcome, ...]

    @property
    def points(self) -> float:
        return sum(each.points for each in self.outcomes)


def submissions(place: Path) -> list[Path]:
    """The directories in a class folder, by name. Raises ValueError if there is none."""
    found = sorted(path for path in place.iterdir() if path.is_dir() and path.name not in SKIP)
    if not found:
        raise ValueError(f"{place} has no directories: each submission is one, with files such as paging.py in it")
    return found


def files(submission: Path) -> dict[str, list[Path]]:
    """The files of labs anywhere in a submission, by lab."""
    found: dict[str, list[Path]] = {}
    for path in sorted(submission.rglob("*.py")):
        inside = path.relative_to(submission).parts
        if path.stem in LABS and path.is_file() and not SKIP.intersection(inside):
            found.setdefault(path.stem, []).append(path)
    return found


def grade(place: Path, labs: Sequence[Lab] = (), seed: int = 0, limits: Limits | None = None) -> Iterator[Graded]:
    """Every submission in each of ``labs`` (default: those that anybody has handed in), one after the other."""
    handed_in = {path: files(path) for path in submissions(place)}
    labs = labs or [lab for name, lab in LABS.items() if any(name in found for found in handed_in.values())]
    if not labs:
        raise ValueError(f"no submission in {place} has a lab's file, such as paging.py")
    for submission, found in handed_in.items():
        for lab in labs:
            yield Graded(submission.name, lab, tuple(_one(submission, found.get(lab.name, []), lab, seed, limits)))


def _one(submission: Path, paths: list[Path], lab: Lab, seed: int, limits: Limits | None) -> list[Outcome]:
    if len(paths) != 1:
        idea = f"{len(paths)} files named {lab.name}.py" if paths else f"no {lab.name}.py"
        return [outcome(exercise, FAILED if paths else MISSING, idea=idea) for exercise in lab.exercises]
    return fresh.check(paths[0], lab.exercises, seed=seed, limits=limits, quiet=True, copied=submission)


def write_csv(graded: Sequence[Graded], path: Path) -> None:
    """A row an exercise and submission."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for one in graded:
            for each in one.outcomes:
                facts = (each.id, each.title, each.status, f"{each.points:g}", each.max_points, f"{each.seconds:.2f}")
                table.writerow([one.submission, one.lab.name, *facts, each.idea, each.case])
