"""How long prompts and answers are: distributions of whole numbers of tokens, at least 1.

Each is a frozen dataclass with ``draw(rng, n)``. Nothing but the generator's state and ``n`` goes into a draw, every
length takes its random numbers after those of the one before, and the numbers that shape a distribution do not decide
how many are taken. So the first hundred of a thousand lengths are the hundred of a workload of a hundred, and one
parameter can be changed with everything else left alone (common random numbers).

Each has a text form, for command lines and labels: ``parse_lengths(lengths.describe()) == lengths``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from minibatch.checks import check_float, check_int

MOST = 2**31 - 1  # tokens, of any drawn length: a prompt and its answer stay below contents.ROOM
Z90 = 1.2815515655446004  # the standard normal distribution's 90th percentile


class Described:
    """Has a text form: its name and its numbers, in the order of its fields; defaults at the end are left out."""

    name: ClassVar[str]

    def describe(self) -> str:
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        while values and values[-1][1] == values[-1][0].default:
            values.pop()
        text = ",".join(f.name if value is True else _number(value) for f, value in values)
        return f"{self.name}:{text}" if text else self.name


class Lengths(Described):
    """A distribution of lengths in tokens."""

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """``n`` lengths, int64, each at least 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fixed(Lengths):
    """Always the same."""

    tokens: int
    name: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        _check_tokens("tokens", self.tokens)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.full(n, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class Uniform(Lengths):
    """Every length from ``low`` to ``high``, both included, equally often (Orca: 32 to 512, and 1 to 128)."""

    low: int
    high: int
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        _check_tokens("low", self.low)
        _check_tokens("high", self.high, self.low)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return self.low + np.floor(rng.random(n) * (self.high - self.low + 1)).astype(np.int64)


@dataclass(frozen=True)
class Geometric(Lengths):
    """Ends at every token with the same probability, on average after ``mean``; cut at ``cap``.

    The memoryless one: with one step a token it is the service time of the textbook's queues.
    """

    mean: float
    cap: int | None = None
    name: ClassVar[str] = "geometric"

    def __post_init__(self) -> None:
        check_float("mean", self.mean, 1.0, math.inf)
        _check_cap(self.cap)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        uniform = rng.random(n)
        if self.mean == 1:
            return np.ones(n, dtype=np.int64)
        return _whole(np.ceil(np.log1p(-uniform) / math.log1p(-1 / self.mean)), self.cap)


@dataclass(frozen=True)
class Exponential(Lengths):
    """Exponential with mean ``mean``, rounded; what is above ``cap`` is cut to it.

    ``reject``: instead, what rounds to 0 or to more than ``cap`` is drawn again, so that the mean falls with the cap
    (Anyscale's benchmark of continuous batching). It is drawn at once from the distribution that this leaves.
    """

    mean: float
    cap: int | None = None
    reject: bool = False
    name: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        check_float("mean", self.mean, 0.0, math.inf, above=True)
        _check_cap(self.cap)
        if not isinstance(self.reject, bool):
            raise ValueError(f"reject must be True or False, got {self.reject!r}")

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        uniform = rng.random(n)
        if not self.reject:
            return _whole(-self.mean * np.log1p(-uniform), self.cap)
        low, high = 0.5, math.inf if self.cap is None else self.cap + 0.5  # what rounds to 1 ... cap
        return _whole(low - self.mean * np.log1p(uniform * np.expm1((low - high) / self.mean)), self.cap)


@dataclass(frozen=True)
class LogNormal(Lengths):
    """The logarithm is normal: long-tailed, as real lengths are. ``p90`` is the 90th percentile; cut at ``cap``."""

    median: float
    p90: float
    cap: int | None = None
    name: ClassVar[str] = "lognormal"

    def __post_init__(self) -> None:
        check_float("median", self.median, 1.0, math.inf)
        check_float("p90", self.p90, self.median, math.inf)
        _check_cap(self.cap)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        sigma = math.log(self.p90 / self.median) / Z90
        with np.errstate(over="ignore"):  # infinite, and then cut
            return _whole(self.median * np.exp(sigma * rng.standard_normal(n)), self.cap)


@dataclass(frozen=True)
class Normal(Lengths):
    """Normal, with a standard deviation of ``spread`` times the mean (DeepSpeed-FastGen: 0.3); at least 1."""

    mean: float
    spread: float
    cap: int | None = None
    name: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        check_float("mean", self.mean, 1.0, math.inf)
        check_float("spread", self.spread, 0.0, math.inf)
        _check_cap(self.cap)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return _whole(self.mean * (1 + self.spread * rng.standard_normal(n)), self.cap)


@dataclass(frozen=True)
class Empirical(Lengths):
    """One of ``values``, each equally likely; ``in_order``: one after the other, from the start again at the end."""

    values: tuple[int, ...]
    in_order: bool = False
    name: ClassVar[str] = "empirical"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(np.asarray(self.values).tolist()))
        if not self.values:
            raise ValueError("values is empty: there is no length to draw")
        for value in self.values:
            _check_tokens("each of the values", value)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        indices = np.arange(n) % len(self.values) if self.in_order else Uniform(1, len(self.values)).draw(rng, n) - 1
        return np.array(self.values, dtype=np.int64)[indices]

    def describe(self) -> str:
        """Not a form that can be parsed: the values are too many."""
        return f"empirical ({len(self.values):,} values{', in order' if self.in_order else ''})"


