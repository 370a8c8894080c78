"""The main job: one workload through four configurations of one engine, with the same KV memory for each.

What differs between two neighbours of the ladder is one thing, so a difference in the numbers has one cause:

    static -> continuous   membership may change between iterations
    continuous -> paged    memory is allocated by need instead of by maximum
    paged -> chunked       prompts are cut to a token budget instead of computed whole
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from minibatch import accounting, metrics, plots, reference, workload
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.models import Model
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Scheduler
from minibatch.request import NeverFits, Request, Result
from minibatch.static_batching import StaticBatching
from minibatch.trace import Trace


@dataclass(frozen=True)
class Setup:
    """What is compared.

    ``load``         arrival rate, as a multiple of the rate at which requests can be served one after the other
    ``kv_tokens``    KV budget in tokens, the same for all; None: four times the longest request
    ``max_num_seqs`` most active requests, where memory does not set the limit first
    """

    workload: str = "mixed"
    num_requests: int = 18
    max_tokens: int = 64
    load: float = 4.0
    seed: int = 0
    kv_tokens: int | None = None
    block_size: int = 16
    max_num_seqs: int = 16
    token_budget: int = 128

    def __post_init__(self) -> None:
        """Raises ValueError for a number that makes no sense."""
        for name in ("num_requests", "max_tokens", "load", "block_size", "max_num_seqs", "token_budget", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class Run:
    """One configuration's run of the workload."""

    trace: Trace
    results: tuple[Result, ...]
    verdict: reference.Verdict


@dataclass(frozen=True)
class Comparison:
    """``runs`` by configuration; ``rate`` requests a second; ``solo_seconds`` mean time of a request alone."""

    setup: Setup
    kv_tokens: int
    kv_bytes: int
    rate: float
    solo_seconds: float
    runs: dict[str, Run]

    @property
    def traces(self) -> dict[str, Trace]:
        return {name: run.trace for name, run in self.runs.items()}

    @property
    def holds(self) -> bool:
        """Whether every configuration gave the tokens of solo generation, up to numerical ties."""
        return all(run.verdict.holds for run in self.runs.values())


def configurations(setup: Setup, kv_tokens: int, slot_size: int) -> dict[str, tuple[Scheduler, KVCache]]:
    """The four, on ``kv_tokens`` tokens of cache; a contiguous slot holds the longest request, ``slot_size`` tokens."""
    slots, blocks = kv_tokens // slot_size, kv_tokens // setup.block_size
    whole = ContinuousBatching(setup.max_num_seqs, max_num_batched_tokens=max(1024, slot_size))
    return {
        "static": (StaticBatching(min(slots, setup.max_num_seqs)), ContiguousKVCache(slots, slot_size)),
        "continuous": (whole, ContiguousKVCache(slots, slot_size)),
        "paged": (whole, PagedKVCache(blocks, setup.block_size)),
        "chunked": (ChunkedPrefill(setup.token_budget, setup.max_num_seqs), PagedKVCache(blocks, setup.block_size)),
    }


