"""Tests a student's file in a fresh process, with limits of time and memory, whatever that file does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minibatch.checks import check_float, check_int
from minibatch.labs.checker import FAILED, NOT_DONE, PASSED, Outcome, outcome
from minibatch.labs.exercise import Exercise

STOPPED = "Stopped after"
START_UP = 2.0  # more seconds, for a process to begin, and to say where it was
SECONDS = 30.0  # for one exercise; a check that passes takes about one
MEBIBYTES = 4096
SKIP = {".venv", "venv", "env", "site-packages", "__pycache__", ".git", ".ipynb_checkpoints", "counterexamples"}
ROOT = str(Path(__file__).resolve().parents[2])
# Not `-m`: that would put the current directory, with the student's files, before the standard library.
START = "import sys; sys.path.pop(0); sys.path.append({root!r}); from minibatch.labs.worker import main; main()"


@dataclass(frozen=True)
class Limits:
    """``seconds`` for one exercise, import included; ``mebibytes`` of address space for the process, where the system
    can limit it (Linux)."""

    seconds: float = SECONDS
    mebibytes: int = MEBIBYTES

    def __post_init__(self) -> None:
        """Raises ValueError for limits within which not even an empty file could be tested."""
        check_float("seconds", self.seconds, 2.0, math.inf)
        check_int("mebibytes", self.mebibytes, 1024)


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
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        while rest := [exercise for exercise in exercises if exercise.id not in found]:
            results = Path(scratch, str(len(found)), "results")  # of this process alone
            results.parent.mkdir()
            results.touch()
            with _place(path, copied) as there:
                ended = _run(there, rest, results, seed, limits, pictures, quiet)
            found |= _read(results, rest)
            if stopped := next((exercise for exercise in rest if exercise.id not in found), None):
                at = _where(results, path) if ended.startswith(STOPPED) else ""
                found[stopped.id] = outcome(stopped, FAILED, idea=ended, happened=at)
    return [found[exercise.id] for exercise in exercises]


def _read(results: Path, exercises: Sequence[Exercise]) -> dict[str, Outcome]:
    """What a process has written, as far as it is what was asked for, in that order."""
    found: dict[str, Outcome] = {}
    lines = results.read_text(encoding="utf-8", errors="replace").splitlines() if results.exists() else []
    for exercise, line in zip(exercises, lines, strict=False):
        try:
            said = Outcome(**json.loads(line))
            points = min(max(float(said.points), 0.0), exercise.points) if said.status == PASSED else 0
        except (TypeError, ValueError):
            break
        if said.id != exercise.id or said.status not in (PASSED, FAILED, NOT_DONE):
            break
        found[exercise.id] = replace(said, title=exercise.title, points=points, max_points=exercise.points)
    return found


def _where(results: Path, path: Path) -> str:
    """The student's line that ran when time was over (what ``faulthandler`` has written)."""
    dump = results.with_name("where")
    text = dump.read_text(encoding="utf-8", errors="replace") if dump.exists() else ""
    at = re.search(rf'{re.escape(path.name)}", line (\d+) in (\S+)', text)
    return f"it was in {at[2]}, line {at[1]}" if at else ""


@contextlib.contextmanager
def _place(path: Path, copied: Path | None) -> Iterator[Path]:
    if copied is None:
        yield path
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch) / "submission"
        shutil.copytree(copied, copy, ignore=_left_out)
        yield copy / path.relative_to(copied)


def _left_out(directory: str, names: list[str]) -> list[str]:
    """Links, pipes and the like, and what is not the student's work."""
    paths = [Path(directory, name) for name in names]
    odd = [path for path in paths if path.is_symlink() or not (path.is_file() or path.is_dir())]
    return [path.name for path in (*odd, *(path for path in paths if path.name in SKIP))]


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
    command += [f"--seed={seed}", f"--seconds={limits.seconds}", f"--memory={limits.mebibytes}"]
    command += [f"--pictures={pictures.resolve()}"] if pictures else []
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=path.resolve().parent,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(results.parent / "hypothesis"),  # not beside the student's files
            "TMPDIR": str(results.parent),
        },
        start_new_session=True,
    )
    try:
        size, since = 0, time.monotonic()
        while process.poll() is None:
            if (now := results.stat().st_size if results.exists() else 0) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > limits.seconds + START_UP:
                return f"{STOPPED} {limits.seconds:g} s: does your code come to an end? A check takes about a second."
            time.sleep(0.02)
    finally:
        _kill(process)
    if process.returncode < 0:
        why = "did your code take all memory?" if process.returncode == -9 else "does your code end itself?"
        return f"The process was killed by signal {-process.returncode}: {why}"
    return f"The process ended in the middle of the check, with code {process.returncode}: does your code call exit?"


def _kill(process: subprocess.Popen) -> None:
    """What the student's code has started goes too, unless it has left the process group."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
