"""The parent's side of ``bench_worker.py``: starts an engine in its process, asks it, says what went wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from minibatch import bench_worker


class WorkerFailed(RuntimeError):
    """An engine could not be started, or did not get through its work. Says which, and the end of what it printed."""


class Worker:
    """A running engine, called ``name`` in messages. Raises WorkerFailed.

    ``setup``   what it is told first
    ``python``  None: this one
    """

    def __init__(self, name: str, setup: dict[str, Any], python: Path | None, environment: dict[str, str]) -> None:
        self.name = name
        # A foreign Python runs the file by its path, in isolation: the modules beside it must not shadow its own.
        target = ["-m", bench_worker.__name__] if python is None else ["-I", bench_worker.__file__]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [str(python or sys.executable), *target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise WorkerFailed(f"{name} cannot be started: {error}") from None
        self.facts = self.ask(setup)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
            raise WorkerFailed(f"{self.name} {how}:\n{self._last_words()}")
        try:
            return json.loads(answer)
        except ValueError:
            raise WorkerFailed(f"{self.name} does not answer as it should: {answer[:80]!r}") from None

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if "%|" not in line]  # no progress bars
        return "\n".join(lines[-12:]) or "it said nothing"

    def close(self) -> None:
        with suppress(BrokenPipeError):  # it is dead, and a question that it never read is still there
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