def run(model: Model, setup: Setup, progress: bool = True) -> Comparison:
    """Every request alone, then the four; raises NeverFits if the budget cannot hold the longest request."""
    texts = workload.read_prompts(setup.workload)
    requests = workload.build(model.tokenizer, texts, setup.num_requests, setup.max_tokens, setup.seed)
    slot_size = max(len(r.prompt) for r in requests) + setup.max_tokens - 1
    slot_size = -(-slot_size // setup.block_size) * setup.block_size  # so that blocks and slots divide one budget
    kv_tokens = setup.kv_tokens or 4 * slot_size
    if kv_tokens < slot_size:
        raise NeverFits(f"the longest request needs {slot_size} tokens of cache, the budget is {kv_tokens}")
    parts = configurations(setup, kv_tokens, slot_size)
    with tqdm(total=(len(parts) + 1) * len(requests), unit="request", disable=not progress) as bar:
        solos = _solo_runs(model, requests, bar)
        solo_seconds = sum(s.seconds for s in solos.values()) / len(solos)
        rate = setup.load / solo_seconds
        arriving = workload.poisson(requests, rate, setup.seed)
        runs = {
            name: _run(name, model, *parts[name], arriving, solos, _meta(model, setup, rate), bar) for name in parts
        }
    return Comparison(setup, kv_tokens, kv_tokens * model.kv_bytes_per_token, rate, solo_seconds, runs)


def _solo_runs(model: Model, requests: Sequence[Request], bar: tqdm) -> dict[str, reference.Solo]:
    reference.solo(model, requests[0])  # once for nothing, so that no first-time cost is measured
    solos = {}
    for request in requests:
        bar.set_description("solo")
        solos[request.request_id] = reference.solo(model, request)
        bar.update()
    return solos


def _run(
    name: str,
    model: Model,
    scheduler: Scheduler,
    kv: KVCache,
    requests: list[Request],
    solos: dict[str, reference.Solo],
    meta: dict[str, Any],
    bar: tqdm,
) -> Run:
    bar.set_description(name)
    watched = reference.Watched(model)
    engine = Engine(watched, scheduler, kv, meta={"name": name, **meta})
    results = engine.run(requests, on_step=lambda report: bar.update(len(report.finished)))
    return Run(engine.trace, tuple(results), reference.compare(results, solos, watched.best))


def _meta(model: Model, setup: Setup, rate: float) -> dict[str, Any]:
    what = f"{setup.num_requests} {setup.workload} prompts, at most {setup.max_tokens} new tokens"
    facts = {name: getattr(model, name) for name in ("source", "dtype", "device") if hasattr(model, name)}
    return {
        **{name: str(value) for name, value in facts.items()},
        "workload": f"{what}, Poisson {rate:.3g} requests/s",
        "seed": setup.seed,
        "machine": machine(),
    }


def machine() -> str:
    """The processor and the threads that torch uses, as far as they can be told."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    torch = sys.modules.get("torch")
    return name if torch is None else f"{name}, {torch.get_num_threads()} threads"


# ------------------------------------------------------------------------------------------- as a table, as files

LATENCY_COLUMNS = {"queueing_delay": "queueing delay", "ttft": "TTFT", "tbt": "TBT", "e2e": "end-to-end"}


def table(comparison: Comparison) -> pd.DataFrame:
    """One row a configuration; two levels of columns: group, quantity. Times in seconds, shares from 0 to 1."""
    return pd.DataFrame({name: _row(run.trace) for name, run in comparison.runs.items()}).T


def _row(trace: Trace) -> dict[tuple[str, str], float]:
    numbers, work, memory = metrics.summary(trace), accounting.work(trace), accounting.memory(trace)
    row = {
        ("work", "requests"): numbers["completed"],
        ("work", "iterations"): numbers["iterations"],
        ("work", "executed"): work.executed,
        ("work", "prefill"): work.prefill,
        ("work", "decode"): work.decode,
        ("work", "recomputed"): work.recomputed,
        ("work", "padding"): work.left_padding + work.dead_padding,
        ("work", "useful"): work.useful_share,
        ("work", "tokens/s"): numbers["throughput"],
        ("memory", "KV peak"): memory.peak_filled,
        ("memory", "KV mean"): memory.mean_filled,
        ("memory", "reserved unused"): memory.mean_reserved + memory.mean_fragmentation,
        ("memory", "preemptions"): memory.preemptions,
    }
    for latency, title in LATENCY_COLUMNS.items():
        row |= {(title, statistic): numbers[f"{latency}_{statistic.lower()}"] for statistic in ("mean", "P50", "P99")}
    return row


def render(comparison: Comparison) -> str:
    """The table for a terminal of 100 columns, cut into two bands, with what it was measured on."""
    numbers = table(comparison)
    simulated = next(iter(comparison.traces.values())).simulated
    unit = "simulated, 1 s an iteration" if simulated else "measured"
    counts = {"requests", "iterations", "executed", "prefill", "decode", "recomputed", "padding", "preemptions"}

    def cell(column: tuple[str, str]) -> Callable[[float], str]:
        group, name = column
        if name in counts:
            return lambda value: f"{value:.0f}"
        if group == "memory" or name == "useful":
            return lambda value: f"{100 * value:.1f}%"
        return lambda value: f"{value:.3g}" if value < 100 else f"{value:.0f}"

    text = {column: numbers[column].map(cell(column)) for column in numbers.columns}
    shown = pd.DataFrame(text)
    bands = [["work"], ["memory"], ["queueing delay", "TTFT"], ["TBT", "end-to-end"]]
    titles = ["", "", f"(seconds, {unit})", f"(seconds, {unit})"]
    parts = []
    for groups, title in zip(bands, titles, strict=True):
        band = shown.loc[:, [column for column in shown.columns if column[0] in groups]]
        parts.append(band.to_string() + (f"\n{title}" if title else ""))
    return "\n\n".join(parts)


def describe(comparison: Comparison) -> str:
    """What ``minibatch compare`` prints: what ran, the table, and whether the tokens are those of solo generation."""
    meta = next(iter(comparison.traces.values())).meta
    budget = f"{comparison.kv_tokens} tokens = {comparison.kv_bytes / 2**20:.1f} MiB"
    lines = [
        f"model     {', '.join(str(meta[key]) for key in ('model', 'dtype', 'device', 'source') if key in meta)}",
        f"machine   {meta['machine']}",
        f"workload  {meta['workload']} (load {comparison.setup.load:g}), seed {meta['seed']}",
        f"KV cache  {budget} for every configuration",
        *(
            f"{name:<12}{run.trace.meta['scheduler']} on {run.trace.meta['kv_cache']}"
            for name, run in comparison.runs.items()
        ),
        "",
        render(comparison),
        "",
        "tokens",
        *(f"{name:<12}{run.verdict}" for name, run in comparison.runs.items()),
    ]
    return "\n".join(lines)


def save(comparison: Comparison, directory: Path) -> list[Path]:
    """Writes the pictures, a trace a configuration, and all numbers as JSON; returns the paths."""
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
    rows = table(comparison)
    meta = next(iter(comparison.traces.values())).meta
    return {
        "setup": asdict(comparison.setup),
        "kind": "simulated" if meta["clock"] != "real" else "measured",
        "meta": {
            key: meta.get(key) for key in ("model", "dtype", "device", "source", "machine", "workload", "versions")
        },
        "kv_tokens": comparison.kv_tokens,
        "kv_bytes": comparison.kv_bytes,
        "rate": comparison.rate,
        "solo_seconds": comparison.solo_seconds,
        "configurations": {
            name: {
                "scheduler": run.trace.meta["scheduler"],
                "kv_cache": run.trace.meta["kv_cache"],
                "numbers": {" ".join(column): _plain(rows.loc[name, column]) for column in rows.columns},
                "equality": {**asdict(run.verdict), "holds": run.verdict.holds},
            }
            for name, run in comparison.runs.items()
        },
    }


def _plain(value: float) -> float | None:
    return None if value != value else float(value)
