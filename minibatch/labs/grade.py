"""Grades a class folder: a directory a student, in each the files of their labs.

A submission is copied before its code runs, runs in a process of its own, and is limited in time and memory. So one
that never ends, takes all memory, deletes its files or leaves with ``os._exit`` costs its own points and nobody else's.
That protects from accidents. It is no sandbox: code that means harm has the rights of whoever grades.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import minibatch
from minibatch.labs import fresh
from minibatch.labs.checker import FAILED, Outcome, outcome
from minibatch.labs.exercise import Lab
from minibatch.labs.fresh import SKIP, Limits
from minibatch.labs.manifest import LABS

MISSING = "missing"
FACTS = (
    "id",
    "title",
    "status",
    "points",
    "max_points",
    "seconds",
    "idea",
    "case",
    "expected",
    "happened",
    "iteration",
)
COLUMNS = ("submission", "lab", "exercise", *FACTS[1:], "seed", "minibatch")


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


def not_graded(place: Path) -> list[str]:
    """What lies in a class folder and is no submission, such as an archive that nobody has unpacked."""
    return sorted(path.name for path in place.iterdir() if not path.is_dir())


def files(submission: Path) -> dict[str, list[Path]]:
    """By lab, the files of that name anywhere in a submission: of several those that were generated for the lab, and of
    these the one that lies least deep, if it is alone there. Links, environments and hidden directories do not count.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(submission.rglob("*.py")):
        above = list(path.parents)[: _depth(path, submission)]
        if path.stem in LABS and path.is_file() and not any(map(_is_no_work, [path, *above])):
            found.setdefault(path.stem, []).append(path)
    return {name: _likeliest(name, paths, submission) for name, paths in found.items()}


def _depth(path: Path, submission: Path) -> int:
    return len(path.relative_to(submission).parts) - 1


def _is_no_work(path: Path) -> bool:
    hidden = path.name.startswith(".") or path.name in SKIP
    return hidden or path.is_symlink() or (path / "pyvenv.cfg").exists()


def _likeliest(name: str, paths: list[Path], submission: Path) -> list[Path]:
    paths = [path for path in paths if is_generated(name, path)] or paths
    least = min(_depth(path, submission) for path in paths)
    shallow = [path for path in paths if _depth(path, submission) == least]
    return shallow if len(shallow) == 1 else paths


def is_generated(name: str, path: Path) -> bool:
    """Whether the file still has the beginning that it was handed out with."""
    return f"lab {name} of minibatch" in path.read_text(encoding="utf-8", errors="replace")[:500]


def grade(place: Path, labs: Sequence[Lab] = (), seed: int = 0, limits: Limits | None = None) -> Iterator[Graded]:
    """Every submission in each of ``labs`` (default: those that anybody has handed in), one after the other."""
    fresh.require_hypothesis()
    handed_in = {path: files(path) for path in submissions(place)}
    labs = labs or _handed_in(handed_in.values())
    if not labs:
        raise ValueError(f"no submission in {place} has a lab's file, such as paging.py")
    for submission, found in handed_in.items():
        for lab in labs:
            yield Graded(submission.name, lab, tuple(_one(submission, found.get(lab.name, []), lab, seed, limits)))


def _handed_in(several: Iterable[dict[str, list[Path]]]) -> list[Lab]:
    names = {name for found in several for name in found}
    return [lab for name, lab in LABS.items() if name in names]


def _one(submission: Path, paths: list[Path], lab: Lab, seed: int, limits: Limits | None) -> list[Outcome]:
    if len(paths) != 1:
        idea = f"{len(paths)} files named {lab.name}.py" if paths else f"no {lab.name}.py (links are not followed)"
        return [outcome(exercise, FAILED if paths else MISSING, idea=idea) for exercise in lab.exercises]
    try:
        return fresh.check(paths[0], lab.exercises, seed=seed, limits=limits, quiet=True, copied=submission)
    except Exception as error:  # it cannot be read, or copied, or whatever nobody has thought of
        return [outcome(each, FAILED, idea=f"{paths[0].name} cannot be read: {error}") for each in lab.exercises]


class Table:
    """A CSV file with a row an exercise and submission, written as they come: what is graded is not lost."""

    def __init__(self, file: TextIO, seed: int) -> None:
        self._file, self._seed, self._rows = file, seed, csv.writer(file)
        self._rows.writerow(COLUMNS)

    def add(self, graded: Graded) -> None:
        for each in graded.outcomes:
            facts = [_plain(getattr(each, name)) for name in FACTS]
            self._rows.writerow([_plain(graded.submission), graded.lab.name, *facts, self._seed, minibatch.__version__])
        self._file.flush()


def _plain(value: object) -> object:
    """As a cell: whatever characters a student's messages and folders have, it can be written."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else value
