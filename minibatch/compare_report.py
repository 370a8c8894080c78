"""A comparison as a table, as JSON, as pictures: nothing is measured here, all of it follows from the traces.

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

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from minibatch import accounting, metrics, plots
from minibatch.compare import Comparison
from minibatch.policies import FCFS
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
SHARES = ("useful", "of prompts", "kept")
WIDTH = 100  # columns of the terminal
ALIKE = "all requests have the same client and priority"


def table(comparison: Comparison) -> pd.DataFrame:
    """One row a configuration; two levels of columns: group, quantity. Times in seconds, shares from 0 to 1."""
    return pd.DataFrame({name: _row(run.trace) for name, run in comparison.runs.items()}).T


def _row(trace: Trace) -> dict[tuple[str, str], float]:
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
        ("time", "idle s"): numbers["makespan"] - steps["duration"].sum(),
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


def render(comparison: Comparison) -> str:
    """The table for a terminal of 100 columns: bands, each with a title that says the unit."""
    numbers = table(comparison)
    kind = "simulated, 1 s an iteration" if _meta(comparison)["clock"] != "real" else "measured"
    silent = [] if comparison.setup.prefix_cache else ["prefix cache"]
    silent += [] if numbers["swap", "swapped"].any() else ["swap"]
    bands = []
    for groups in BANDS:
        groups = [group for group in groups if group not in silent]
        if groups:
            unit = UNITS.get(groups[0], f"seconds, {kind}")
            bands.append(f"{' | '.join(groups)} ({unit})\n{_band(numbers, groups).to_string()}")
    return "\n\n".join(bands)


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


def describe(comparison: Comparison) -> str:
    """What ``minibatch compare`` prints: what ran, the table, and whether the tokens are those of solo generation."""
    meta = _meta(comparison)
    budget = f"{comparison.kv_tokens} tokens = {comparison.kv_bytes / 2**20:.1f} MiB"
    lines = [
        f"model       {', '.join(str(meta[key]) for key in ('model', 'dtype', 'device', 'source') if key in meta)}",
        f"machine     {meta['machine']}",
        *_wrap(f"{'workload':<12}", f"{meta['workload']}, seed {meta['seed']}"),
        f"            (the same arrival times again: --rate {comparison.rate!r})",
        f"KV cache    {budget} for every configuration",
    ]
    if meta["order"] != repr(FCFS()):
        lines += [f"order       {meta['order']} in every configuration", f"{'':<12}({ALIKE})"]
    for name, run in comparison.runs.items():
        lines += _wrap(f"{name:<12}", f"{run.trace.meta['scheduler']} on {run.trace.meta['kv_cache']}")
    lines += ["", render(comparison), "", _decode_costs(comparison), "", "tokens, against solo generation"]
    lines += [f"{name:<12}{run.verdict}" for name, run in comparison.runs.items()]
    return "\n".join(lines)


def _wrap(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def _decode_costs(comparison: Comparison) -> str:
    """Why batching pays: what an iteration that only decodes takes, by the number of its rows, dead ones included."""
    steps = pd.concat([metrics.steps_table(trace) for trace in comparison.traces.values()])
    decodes = steps[(steps["prefill"] + steps["recomputed"] == 0) & (steps["num_tokens"] > 0)]
    medians = decodes.groupby("num_tokens")["duration"].median()
    shown = [rows for rows in (1, 2, 4, 8, 16, 32) if rows in medians.index]
    costs = ", ".join(f"{rows} row{'s' * (rows > 1)} {1000 * medians[rows]:.0f} ms" for rows in shown)
    return f"an iteration that only decodes takes (median): {costs}"


def save(comparison: Comparison, directory: Path) -> list[Path]:
    """Writes the pictures, a trace a configuration, and all numbers and answers as JSON; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in plots.compare_figures(comparison.traces).items():
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    for name, trace in comparison.traces.items():
        paths.append(directory / f"{name}.trace.jsonl")
        trace.save(paths[-1])
    paths.append(directory / "compare.json")
    paths[-1].write_text(json.dumps(to_json(comparison), indent=2) + "\n", encoding="utf-8")
    return paths


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that was measured, ready for ``json.dump``; a quantity that is undefined is None."""
    rows, meta = table(comparison), _meta(comparison)
    answers = next(iter(comparison.runs.values())).results
    return {
        "setup": asdict(comparison.setup),
        "kind": "simulated" if meta["clock"] != "real" else "measured",
        "meta": {key: value for key, value in meta.items() if key not in ("name", "scheduler", "kv_cache", "order")},
        "kv_tokens": comparison.kv_tokens,
        "kv_bytes": comparison.kv_bytes,
        "rate": comparison.rate,
        "solo_seconds": comparison.solo_seconds,
        "configurations": {
            name: {
                "scheduler": run.trace.meta["scheduler"],
                "kv_cache": run.trace.meta["kv_cache"],
                "order": run.trace.meta["order"],
                "numbers": {" ".join(column): _plain(rows.loc[name, column]) for column in rows.columns},
                "equality": {**asdict(run.verdict), "holds": run.verdict.holds},
            }
            for name, run in comparison.runs.items()
        },
        "requests": [
            {"request_id": r.request_id, "prompt": comparison.prompts[r.request_id], "answer": r.text} for r in answers
        ],
    }


def _meta(comparison: Comparison) -> dict[str, Any]:
    return next(iter(comparison.traces.values())).meta


def _plain(value: float) -> float | None:
    return None if value != value else float(value)
