"""What happened, as facts: one immutable record an iteration, one timeline a request.

Metrics, figures, exports and the token accounting are pure functions of a :class:`Trace`; nothing else in the project
is instrumented. Times are seconds on the engine's clock: measured by a real clock, or simulated by a virtual one
(``trace.meta["clock"]`` says which).
"""

from __future__ import annotations

import contextlib
import functools
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import minibatch
from minibatch.kv_cache import Holding, KVSnapshot

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Member:
    """One request's part in one iteration: it computed ``tokens[start:stop]``.

    Each of these tokens is exactly one of three kinds. ``recomputed``: its K/V had been computed before and was lost to
    a preemption. Otherwise ``prefill`` if it belongs to the prompt, ``decode`` if the request generated it.
    ``emitted`` is the token id sampled at the end, None if the chunk did not reach the newest token.
    """

    request_id: str
    start: int
    stop: int
    prefill: int
    decode: int
    recomputed: int
    emitted: int | None

    @property
    def phase(self) -> str:
        """``recompute``, ``prefill`` or ``decode``: what most distinguishes the chunk."""
        return "recompute" if self.recomputed else "prefill" if self.prefill else "decode"


@dataclass(frozen=True, slots=True)
class PadRow:
    """Tokens computed for nobody in one row of a static batch; ``dead`` if the row's request has finished."""

    request_id: str
    num_tokens: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request became active. ``cached``: tokens whose K/V a prefix cache had; ``swapped_in``: tokens whose K/V came
    back from host memory; ``resumed``: it had been active before, so that what is cached may be its own."""

    request_id: str
    cached: int
    swapped_in: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request gave way to ``by``, and with it the K/V of ``num_tokens`` tokens: lost, or ``swapped`` to the host."""

    request_id: str
    by: str
    num_tokens: int
    swapped: bool


@dataclass(frozen=True, slots=True)
class Forked:
    """One more answer to a prompt (``n > 1``): it shares the K/V of ``parent`` and was given its own first token."""

    request_id: str
    parent: str
    emitted: int | None


