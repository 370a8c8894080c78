"""Many inputs, and the smallest that fails: Hypothesis draws and shrinks, and time is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

EXAMPLES = 60  # drawn for each property
SHRINKING = 2.0  # seconds; enough for small inputs, and nobody waits for the last step


class Seed:
    """Of the examples. Graders set another one than students have."""

    value = 0


def for_all(check: Callable[..., None], examples: int = EXAMPLES, **strategies: Any) -> None:
    """Calls ``check`` with values drawn from the strategies; raises what it raises for the smallest that it fails.

    Deterministic for a given :class:`Seed`. ``check`` has to be a function of its arguments. Small means that the
    values are short when they are written down.
    """
    from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

    failures: list[tuple[int, str, Exception]] = []
    until = float("inf")

    def attempt(**values: Any) -> None:
        nonlocal until
        if time.monotonic() > until:
            return  # long enough: nothing smaller is found any more
        try:
            check(**values)
        except Exception as error:
            until = min(until, time.monotonic() + SHRINKING)
            failures.append((len(repr(values)), repr(values), error))
            raise

    attempt = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )(seed(Seed.value)(given(**strategies)(attempt)))
    try:
        attempt()
    except Exception:
        if not failures:  # then it is not the student's
            raise
    if failures:
        raise min(failures, key=lambda failure: failure[:2])[2] from None
