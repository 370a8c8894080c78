"""The process in which a student's code is tested: one exercise after the other, a line of JSON for each.

Whatever happens here (a loop without end, all memory taken, ``os._exit``), the process that started this one still
has the lines written before, and goes on with the next exercise (see ``fresh.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
from pathlib import Path

from minibatch.labs import checker, pictures
from minibatch.labs.counterexample import Picture
from minibatch.labs.exercise import Exercise
from minibatch.labs.manifest import EXERCISES, LABS
from minibatch.labs.properties import Seed
from minibatch.trace import Trace

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("exercises", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--memory", type=int, help="MiB")
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    if options.memory:
        _limit_memory(options.memory * MIB)
    Seed.value = options.seed
    this = os.getpid()
    for name in options.exercises:
        exercise = EXERCISES[name]
        checker.import_all(exercise)  # before the clock runs, and before anything is the student's
        _say_where(options.results, options.seconds)
        outcome, picture = checker.check_file(exercise, LABS[exercise.lab], options.file)
        if os.getpid() != this:
            os._exit(0)  # a process that the student's code has forked
        if options.pictures and picture is not None:
            outcome.picture = _save(exercise, picture, options.pictures)
        with options.results.open("a", encoding="utf-8") as results:
            results.write(json.dumps(outcome.as_dict()) + "\n")
    os._exit(0)  # nothing that a student's code has left behind (threads, exit handlers) holds the process


def _say_where(results: Path, seconds: float) -> None:
    """When time is over, writes where the code is; then the process that started this one ends it."""
    file = results.with_name("where").open("w", encoding="utf-8")
    faulthandler.dump_traceback_later(seconds, file=file)


def _save(exercise: Exercise, picture: Picture, directory: Path) -> str | None:
    """Writes the picture, and of a run the stepper too. A picture that cannot be drawn fails no check."""
    from minibatch import player, plot_style

    with contextlib.suppress(Exception):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{exercise.id}.png"
        plot_style.save(pictures.draw(picture, f"{exercise.id} {exercise.title}"), path)
        if isinstance(picture, Trace) and picture.num_steps:
            player.export_html(pictures.from_one(picture), path.with_suffix(".html"))
        return str(path)
    return None


def _limit_memory(num_bytes: int) -> None:
    """Beyond it, allocating raises MemoryError. Where the system has no such limit, there is none."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
