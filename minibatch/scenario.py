"""One simulated run in plain values: what a command line can say, a table can hold, and another process can repeat.

A :class:`Scenario` names a model, a GPU, a workload and a configuration. :meth:`Scenario.run` makes the objects and
simulates; :func:`numbers` puts the trace into one flat row.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minibatch import accounting, metrics, workload_files
from minibatch.arrival_processes import ArrivalProcess, parse_arrivals
from minibatch.checks import check_float, check_int
from minibatch.closed_loop import closed_loop
from minibatch.configurations import CONFIGURATIONS, Knobs
from minibatch.cost_model import CostModel
from minibatch.distributions import parse_lengths
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.open_loop import from_lengths, synthetic
from minibatch.simulation import simulate
from minibatch.trace import Trace
from minibatch.workloads import Workload

READERS = ("azure", "mooncake", "lengths", "saved")


@dataclass(frozen=True, kw_only=True)
class Scenario(Knobs):
    """
    ``model``, ``gpu``      names from ``model_shapes.MODELS`` and ``gpus.GPUS``; or ``gpu`` a file that ``minibatch
                            calibrate`` wrote, with the model that it was calibrated with
    ``tensor_parallel``     GPUs that share the model
    ``scheduler``           static, continuous, paged or chunked
    ``workload``            ``synthetic``; or a file: ``azure:PATH``, ``mooncake:PATH``, ``lengths:PATH`` or
                            ``saved:PATH``
    ``num_requests``        how many; of a file, the first so many (None: all; synthetic: 500)
    ``arrivals``            a process such as ``poisson:4`` or ``gamma:4,2.5``, or ``closed:N``, N clients of which each
                            sends its next request when it has its answer. None: those of the file; synthetic: poisson:4
    ``rate``                mean arrival rate in requests/s, whatever the arrivals were
    ``prompts``, ``outputs``  distributions of lengths in tokens, of a synthetic workload
    ``max_tokens``          what schedulers see of the length of an answer; None: exactly that
    ``kv_tokens``           KV cache in tokens; None: what ``memory_share`` of the GPUs' memory has room for
    ``slot_size``           tokens of a contiguous slot; None: the longest request of the workload
    ``overhead``            seconds an iteration beside the work on the GPU
    ``seed``                of everything that is drawn
    """

    model: str = "llama-2-7b"
    gpu: str = "a100-40"
    tensor_parallel: int = 1
    scheduler: str = "chunked"
    workload: str = "synthetic"
    num_requests: int | None = None
    arrivals: str | None = None
    rate: float | None = None
    prompts: str = "lognormal:500,1500,4000"
    outputs: str = "lognormal:150,450,1000"
    max_tokens: int | None = None
    kv_tokens: int | None = None
    memory_share: float = 0.9
    slot_size: int | None = None
    overhead: float = CostModel.overhead
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a name that does not exist or a number that makes no sense."""
        super().__post_init__()
        known_gpus = [self.gpu] if self.is_calibrated else GPUS
        for name, known in (("model", MODELS), ("gpu", known_gpus), ("scheduler", CONFIGURATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("num_requests", "max_tokens", "kv_tokens", "slot_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.rate is not None:
            check_float("rate", self.rate, 0.0, math.inf, above=True)
        check_int("seed", self.seed, 0)
        check_float("memory_share", self.memory_share, 0.0, 1.0, above=True)
        _ = self.cost  # raises for what it cannot be made of

    @property
    def is_calibrated(self) -> bool:
        return self.gpu.endswith(".json")

    @property
    def cost(self) -> CostModel:
        if self.is_calibrated:
            return CostModel.load(self.gpu)
        return CostModel(MODELS[self.model], GPUS[self.gpu], self.tensor_parallel, overhead=self.overhead)

    def load(self) -> Workload:
        """The workload. Raises ValueError or OSError if it cannot be had."""
        kind, _, path = self.workload.partition(":")
        if kind == "synthetic" and not path:
            found = self._synthetic()
        elif kind not in READERS or not path:
            raise ValueError(
                f"workload must be synthetic or {', '.join(f'{r}:PATH' for r in READERS)}, got {self.workload!r}"
            )
        elif kind == "lengths":
            found = from_lengths(
                _read(kind, path), self._process(), self.seed, self.num_requests, max_tokens=self.max_tokens
            )
        else:
            found = _read(kind, path) if kind == "saved" else _read(kind, path, self.max_tokens)
            if self.arrivals is not None:
                raise ValueError(f"the arrivals of {self.workload} are in the file: change their rate instead")
            found = found if self.num_requests is None else found.head(self.num_requests)
        return found if self.rate is None else found.at_rate(self.rate)

    def _synthetic(self) -> Workload:
        lengths, number = (parse_lengths(self.prompts), parse_lengths(self.outputs)), self.num_requests or 500
        kind, _, clients = (self.arrivals or "").partition(":")
        if kind == "closed":
            if not clients.isdecimal() or not int(clients) or self.rate is not None:
                raise ValueError(
                    f"closed:N is N clients, which have no rate of their own; got {self.arrivals}, rate {self.rate}"
                )
            each = -(-number // int(clients))
            return closed_loop(int(clients), each, *lengths, seed=self.seed, max_tokens=self.max_tokens)
        return synthetic(number, self._process(), *lengths, seed=self.seed, max_tokens=self.max_tokens)

    def _process(self) -> ArrivalProcess:
        return parse_arrivals(self.arrivals or "poisson:4")

    def run(self, workload: Workload | None = None, record_steps: bool = False) -> Trace:
        """Simulates it; ``workload`` if it is loaded already.

        Raises NeverFits if not one slot of a contiguous cache fits the KV budget.
        """
        workload = workload or self.load()
        cost, kv_tokens = self.cost, self.kv_tokens or self.cost.kv_tokens(self.memory_share)
        slot_size = self.slot_size or longest(workload, cost.max_model_len)
        scheduler, kv_cache = self.configuration(self.scheduler, kv_tokens, slot_size)
        return simulate(
            workload,
            scheduler,
            kv_cache,
            cost,
            order=self.make("order"),
            record_steps=record_steps,
            meta={"name": self.scheduler, "kv_budget": f"KV budget {kv_tokens} tokens", "scenario": asdict(self)},
        )


def _read(kind: str, path: str, *max_tokens: int | None) -> Any:
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    read = {
        "azure": workload_files.read_azure,
        "mooncake": workload_files.read_mooncake,
        "lengths": workload_files.read_lengths,
        "saved": Workload.load,
    }
    return read[kind](path, *max_tokens)


def longest(workload: Workload, max_model_len: int | None) -> int:
    """Most tokens that a request of the workload may have cached, as far as the context allows."""
    sizes = [len(r.prompt) + (r.params.max_tokens or 0) - 1 for r in workload.every_request]
    return min(max(sizes, default=1), max_model_len or math.inf)


def numbers(trace: Trace) -> dict[str, float]:
    """One run in one row: what happened to the requests, where work and memory went."""
    work, memory = accounting.work(trace), accounting.memory(trace)
    counts = metrics.steps_table(trace)
    busy = counts["duration"].sum()
    return {
        **metrics.summary(trace),
        "mean_batch": metrics.ratio(float((counts["num_seqs"] * counts["duration"]).sum()), busy),
        "busy": metrics.ratio(busy, metrics.makespan(trace)),
        "useful_share": work.useful_share,
        "recomputed_tokens": work.recomputed,
        "kv_peak": memory.peak_filled,
        "kv_filled": memory.mean_filled,
        "kv_reserved": memory.mean_reserved,
        "kv_fragmentation": memory.mean_fragmentation,
        "kv_cached": memory.mean_cached,
    }
