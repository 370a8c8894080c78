"""Where the work and the memory went: the two sums that a single tokens-per-second number hides.

*Work.* Every token that goes through the model is exactly one of: prefill, decode, recomputed (its K/V had been
computed before and was lost to a preemption), left padding (a static batch is a rectangle, so short prompts are filled
up) or dead padding (a static batch keeps the rows of finished requests). Only the first two move a request forward.

*Rows.* The same seen as a batch: a request's row in an iteration is useful if it computed at least one token for the
first time. Three requests of 18, 73 and 141 tokens in one static batch execute 3 x 141 = 423 row-iterations, of which
18 + 73 + 141 = 232 are useful.

*Memory.* Every row of the KV cache is filled, reserved but unused, lost to fragmentation, or free (the division of the
vLLM paper, Kwon et al., SOSP 2023, figure 2); of the free ones, a prefix cache may still find some.

*Preemption* costs twice: the recompute tax is tokens that go through the model again (``Work.recomputed``), a swap is
bytes that go to the host and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from minibatch.metrics import ratio, steps_kept, steps_table
from minibatch.trace import StepReport, Trace


@dataclass(frozen=True)
class Work:
    """Tokens by kind, and row-iterations: NaN if the trace was kept without step reports."""

    prefill: float
    decode: float
    recomputed: float
    left_padding: float
    dead_padding: float
    useful_rows: float
    executed_rows: float

    @property
    def executed(self) -> float:
        """Tokens that went through the model."""
        return self.prefill + self.decode + self.recomputed + self.left_padding + self.dead_padding

    @property
    def useful_share(self) -> float:
        """Share of the executed tokens that were prefill or decode; NaN if none was executed."""
        return ratio(self.prefill + self.decode, self.executed)

    @property
    def useful_row_share(self) -> float:
        """Share of the executed row-iterations that were useful; NaN if there was none."""
        return ratio(self.useful_rows, self.executed_rows)


COLUMNS = tuple(field.name for field in fields(Work))


def work(trace: Trace) -> Work:
    """What the model executed, over the whole run."""
    if not steps_kept(trace):
        return Work(*[math.nan] * len(COLUMNS))
    total = steps_table(trace).sum()
    left_padding = total["padding"] - total["dead_padding"]
    tokens = (total["prefill"], total["decode"], total["recomputed"], left_padding, total["dead_padding"])
    return Work(*map(int, (*tokens, total["useful_rows"], total["num_rows"])))


def work_table(trace: Trace) -> pd.DataFrame:
    """The same a request: index ``request_id`` in the order of the trace, columns the fields of :class:`Work`.

    ``executed_rows - useful_rows`` are the iterations in which the request's row ran for nothing. Raises ValueError for
    a light trace, which does not say who did what.
    """
    if trace.light:
        raise ValueError(f"a light trace of {trace.num_steps} iterations does not say who did what: use record_steps")
    table = {timeline.request_id: dict.fromkeys(COLUMNS, 0) for timeline in trace.timelines}
    for step in trace.steps:
        _add(step, table)
    index = pd.Index(table, name="request_id", dtype=object)
    return pd.DataFrame(list(table.values()), index=index, columns=list(COLUMNS), dtype=int)


def _add(step: StepReport, table: dict[str, dict[str, int]]) -> None:
    """Adds an iteration to the counts of those who took part: ``table[request_id][column]``, see :class:`Work`."""
    for member in step.members:
        row = table[member.request_id]
        row["prefill"] += member.prefill
        row["decode"] += member.decode
        row["recomputed"] += member.recomputed
        row["useful_rows"] += member.prefill + member.decode > 0
    for pad in step.padding:
        table[pad.request_id]["dead_padding" if pad.dead else "left_padding"] += pad.num_tokens
    for request_id in {row.request_id for row in (*step.members, *step.padding)}:  # left pads share their member's row
        table[request_id]["executed_rows"] += 1


@dataclass(frozen=True)
class Memory:
    """Shares of the cache's rows, 0 to 1; NaN without iterations.

    Means are weighted by the duration of the iterations, so they are averages over busy time; idle time between
    iterations is left out. The five means add up to 1.
    """

    capacity: float
    peak_filled: float
    mean_filled: float
    mean_reserved: float
    mean_fragmentation: float
    mean_cached: float
    mean_free: float
    preemptions: int


def memory(trace: Trace) -> Memory:
    """How full the KV cache was, and what the rest of it was doing. ``capacity`` is in rows (tokens)."""
    preemptions = sum(t.num_preemptions for t in trace.timelines)
    steps = steps_table(trace)
    if not len(steps):
        return Memory(*[math.nan] * 7, preemptions)
    seconds, capacity = steps["duration"].to_numpy(), steps["kv_capacity"].to_numpy()

    def mean(part: str) -> float:
        return ratio(float(np.sum(steps[f"kv_{part}"] / capacity * seconds)), float(np.sum(seconds)))

    peak = float((steps["kv_filled"] / capacity).max())
    means = (mean(part) for part in ("filled", "reserved", "fragmentation", "cached", "free"))
    return Memory(int(capacity[-1]), peak, *means, preemptions)