LENGTHS = {kind.name: kind for kind in (Fixed, Uniform, Geometric, Exponential, LogNormal, Normal)}


def parse_lengths(text: str) -> Lengths:
    """``fixed:512``, ``uniform:32,512``, ``exponential:128,1536,reject`` and so on: the text forms.

    Raises ValueError that says what is wrong and which forms there are.
    """
    return parse("lengths", text, LENGTHS)


def parse(what: str, text: str, kinds: Mapping[str, type]) -> Any:
    """The object that ``text`` describes; ``kinds`` are the dataclasses by name."""
    name, _, rest = text.partition(":")
    try:
        if name not in kinds:
            raise ValueError(f"there is no {name!r}")
        kind = kinds[name]
        given = [part.strip() for part in rest.split(",")] if rest else []
        if not sum(f.default is MISSING for f in fields(kind)) <= len(given) <= len(fields(kind)):
            raise ValueError(f"{len(given)} value{'' if len(given) == 1 else 's'} for {_form(kind)}")
        return kind(*(_value(part, f) for part, f in zip(given, fields(kind), strict=False)))
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}; known: {', '.join(map(_form, kinds.values()))}") from None


def _form(kind: type) -> str:
    """``exponential:MEAN[,CAP[,reject]]``."""
    names = [f.name if f.default is False else f.name.upper() for f in fields(kind)]
    needed = sum(f.default is MISSING for f in fields(kind))
    optional = "".join(f"[,{name}" for name in names[needed:]) + "]" * len(names[needed:])
    return kind.name + (":" if names else "") + ",".join(names[:needed]) + optional


def _value(part: str, field: Any) -> float | bool | None:
    if field.default is False and part == field.name:
        return True
    if field.default is None and not part:
        return None
    try:
        return int(part) if part.lstrip("+-").isdecimal() else float(part)
    except ValueError:
        raise ValueError(f"{field.name} is {part!r}, not a number") from None


def _number(value: float | None) -> str:
    """Short, and exactly the same number when it is read again."""
    if value is None:
        return ""
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))


def _whole(values: np.ndarray, cap: int | None) -> np.ndarray:
    return np.clip(np.rint(values), 1, MOST if cap is None else cap).astype(np.int64)


def _check_tokens(name: str, value: int, low: int = 1) -> None:
    check_int(name, value, low)
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}")


def _check_cap(cap: int | None) -> None:
    if cap is not None:
        _check_tokens("cap", cap)
