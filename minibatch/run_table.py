"""Runs side by side in numbers: one row a run, all of it from the traces, full or light.

Columns, besides those of :mod:`minibatch.metrics`:

``executed``     tokens through the model = prefill + decode + recomputed + left pads + dead rows; ``useful``: share of
                 prefill and decode in them
``prefill s``    seconds in iterations that compute some prompt (or recompute); ``decode s``: in all others;
                 ``idle s``: from first arrival to last finish, waiting for requests
``filled``       share of the KV cache that holds tokens of live requests, peak and mean; ``reserved``: set aside and
                 not filled; ``fragmented``: of no use to anyone. Means are over busy seconds
``found``        prompt tokens that a prefix cache had, so that they were never computed, and their share of all;
                 ``found again``: after a preemption; ``kept``: share of the KV cache that is nobody's and can be found
``swapped``      tokens whose K/V went to host memory; ``host peak``: the most that were there at once

The last two groups are printed where there is something to say; in the JSON they always are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd

from minibatch import accounting, metrics
from minibatch.trace import Trace

LATENCIES = {"queueing_delay": "queueing delay", "ttft": "TTFT", "tbt": "TBT", "e2e": "end-to-end"}
BANDS = (
    ["work"],
    ["time", "KV cache"],
    ["prefix cache", "swap"],
    ["queueing delay", "TTFT"],
    ["TBT", "end-to-end"],
)
UNITS = {"work": "tokens", "prefix cache": "tokens", "swap": "tokens"}  # of the others: seconds
WIDTH = 100  # columns of the terminal
SHARES = ("useful", "of prompts", "kept")


def table(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """One row a run; two levels of columns: group, quantity. Times in seconds, shares from 0 to 1."""
    return pd.DataFrame({name: row(trace) for name, trace in traces.items()}).T


def row(trace: Trace) -> dict[tuple[str, str], float]:
    numbers, work, memory = metrics.summary(trace), accounting.work(trace), accounting.memory(trace)
    steps = metrics.steps_table(trace)
    with_prompts = steps["prefill"] + steps["recomputed"] > 0
    row = {
        ("work", "requests"): numbers["completed"],
        ("work", "iterations"): numbers["iterations"],
        ("work", "executed"): work.executed,
        ("work", "prefill"): work.prefill,
        ("work", "decode"): work.decode,
        ("work", "recomputed"): work.recomputed,
        ("work", "left pads"): work.left_padding,
        ("work", "dead rows"): work.dead_padding,
        ("work", "useful"): work.useful_share,
        ("time", "tokens/s"): numbers["throughput"],
        ("time", "prefill s"): steps["duration"][with_prompts].sum(),
        ("time", "decode s"): steps["duration"][~with_prompts].sum(),
        ("time", "idle s"): max(numbers["makespan"] - steps["duration"].sum(), 0.0),  # rounding can make it negative
        ("KV cache", "peak filled"): memory.peak_filled,
        ("KV cache", "mean filled"): memory.mean_filled,
        ("KV cache", "reserved"): memory.mean_reserved,
        ("KV cache", "fragmented"): memory.mean_fragmentation,
        ("KV cache", "preemptions"): memory.preemptions,
        ("prefix cache", "found"): numbers["cached_tokens"],
        ("prefix cache", "of prompts"): metrics.ratio(numbers["cached_tokens"], numbers["prompt_tokens"]),
        ("prefix cache", "found again"): numbers["recached_tokens"],
        ("prefix cache", "kept"): memory.mean_cached,
        ("swap", "swapped"): numbers["swapped_tokens"],
        ("swap", "host peak"): steps["kv_host"].max(),
    }
    for latency, title in LATENCIES.items():
        row |= {(title, statistic): numbers[f"{latency}_{statistic.lower()}"] for statistic in ("mean", "P50", "P99")}
    return row


def render(traces: Mapping[str, Trace], kind: str) -> str:
    """The table for a terminal of 100 columns: bands, each with a title that says the unit.

    ``kind``  of the times: simulated or measured, and what else there is to say about them
    """
    numbers = table(traces)
    silent = [] if any(trace.prefix_cached for trace in traces.values()) else ["prefix cache"]
    silent += [] if numbers["swap", "swapped"].any() else ["swap"]
    bands = []
    for groups in BANDS:
        groups = [group for group in groups if group not in silent]
        if groups:
            unit = UNITS.get(groups[0], f"seconds, {kind}")
            bands.append(f"{' | '.join(groups)} ({unit})\n{_band(numbers, groups).to_string()}")
    return "\n\n".join(bands)


def render_groups(traces: Mapping[str, Trace], by: str, kind: str) -> str:
    """The mean wait for the first token, a column a client or priority (``by``); with how many requests each has."""
    groups = {name: metrics.split(trace, by) for name, trace in traces.items()}
    counts = next(iter(groups.values()))["completed"]
    rows = {name: [f"{value:.3g}" for value in table["ttft_mean"]] for name, table in groups.items()}
    columns = [f"{group} ({count:.0f})" for group, count in counts.items()]
    shown = pd.DataFrame(rows.values(), index=list(rows), columns=columns)
    return f"TTFT mean, by {by} (of how many requests; seconds, {kind})\n{shown.to_string()}"


def _band(numbers: pd.DataFrame, groups: list[str]) -> pd.DataFrame:
    columns = [column for column in numbers.columns if column[0] in groups]
    return pd.DataFrame({_heading(column): numbers[column].map(_format(*column)) for column in columns})


def _heading(column: tuple[str, str]) -> str:
    group, name = column
    name = "filled" if name == "mean filled" else name
    return {"queueing delay": "wait ", "TTFT": "TTFT ", "TBT": "TBT ", "end-to-end": "e2e "}.get(group, "") + name


def _format(group: str, name: str) -> Any:
    if name in SHARES or (group == "KV cache" and name != "preemptions"):
        return lambda value: f"{value:.1%}"
    if name == "preemptions" or group in UNITS:
        return lambda value: f"{value:.0f}"
    return lambda value: f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def wrap(head: str, text: str) -> list[str]:
    """``text`` in lines of at most ``WIDTH`` columns, behind ``head``."""
    indent = " " * len(head)
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