class StepCounts(NamedTuple):
    """One iteration in numbers: all that a light trace keeps of it, and what the sums over a run are made of.

    ``useful_rows``, ``num_rows``  row-iterations: members that computed some token for the first time; members and rows
                                   of finished requests (see :mod:`minibatch.accounting`)
    """

    index: int
    start: float
    end: float
    num_seqs: int
    prefill: int
    decode: int
    recomputed: int
    padding: int
    dead_padding: int
    useful_rows: int
    num_rows: int
    token_budget: int | None
    arrived: int
    admitted: int
    preempted: int
    cached: int
    swapped_out: int
    swapped_in: int
    forked: int
    copied_rows: int
    finished: int
    num_waiting: int
    kv_filled: int
    kv_reserved: int
    kv_fragmentation: int
    kv_cached: int
    kv_free: int
    kv_host: int
    kv_capacity: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One iteration. Everything is in plan order, but for what includes all since the last report: ``arrived``,
    ``finished`` (aborts and full queues too; what ends after the last iteration is in the timelines only), and, if a
    forward failed in between, ``admitted``, ``preempted`` and ``copied_rows``.

    ``forked``       answers that left their sibling after this iteration
    ``copied_rows``  rows of shared blocks that were copied because somebody had to write there (copy-on-write)
    ``waiting``      (request id, reason) of those whom the plan *examined* and left without tokens, victims among them
    ``num_waiting``  how many waited in all; those not examined share the reason ``rest``
    ``token_budget`` most tokens that this iteration was allowed, None if the scheduler sets no limit
    ``kv``           after the forward, before anyone leaves
    """

    index: int
    start: float
    end: float
    members: tuple[Member, ...]
    padding: tuple[PadRow, ...]
    arrived: tuple[str, ...]
    admitted: tuple[Admitted, ...]
    preempted: tuple[Preempted, ...]
    finished: tuple[tuple[str, str], ...]
    waiting: tuple[tuple[str, str], ...]
    num_waiting: int
    rest: str
    token_budget: int | None
    kv: KVSnapshot
    forked: tuple[Forked, ...] = ()
    copied_rows: int = 0

    @property
    def prefill(self) -> int:
        return sum(m.prefill for m in self.members)

    @property
    def decode(self) -> int:
        return sum(m.decode for m in self.members)

    @property
    def recomputed(self) -> int:
        return sum(m.recomputed for m in self.members)

    @property
    def padded(self) -> int:
        return sum(p.num_tokens for p in self.padding)

    @property
    def cached(self) -> int:
        """Tokens that admitted requests did not have to compute, because a prefix cache had their K/V."""
        return sum(a.cached for a in self.admitted)

    @property
    def swapped_out(self) -> int:
        """Tokens whose K/V went to host memory."""
        return sum(p.num_tokens for p in self.preempted if p.swapped)

    @property
    def swapped_in(self) -> int:
        """Tokens whose K/V came back."""
        return sum(a.swapped_in for a in self.admitted)

    @property
    def num_tokens(self) -> int:
        """Tokens executed: prefill + decode + recomputed + padding."""
        return sum(m.stop - m.start for m in self.members) + self.padded

    @property
    def counts(self) -> StepCounts:
        """The same in numbers."""
        return StepCounts(
            index=self.index,
            start=self.start,
            end=self.end,
            num_seqs=len(self.members),
            prefill=self.prefill,
            decode=self.decode,
            recomputed=self.recomputed,
            padding=self.padded,
            dead_padding=sum(p.num_tokens for p in self.padding if p.dead),
            useful_rows=sum(m.prefill + m.decode > 0 for m in self.members),
            num_rows=len({row.request_id for row in (*self.members, *self.padding)}),  # left pads share a row
            token_budget=self.token_budget,
            arrived=len(self.arrived),
            admitted=len(self.admitted),
            preempted=len(self.preempted),
            cached=self.cached,
            swapped_out=self.swapped_out,
            swapped_in=self.swapped_in,
            forked=len(self.forked),
            copied_rows=self.copied_rows,
            finished=len(self.finished),
            num_waiting=self.num_waiting,
            kv_filled=self.kv.filled,
            kv_reserved=self.kv.reserved,
            kv_fragmentation=self.kv.fragmentation,
            kv_cached=self.kv.cached,
            kv_free=self.kv.free,
            kv_host=self.kv.host,
            kv_capacity=self.kv.capacity,
        )


@dataclass(slots=True)
class Timeline:
    """One request from arrival to end. Filled in by the engine, complete when ``finish_reason`` is set.

    With ``n > 1`` every answer has one, and ``group`` is the request's id.

    ``num_cached``   prompt tokens that it never had to compute: a prefix cache had them when it was first admitted, or
                     the first answer to the same prompt computed them
    ``num_recached`` tokens found in the prefix cache after a preemption; they may be its own
    ``error``        why it was refused, or what broke
    ``num_swapped``  tokens whose K/V was copied to host memory, and as many came back unless it ended there
    ``scheduled``    start of the first iteration that computed any of its tokens; None if there was none
    ``token_times``  end of the iteration that emitted each token
    ``runs``         [start, end] of each stay among the active requests, more than one after a preemption; a stay
                     that has not ended has its start in both places
    """

    request_id: str
    client: str
    priority: int
    num_prompt: int
    max_new_tokens: int
    arrival: float
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    runs: list[list[float]] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached: int = 0
    num_recached: int = 0
    num_swapped: int = 0
    group: str | None = None
    finish: float | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class Trace:
    """A run: ``meta`` (how it was made), ``steps`` (one report an iteration), ``timelines`` (one a request).

    A light trace has no ``steps``, and only the numbers of each iteration: ``light``.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    steps: list[StepReport] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    light: list[StepCounts] = field(default_factory=list)

    @property
    def counts(self) -> list[StepCounts]:
        """The numbers of each iteration, of any trace."""
        return self.light or [step.counts for step in self.steps]

    @property
    def num_steps(self) -> int:
        return len(self.light) or len(self.steps)

    def add(self, record: StepReport | StepCounts) -> None:
        """One more iteration."""
        if isinstance(record, StepReport):
            self.steps.append(record)
        else:
            self.light.append(record)

    @property
    def simulated(self) -> bool:
        return self.meta.get("clock") != "real"

    @property
    def prefix_cached(self) -> bool:
        """Whether the run had a prefix cache."""
        return str(self.meta.get("kv_cache", "")).startswith("PrefixCached")

    def save(self, path: str | Path) -> None:
        """Writes JSON lines: one header, then one line a step and one a timeline."""
        with open(path, "w", encoding="utf-8") as file:
            for kind, value in self._lines():
                line = json.dumps({kind: value}, separators=(",", ":"), default=lambda number: number.item())
                file.write(line + "\n")  # default: numpy's numbers

    def _lines(self) -> Iterator[tuple[str, Any]]:
        yield "meta", {**self.meta, "format": FORMAT}
        for step in self.steps:
            yield "step", asdict(step)
        for counts in self.light:
            yield "counts", counts._asdict()
        for timeline in self.timelines:
            yield "timeline", asdict(timeline)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads what ``save`` wrote; raises ValueError naming file and line for anything else."""
        trace, has_header = cls(), False
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    has_header |= trace._take(json.loads(line)) == "meta"
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ValueError(f"{path}:{number} is not a line of a minibatch trace: {error}") from error
        if not has_header:
            raise ValueError(f"{path} is not a minibatch trace: it has no header line")
        if missing := trace._untold():
            raise ValueError(f"{path} is cut off: it has no timeline of {missing}")
        return trace

    def _untold(self) -> str | None:
        """A request that some iteration computed and that has no timeline: these are written last."""
        known = {timeline.request_id for timeline in self.timelines}
        members = (member.request_id for step in self.steps for member in step.members)
        return next((request_id for request_id in members if request_id not in known), None)

    def _take(self, line: dict[str, Any]) -> str:
        """Adds what one line says, and returns its kind."""
        ((kind, value),) = line.items()
        if kind == "meta":
            if value.pop("format") != FORMAT:
                raise ValueError(f"this version reads trace format {FORMAT}")
            self.meta = value
        elif kind == "step":
            self.steps.append(_step(value))
        elif kind == "counts":
            self.light.append(StepCounts(**value))
        elif kind == "timeline":
            self.timelines.append(Timeline(**value))
        else:
            raise ValueError(f"unknown kind {kind!r}")
        return kind

    def to_pandas(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Two tidy tables: one row an iteration, one row a request (see :mod:`minibatch.metrics`)."""
        from minibatch import metrics

        return metrics.steps_table(self), metrics.requests_table(self)

    def save_chrome(self, path: str | Path) -> None:
        """Writes a Chrome/Perfetto trace (see :mod:`minibatch.chrome_trace`)."""
        from minibatch import chrome_trace

        chrome_trace.save(self, path)


def counted(number: int, noun: str) -> str:
    """``1 token``, ``1,024 tokens``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and of the packages whose numbers may depend on them, as far as they are installed."""
    found = {"python": platform.python_version(), "minibatch": minibatch.__version__}
    for package in ("torch", "transformers", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _step(value: dict[str, Any]) -> StepReport:
    kv = value.pop("kv")
    holdings = tuple(Holding(**{**h, "units": tuple(h["units"])}) for h in kv.pop("holdings"))
    idle = tuple(kv.pop("idle", ()))  # older traces do not have it
    members = tuple(Member(**m) for m in value.pop("members"))
    padding = tuple(PadRow(**p) for p in value.pop("padding"))
    value["arrived"] = tuple(value["arrived"])
    for name, kind in (("admitted", Admitted), ("preempted", Preempted), ("forked", Forked)):
        value[name] = tuple(kind(**entry) for entry in value[name])
    for name in ("finished", "waiting"):
        value[name] = tuple(tuple(pair) for pair in value[name])
    return StepReport(members=members, padding=padding, kv=KVSnapshot(**kv, holdings=holdings, idle=idle), **value)
