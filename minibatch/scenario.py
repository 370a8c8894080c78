"""One simulated run in plain values: what a command line can say, a table can hold, and another process can repeat.

A :class:`Scenario` names a model, a GPU, a workload and a configuration. :meth:`Scenario.run` makes the objects and
simulates; :func:`numbers` puts the trace into one flat row.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
    ``rate``                mean rate of the arrivals in requests/s, instead of their own
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
    prompts: str = "lognormal:500,1500,3000"
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
        if self.is_calibrated:
            self._take_model_of_file()
        known: dict[str, Collection[str]] = {"scheduler": CONFIGURATIONS}
        known |= {} if self.is_calibrated else {"model": MODELS, "gpu": GPUS}
        for name, names in known.items():
            if getattr(self, name) not in names:
                raise ValueError(f"{name} must be one of {', '.join(names)}, got {getattr(self, name)!r}")
        for name in ("num_requests", "max_tokens", "kv_tokens", "slot_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.rate is not None:
            check_float("rate", self.rate, 0.0, math.inf, above=True)
        check_int("seed", self.seed, 0)
        check_float("memory_share", self.memory_share, 0.0, 1.0, above=True)
        if self.kv_tokens is None:
            self.cost.kv_tokens(self.memory_share)  # raises if the model does not fit

    def _take_model_of_file(self) -> None:
        """The file says all about model and machine; raises ValueError if something else does too."""
        if not Path(self.gpu).is_file():
            raise ValueError(f"there is no file {self.gpu}: `minibatch calibrate --out {self.gpu}` writes one")
        cost = self.cost
        for name in ("model", "tensor_parallel", "overhead"):
            mine, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if mine not in (default, cost.model.name):
                raise ValueError(f"{name} {mine}: {self.gpu} says that already")
        object.__setattr__(self, "model", cost.model.name)

    @property
    def is_calibrated(self) -> bool:
        return self.gpu.endswith(".json")

    @property
    def cost(self) -> CostModel:
        if self.is_calibrated:
            return CostModel.load(self.gpu)
        return CostModel(MODELS[self.model], GPUS[self.gpu], self.tensor_parallel, overhead=self.overhead)

    @property
    def kv_budget(self) -> int:
        """Tokens of the KV cache."""
        return self.kv_tokens or self.cost.kv_tokens(self.memory_share)

    def load(self) -> Workload:
        """The workload. Raises ValueError or OSError if it cannot be had, or has no requests."""
        found = self._load()
        if not len(found):
            raise ValueError(f"{self.workload}: no requests")
        return found

    @property
    def is_drawn(self) -> bool:
        """Whether the workload depends on the seed."""
        return self.workload.partition(":")[0] in ("synthetic", "lengths")

    def _load(self) -> Workload:
        kind, _, path = self.workload.partition(":")
        if kind == "synthetic" and not path:
            return self._synthetic()
        if kind not in READERS or not path:
            forms = ", ".join(f"{reader}:PATH" for reader in READERS)
            raise ValueError(f"workload must be synthetic or {forms}, got {self.workload!r}")
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}")
        self._check_unused(kind)
        if kind == "lengths":
            pairs = workload_files.read_lengths(path)
            return from_lengths(pairs, self._process(), self.seed, self.num_requests, max_tokens=self.max_tokens)
        if kind == "saved":
            found = Workload.load(path)
        else:
            read = workload_files.read_azure if kind == "azure" else workload_files.read_mooncake
            found = read(path, self.max_tokens)
        found = found if self.num_requests is None else found.head(self.num_requests)
        return found if self.rate is None else found.at_rate(self.rate)

    def _check_unused(self, kind: str) -> None:
        """Raises ValueError for what a file says already."""
        unused = ["prompts", "outputs", *([] if kind == "lengths" else ["arrivals"])]
        unused += ["max_tokens"] if kind == "saved" else []
        for name in unused:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name} {getattr(self, name)}: these are in the file {self.workload}")

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
        process = parse_arrivals(self.arrivals or "poisson:4")
        return process if self.rate is None else process.at_rate(self.rate)

    def run(self, workload: Workload | None = None, record_steps: bool = False) -> Trace:
        """Simulates it; ``workload`` if it is loaded already.

        Raises NeverFits if not one slot of a contiguous cache fits the KV budget.
        """
        workload = workload or self.load()
        cost, kv_tokens = self.cost, self.kv_budget
        slot_size = self.slot_size or longest(workload, cost.max_model_len)
        batched = self.max_num_batched_tokens or max(cost.max_model_len or slot_size, 2048)  # whatever was drawn
        knobs = replace(self, max_num_batched_tokens=batched)
        scheduler, kv_cache = knobs.configuration(self.scheduler, kv_tokens, slot_size)
        return simulate(
            workload,
            scheduler,
            kv_cache,
            cost,
            order=self.make("order"),
            record_steps=record_steps,
            check_plans=False,  # all four schedulers are ours, and what a policy answers is checked when it is asked
            meta={"name": self.scheduler, "kv_budget": f"KV budget {kv_tokens} tokens", "scenario": asdict(self)},
        )


def longest(workload: Workload, max_model_len: int | None) -> int:
    """Most tokens that a request of the workload may have cached, as far as the context allows."""
    sizes = [len(r.prompt) + (r.params.max_tokens or 0) - 1 for r in workload.every_request]
    return min(max(sizes, default=1), max_model_len or math.inf)


def num_cut(trace: Trace) -> int:
    """Answers that ended at ``max_tokens`` or at the context, and not where the workload says."""
    return sum(timeline.finish_reason == "length" for timeline in trace.timelines)


def numbers(trace: Trace) -> dict[str, float]:
    """One run in one row: what happened to the requests, where work and memory went; ``cut``: see ``num_cut``."""
    work, memory = accounting.work(trace), accounting.memory(trace)
    counts = metrics.steps_table(trace)
    busy = counts["duration"].sum()
    return {
        **metrics.summary(trace),
        "cut": num_cut(trace),
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
