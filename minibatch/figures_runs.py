"""The runs behind the pictures of traces: two examples, made anew each time, and a measured comparison that is kept.

As tables, every row says what one mark of a picture is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from minibatch import compare, compare_report, metrics
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.configurations import CONFIGURATIONS
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.llm import load_model
from minibatch.membership_plot import read
from minibatch.models.pretrained import DEFAULT_MODEL
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Scheduler
from minibatch.policies import FCFS, Order, PreemptionPolicy, Priority, Recompute, Swap, by_priority, lowest_priority
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import Request, SamplingParams
from minibatch.static_batching import StaticBatching
from minibatch.trace import Trace

Traces = Mapping[str, Trace]  # by the name of the run

# ---------------------------------------------------------------- A, B and C

DECODES = {"A": 18, "B": 73, "C": 141}  # after the token that the prefill emits
QUEUED = {"D": 60, "E": 90, "F": 30}


def abc() -> Traces:
    """Three requests in a batch of three, without and with three more that wait."""
    return {
        "static": _decoding(StaticBatching(3), DECODES),
        "continuous, nothing queued": _decoding(ContinuousBatching(3), DECODES),
        "static, D to F queued": _decoding(StaticBatching(3), DECODES | QUEUED),
        "continuous, D to F queued": _decoding(ContinuousBatching(3), DECODES | QUEUED),
    }


def _decoding(scheduler: Scheduler, decodes: Mapping[str, int]) -> Trace:
    requests = [Request([1, 2, 3], SamplingParams(max_tokens=n + 1), request_id=name) for name, n in decodes.items()]
    engine = Engine(ToyModel(), scheduler, ContiguousKVCache(num_slots=3, slot_size=160), meta={"workload": "A, B, C"})
    engine.run(requests)
    return engine.trace


# ---------------------------------------------------------------- three sets of policies

SEED = 2
COMMON = list(range(12))  # all prompts begin with it: three blocks
URGENT = 6


def policies() -> Traces:
    """One mechanism, three sets of policies, the same requests: what changes is who waits."""
    swap = Swap(victim=lowest_priority, displaces=by_priority, host_tokens=40)
    return {
        "FCFS, recompute": _under(Recompute(), PagedKVCache(14, 4), FCFS()),
        "FCFS, recompute, prefix cache": _under(Recompute(), PrefixCachedKVCache(14, 4), FCFS()),
        "priority, swap, prefix cache": _under(swap, PrefixCachedKVCache(14, 4), Priority()),
    }


def _requests() -> Iterator[Request]:
    rng = random.Random(SEED)
    for i in range(9):
        params = SamplingParams(max_tokens=rng.randint(6, 14), n=2 if i == 3 else 1, temperature=1.0, seed=i)
        prompt = COMMON + [100 + i] * rng.randint(1, 8)
        yield Request(prompt, params, f"r{i}", arrival_time=2.0 * i, priority=int(i != URGENT))


def _under(preemption: PreemptionPolicy, kv: KVCache, order: Order) -> Trace:
    scheduler = ChunkedPrefill(token_budget=12, max_num_seqs=5, preemption=preemption)
    what = "9 requests with a common beginning, r3 has two answers, r6 is urgent"
    engine = Engine(ToyModel(), scheduler, kv, order=order, meta={"workload": what, "seed": SEED})
    engine.run(list(_requests()))
    return engine.trace


# ---------------------------------------------------------------- measured


def measure(directory: Path, progress: bool = True) -> None:
    """``minibatch compare`` with its defaults: writes a trace a configuration, and all numbers and answers.

    Raises ValueError if some tokens are not those of solo generation: of such a run no picture is made.
    """
    found = compare.run(load_model(DEFAULT_MODEL), compare.Setup(), progress)
    if not found.holds:
        wrong = [f"{name}: {run.verdict}" for name, run in found.runs.items() if not run.verdict.holds]
        raise ValueError(f"tokens differ from solo generation. {'; '.join(wrong)}")
    for name, trace in found.traces.items():
        trace.save(trace_file(directory, name))
    numbers = json.dumps(compare_report.to_json(found), indent=2)
    (directory / "compare.json").write_text(numbers + "\n", encoding="utf-8")


def measured(directory: Path) -> Traces:
    """What ``measure`` wrote."""
    return {name: Trace.load(trace_file(directory, name)) for name in CONFIGURATIONS}


def trace_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.trace.jsonl"


# ---------------------------------------------------------------- as tables


def membership_table(traces: Traces) -> pd.DataFrame:
    """A row a bar or line of the picture of the membership, from ``left`` to ``right``: iteration i is [i - 0.5,
    i + 0.5]. Arrivals, forks and ends are where the two are equal."""
    rows = []
    for run, trace in traces.items():
        cells = read(trace)
        names = {row: name for name, row, _, _ in cells.stays}
        spans = [(kind, *span) for kind, several in cells.spans.items() for span in several]
        spans += [(kind, row, x, x) for kind, several in cells.marks.items() for x, row in several]
        rows += [(run, names[row], kind, left, right) for kind, row, left, right in spans]
    return pd.DataFrame(rows, columns=["run", "request", "kind", "left", "right"])


def memory_table(traces: Traces) -> pd.DataFrame:
    """A row an iteration: rows of the cache, by what they hold."""
    return _steps(traces, ["kv_filled", "kv_fragmentation", "kv_reserved", "kv_cached", "kv_free", "kv_capacity"])


def tokens_table(traces: Traces) -> pd.DataFrame:
    """A row an iteration: tokens executed, by kind (padding includes dead rows), and the most that it was allowed."""
    return _steps(traces, ["prefill", "decode", "recomputed", "padding", "dead_padding", "token_budget"])


def _steps(traces: Traces, columns: list[str]) -> pd.DataFrame:
    tables = {run: metrics.steps_table(trace) for run, trace in traces.items()}
    return pd.concat(tables, names=["run"]).reset_index(level="run")[["run", "index", *columns]]


def latency_table(traces: Traces) -> pd.DataFrame:
    """A row a dot of the picture of the latencies, in seconds."""
    rows = [
        (run, measure, seconds)
        for run, trace in traces.items()
        for measure, values in metrics.latencies(trace).items()
        for seconds in values.tolist()
    ]
    return pd.DataFrame(rows, columns=["run", "measure", "seconds"])
