"""A counter-example: the input for which a student's code does something else than it should, in a learner's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from minibatch.trace import Trace

Picture = Trace | Callable[[], Figure]


class CounterExample(AssertionError):
    """Raised by a check.

    ``idea``       what the code seems to have got wrong, as a sentence that names the idea
    ``case``       the input, in words and numbers
    ``expected``, ``happened``  what should have come out, and what did
    ``iteration``  of the engine, where it happened; None if no engine ran
    ``picture``    what to show: the trace of the run, or a function that draws
    """

    def __init__(
        self,
        idea: str,
        *,
        case: str,
        expected: str,
        happened: str,
        iteration: int | None = None,
        picture: Picture | None = None,
    ) -> None:
        super().__init__(f"{idea}\ncase: {case}\nexpected: {expected}\nhappened: {happened}")
        self.idea, self.case, self.expected, self.happened = idea, case, expected, happened
        self.iteration, self.picture = iteration, picture


def expect(
    got: Any,
    want: Any,
    *,
    case: str,
    idea: str,
    what: str = "",
    iteration: int | None = None,
    picture: Picture | None = None,
) -> None:
    """Raises a CounterExample unless ``got`` equals ``want``.

    Numbers are equal to within rounding, NaN equals NaN, and it does not matter whether a sequence is a list, a tuple
    or an array. ``what`` says what the values are: "gaps in seconds". Without a ``picture`` the two values are drawn.
    """
    if same(got, want):
        return
    if got is None:
        idea = "Nothing comes out of your code: is a `return` missing?"
    if picture is None:

        def picture() -> Figure:
            from minibatch.labs import pictures

            return pictures.difference(want, got, what)

    said = f"{what}: " if what else ""
    raise CounterExample(
        idea,
        case=case,
        expected=f"{said}{in_words(want)}",
        happened=f"{said}{in_words(got)}",
        iteration=iteration,
        picture=picture,
    )


def raised(call: Callable[[], Any]) -> str:
    """The name of the exception that a call raises; or that there is none, and what it returns."""
    try:
        return f"no error, but {in_words(call())}"
    except (CounterExample, NotImplementedError):
        raise
    except Exception as error:
        return type(error).__name__


def same(got: Any, want: Any) -> bool:
    """Whether two values mean the same; see :func:`expect`."""
    got, want = plain(got), plain(want)
    if isinstance(want, bool) or isinstance(got, bool) or want is None or got is None:
        return got is want
    if isinstance(want, (int, float)):
        if not isinstance(got, (int, float)):
            return False
        return got == want or (got != got and want != want) or abs(got - want) <= 1e-9 * max(1.0, abs(want))
    if isinstance(want, Mapping):
        return isinstance(got, Mapping) and got.keys() == want.keys() and all(same(got[k], want[k]) for k in want)
    if isinstance(want, Sequence) and not isinstance(want, str):
        is_sequence = isinstance(got, Sequence) and not isinstance(got, str)
        return is_sequence and len(got) == len(want) and all(map(same, got, want))
    return bool(got == want)


def plain(value: Any) -> Any:
    """Arrays and numpy's numbers as Python's own; iterators, sets and the like as they are."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return value


def in_words(value: Any, most: int = 300) -> str:
    """A value for a message: no numpy, at most nine digits, cut where it becomes too long to read."""
    text = _text(plain(value))
    return text if len(text) <= most else f"{text[: most - 20]} ... ({len(text):,} characters)"


def _text(value: Any) -> str:
    value = plain(value)
    if isinstance(value, float):
        return "not a number" if value != value else f"{value:.9g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (
            f"{type(value).__name__}({', '.join(f'{f}={_text(v)}' for f, v in zip(value._fields, value, strict=True))})"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(getattr(value, "label", value))
