"""A comparison as a table, as JSON, as pictures: nothing is measured here, all of it follows from the traces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from minibatch import metrics, plots, run_table
from minibatch.compare import Comparison
from minibatch.models.toy_model import ToyModel
from minibatch.policies import FCFS
from minibatch.trace import Trace

ALIKE = "all requests have the same client and priority: see --clients, --priorities"

MODEL = ("model", "dtype", "forward", "device", "source")  # of a run's facts


def describe(comparison: Comparison) -> str:
    """What ``minibatch compare`` prints: what ran, the table, and whether the tokens are those of solo generation."""
    meta = _meta(comparison)
    budget = f"{comparison.kv_tokens} tokens = {comparison.kv_bytes / 2**20:.1f} MiB"
    lines = [
        f"model       {', '.join(str(meta[key]) for key in MODEL if key in meta)}",
        f"machine     {meta['machine']}",
        *run_table.wrap(f"{'workload':<12}", f"{meta['workload']}, seed {meta['seed']}"),
        f"            (the same arrival times again: --rate {comparison.rate!r})",
        f"KV cache    {budget} for every configuration",
    ]
    if meta["order"] != repr(FCFS()):
        lines += [f"order       {meta['order']} in every configuration"]
        if comparison.setup.clients == comparison.setup.priorities == 1:
            lines += [f"{'':<12}({ALIKE})"]
    for name, run in comparison.runs.items():
        lines += run_table.wrap(f"{name:<12}", f"{run.trace.meta['scheduler']} on {run.trace.meta['kv_cache']}")
    kind, setup = _kind(comparison), comparison.setup
    lines += ["", run_table.render(comparison.traces, kind), ""]
    for by, number in (("client", setup.clients), ("priority", setup.priorities)):
        lines += [run_table.render_groups(comparison.traces, by, kind), ""] if number > 1 else []
    lines += [_decode_costs(comparison)]
    lines += ["", "tokens, against solo generation"]
    lines += [f"{name:<12}{run.verdict}" for name, run in comparison.runs.items()]
    return "\n".join(lines)


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
    paths = [*save_runs(comparison.traces, directory), directory / "compare.json"]
    paths[-1].write_text(json.dumps(to_json(comparison), indent=2) + "\n", encoding="utf-8")
    return paths


def save_runs(traces: Mapping[str, Trace], directory: Path) -> list[Path]:
    """Writes the pictures of several runs side by side, and a trace each; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in plots.compare_figures(traces).items():
        paths.append(directory / f"{name}.png")
        plots.save(figure, paths[-1])
    for name, trace in traces.items():
        paths.append(directory / f"{name}.trace.jsonl")
        trace.save(paths[-1])
    return paths


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that was measured, ready for ``json.dump``; a quantity that is undefined is None."""
    rows, meta = run_table.table(comparison.traces), _meta(comparison)
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
                "numbers": {" ".join(column): plain(rows.loc[name, column]) for column in rows.columns},
                "equality": {**asdict(run.verdict), "holds": run.verdict.holds},
            }
            for name, run in comparison.runs.items()
        },
        "requests": [
            {"request_id": r.request_id, "prompt": comparison.prompts[r.request_id], "answer": r.text} for r in answers
        ],
    }


def _kind(comparison: Comparison) -> str:
    meta = _meta(comparison)
    if meta["clock"] == "real":
        return "measured"
    return "simulated, 1 s an iteration" if meta["model"] == ToyModel.name else "simulated"


def _meta(comparison: Comparison) -> dict[str, Any]:
    return next(iter(comparison.traces.values())).meta


def plain(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if value != value else float(value)
