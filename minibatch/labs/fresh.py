"""Tests a student's file in a fresh process, with limits of time and memory, whatever that file does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minibatch.labs.checker import FAILED, Outcome, outcome
from minibatch.labs.exercise import Exercise

SECONDS = 30.0  # for one exercise; a check that passes takes about one
MEBIBYTES = 4096
SKIP = {".venv", "venv", "__pycache__", ".git", ".ipynb_checkpoints", "counterexamples", "node_modules"}
ROOT = str(Path(__file__).resolve().parents[2])
# Not `-m`: that would put the current directory, with the student's files, before the standard library.
START = "import sys; sys.path.pop(0); sys.path.append({root!r}); from minibatch.labs.worker import main; main()"


@dataclass(frozen=True)
class Limits:
    """``seconds`` for one exercise, import included; ``mebibytes`` of address space for the process, where the system
    can limit it (Linux)."""

    seconds: float = SECONDS
    mebibytes: int = MEBIBYTES


def check(
    path: Path,
    exercises: Sequence[Exercise],
    *,
    seed: int = 0,
    limits: Limits | None = None,
    pictures: Path | None = None,
    quiet: bool = False,
    copied: Path | None = None,
) -> list[Outcome]:
    """One outcome an exercise, in their order.

    ``pictures``  directory for pictures of counter-examples; None: none are made
    ``quiet``     what the student's code prints is thrown away
    ``copied``    a directory with the file in it, of which every process has a copy of its own to run in; None: the
                  code runs where it is
    """
    require_hypothesis()
    limits = limits or Limits()
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results"
        results.touch()
        while len(found) < len(exercises):
            rest = exercises[len(found) :]
            with _place(path, copied) as there:
                ended = _run(there, rest, results, seed, limits, pictures, quiet)
            found = [Outcome(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]
            if len(found) < len(exercises):  # the process is gone: the exercise that it was at has failed
                stopped = outcome(exercises[len(found)], FAILED, idea=ended)
                found.append(stopped)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(stopped.as_dict()) + "\n")
    return found


@contextlib.contextmanager
def _place(path: Path, copied: Path | None) -> Iterator[Path]:
    if copied is None:
        yield path
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch) / "submission"
        shutil.copytree(copied, copy, symlinks=True, ignore=lambda _, names: SKIP.intersection(names))
        yield copy / path.relative_to(copied)


def require_hypothesis() -> None:
    """Raises ValueError, with the remedy, if it is not installed."""
    if importlib.util.find_spec("hypothesis") is None:
        raise ValueError("the checks need hypothesis: install minibatch with its extra, pip install -e '.[labs]'")


def _run(
    path: Path,
    exercises: Sequence[Exercise],
    results: Path,
    seed: int,
    limits: Limits,
    pictures: Path | None,
    quiet: bool,
) -> str:
    """Runs a process until it ends, or has done nothing new for too long; says in a learner's words how it ended."""
    command = [sys.executable, "-c", START.format(root=ROOT), str(path.resolve()), str(results)]
    command += [exercise.id for exercise in exercises]
    command += [f"--seed={seed}", f"--memory={limits.mebibytes}"]
    command += [f"--pictures={pictures.resolve()}"] if pictures else []
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=path.resolve().parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        size, since = 0, time.monotonic()
        while process.poll() is None:
            if results.stat().st_size != size:
                size, since = results.stat().st_size, time.monotonic()
            if time.monotonic() - since > limits.seconds:
                return (
                    f"Stopped after {limits.seconds:g} s: does your code come to an end? A check takes about a second."
                )
            time.sleep(0.02)
    finally:
        _kill(process)
    if process.returncode < 0:
        return f"The process was killed by signal {-process.returncode}: did your code take all memory?"
    return f"The process ended in the middle of the check, with code {process.returncode}: does your code call exit?"


def _kill(process: subprocess.Popen) -> None:
    """Whatever the student's code has started goes too."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
