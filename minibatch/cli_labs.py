"""``minibatch lab ...``: exercises, from handing out to grading."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from minibatch import plot_style
from minibatch.cli_options import add_command, check_writable, option
from minibatch.labs import COUNTEREXAMPLES, Ran, folder, fresh, grade, run, sources, words
from minibatch.labs.checker import PASSED, Outcome
from minibatch.labs.fresh import Limits
from minibatch.labs.manifest import LABS
from minibatch.labs.scorecard import Cards
from minibatch.labs.trial import told
from minibatch.llm import load_model
from minibatch.plan import PlanError

NOT_PASSED = 6


def add(commands: argparse._SubParsersAction) -> None:
    lab = commands.add_parser("lab", help="Exercises: write parts of the engine yourself.", description=__doc__)
    inside = lab.add_subparsers(required=True, metavar="COMMAND")
    command = add_command(inside, "list", _list, "Says which labs and exercises there are.")
    command.add_argument("lab", nargs="*", metavar="LAB", help="only these")
    command.add_argument("--markdown", action="store_true", help="as a table for a syllabus: a row a lab")
    command = add_command(inside, "new", _new, "Writes a lab: the file to complete, a notebook, a README.")
    command.add_argument("lab", metavar="LAB", help=", ".join(LABS))
    command.add_argument(
        "directory", nargs="?", type=Path, metavar="DIR", help="where (default: a directory named LAB)"
    )
    text = "Tests your code, in a process of its own, and shows a counter-example for what is wrong."
    command = add_command(inside, "check", _check, text)
    _add_place(command)
    option(command, "--exercise", None, "only this one, such as paging.2", str)
    _add_limits(command)
    command.add_argument("--json", action="store_true", help="print the outcomes as JSON, and nothing else")
    text = "Runs `minibatch compare` with your parts in the engine, and draws who was in the batch and what memory did."
    command = add_command(inside, "run", _run, text)
    _add_place(command)
    names = "toy (its tokens, at the times of a GPU), smollm2-135m (the real one), a Hub id or a path"
    option(command, "--model", "toy", names, str)
    option(command, "--out", None, "directory for pictures and traces (default: run, beside your file)", Path)
    option(command, "--seed", 0, "of the workload", int)
    command = add_command(inside, "grade", _grade, "Grades a class folder, a directory a submission.")
    command.add_argument("submissions", type=Path, metavar="SUBMISSIONS")
    command.add_argument("--lab", action="append", default=[], help="grade this lab (default: all handed in); repeat")
    command.add_argument("--csv", type=Path, metavar="FILE", help="write a row an exercise and submission")
    _add_limits(command)


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "place", nargs="?", type=Path, default=Path("."), metavar="DIR", help="or the file (default: .)"
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    option(command, "--seed", 0, "of the examples that are drawn, and of the capstone's workloads", int)
    option(command, "--seconds", Limits.seconds, "for one exercise", float)
    option(command, "--memory", Limits.mebibytes, "MiB of address space, where the system can limit it", int)


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(options.seconds, options.memory)


def _list(options: argparse.Namespace) -> int:
    labs = folder.chosen(options.lab) or list(LABS.values())
    if options.markdown:
        print(words.syllabus(labs))
        return 0
    for lab in labs:
        print(f"{lab.name}: {lab.title} ({lab.points} points, {lab.minutes} minutes)")
        for each in lab.exercises:
            print(f"  {each.id:<14}{each.title:<46}{each.points:>3} points  {each.name}, {sources.length(each)}")
    return 0


def _new(options: argparse.Namespace) -> int:
    (lab,) = folder.chosen([options.lab])
    directory = options.directory or Path(lab.name)
    check_writable(directory)
    paths = folder.new(lab, directory)
    print(f"written to {directory}/: {', '.join(path.name for path in paths)}")
    print(f"Begin with README.md; then: minibatch lab check {directory}")
    return 0


def _check(options: argparse.Namespace) -> int:
    found, results = folder.find(options.place), []
    for lab, path in found:
        exercises = [each for each in lab.exercises if options.exercise in (None, each.id)]
        if not exercises:
            continue
        pictures = path.parent / COUNTEREXAMPLES
        for each in exercises:  # of earlier failures
            for old in (pictures / f"{each.id}.png", pictures / f"{each.id}.html"):
                old.unlink(missing_ok=True)
        outcomes = fresh.check(
            path, exercises, seed=options.seed, limits=_limits(options), pictures=pictures, quiet=options.json
        )
        for each in outcomes:
            each.picture = each.picture and os.path.relpath(each.picture)
        results += outcomes
        if not options.json:
            _say(f"\n{words.report(lab, outcomes)}")
    if not results:
        raise ValueError(f"no exercise {options.exercise} in {', '.join(lab.name for lab, _ in found)}")
    if options.json:
        print(json.dumps([each.as_dict() for each in results], indent=2))
    return 0 if all(each.status == PASSED for each in results) else NOT_PASSED


def _run(options: argparse.Namespace) -> int:
    place = options.place
    out = options.out or (place if place.is_dir() else place.parent) / "run"
    check_writable(out)
    model: Any = None if options.model == "toy" else load_model(options.model, "float32", "cpu")
    try:
        ran = run(place, model, options.seed, out)
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise PlanError(f"your parts broke the engine: {told(error)}; minibatch lab check {place} says more") from error
    if isinstance(ran, Cards):
        out.mkdir(parents=True, exist_ok=True)
        plot_style.save(ran.figure(), out / "scorecard.png")
    _say(str(ran))
    paths = ran.paths if isinstance(ran, Ran) else [out / "scorecard.png"]
    print(f"\nwritten to {out}/: {', '.join(path.name for path in paths)}")
    return 0


def _grade(options: argparse.Namespace) -> int:
    if options.csv is not None:
        check_writable(options.csv.parent)
    graded = grade.grade(options.submissions, folder.chosen(options.lab), options.seed, _limits(options))
    with contextlib.ExitStack() as stack:
        table = None
        if options.csv is not None:
            file = stack.enter_context(options.csv.open("w", newline="", encoding="utf-8"))
            table = grade.Table(file, options.seed)
        for one in graded:
            _print(one)
            if table is not None:
                table.add(one)
    if options.csv is not None:
        print(f"written to {options.csv}")
    if others := grade.not_graded(options.submissions):
        print(f"not graded, because a submission is a directory: {', '.join(others)}")
    return 0


def _print(one: grade.Graded) -> None:
    marks = [_mark(each) for each in one.outcomes]
    got = words.points(one.points, one.lab.points)
    _say(f"{one.submission:<24}{one.lab.name:<12}{got:>8}  {' '.join(marks)}")


def _mark(outcome: Outcome) -> str:
    """``+`` right, ``~`` right with a part of the points, ``-`` not right or not done, ``?`` nothing handed in."""
    if outcome.status != PASSED:
        return "?" if outcome.status == grade.MISSING else "-"
    return "~" if outcome.points < outcome.max_points else "+"


def _say(text: str) -> None:
    """Prints what a terminal can show, whatever is in a student's messages and file names."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
