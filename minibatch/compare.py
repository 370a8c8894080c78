"""The main job: one workload through four configurations of one engine, with the same KV memory for each.

What the four are is in ``configurations.py``; here they are run and checked.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minibatch import reference, workload
from minibatch.checks import check_float, check_int
from minibatch.configurations import Knobs
from minibatch.engine import Engine
from minibatch.kv_cache import KVCache
from minibatch.models import Model
from minibatch.plan import PlanError, Scheduler
from minibatch.policies import Order
from minibatch.request import EngineStalled, NeverFits, PromptTooLong, Request, Result
from minibatch.trace import Trace, counted


@dataclass(frozen=True, kw_only=True)
class Setup(Knobs):
    """What is compared, besides the knobs that a simulation has too.

    ``workload``     a set of prompts: see :func:`minibatch.workload.read_prompts`
    ``max_tokens``   most new tokens of a request; most answers end before
    ``load``         arrival rate, as a multiple of the rate at which requests can be served one after the other
    ``rate``         arrival rate in requests a second; None: ``load`` times what is measured here
    ``seed``         of the order of the prompts and of the gaps between arrivals
    ``clients``, ``priorities``  how many there are: see :func:`minibatch.workload.assign`
    ``kv_tokens``    KV budget in tokens, the same for all, rounded down to a multiple of the longest request; None:
                     four times the longest request
    """

    workload: str = "mixed"
    num_requests: int = 18
    max_tokens: int = 64
    load: float = 4.0
    rate: float | None = None
    seed: int = 0
    clients: int = 1
    priorities: int = 1
    kv_tokens: int | None = None
    max_num_seqs: int = 16
    token_budget: int = 128

    def __post_init__(self) -> None:
        """Raises ValueError for a number that makes no sense, or a policy that does not exist."""
        super().__post_init__()
        for name in ("num_requests", "max_tokens", "clients", "priorities"):
            check_int(name, getattr(self, name), 1)
        if self.kv_tokens is not None:
            check_int("kv_tokens", self.kv_tokens, 1)
        check_float("load", self.load, 0.0, math.inf, above=True)
        if self.rate is not None:
            check_float("rate", self.rate, 0.0, math.inf, above=True)


@dataclass(frozen=True)
class Run:
    """One configuration's run of the workload."""

    trace: Trace
    results: tuple[Result, ...]
    verdict: reference.Verdict


@dataclass(frozen=True)
class Comparison:
    """``rate``, requests a second; ``solo_seconds``, mean time of a request alone; ``prompts``, by request id, as text;
    ``runs``, by configuration."""

    setup: Setup
    kv_tokens: int
    kv_bytes: int
    rate: float
    solo_seconds: float
    prompts: dict[str, str]
    runs: dict[str, Run]

    @property
    def traces(self) -> dict[str, Trace]:
        return {name: run.trace for name, run in self.runs.items()}

    @property
    def holds(self) -> bool:
        """Whether every configuration gave the tokens of solo generation, up to numerical ties."""
        return all(run.verdict.holds for run in self.runs.values())


def run(model: Model, setup: Setup, progress: bool = True) -> Comparison:
    """Every request alone, then the four.

    Raises NeverFits if the budget cannot hold the longest request, PromptTooLong if the model's context cannot,
    PlanError or EngineStalled, with the name of the configuration, if a policy plans nonsense or nothing.
    """
    texts = workload.pick(workload.read_prompts(setup.workload), setup.num_requests, setup.seed)
    requests = workload.build(model.tokenizer, texts, setup.max_tokens)
    requests = workload.assign(requests, setup.clients, setup.priorities, setup.seed)
    longest = max(len(request.prompt) for request in requests) + setup.max_tokens
    if model.max_model_len is not None and longest > model.max_model_len:
        raise PromptTooLong(
            f"the longest prompt and its answer are {longest} tokens, the context {model.max_model_len}"
        )
    slot_size = -(-(longest - 1) // setup.block_size) * setup.block_size  # so that blocks and slots divide one budget
    kv_tokens = setup.kv_tokens or 4 * slot_size
    if kv_tokens < slot_size:
        raise NeverFits(f"the longest request needs {slot_size} tokens of cache, the budget is {kv_tokens}")
    kv_tokens -= kv_tokens % slot_size  # what makes no whole slot would be memory that only blocks can use
    parts = setup.configurations(kv_tokens, slot_size)
    with tqdm(total=(len(parts) + 1) * len(requests), unit="request", disable=not progress) as bar:
        bar.set_description(f"1/{len(parts) + 1} solo")
        solos = _solo_runs(model, requests, bar)
        solo_seconds = sum(s.seconds for s in solos.values()) / len(solos)
        rate = setup.rate or setup.load / solo_seconds
        arriving = workload.poisson(requests, rate, setup.seed)
        meta = _meta(model, setup, rate, kv_tokens)
        runs = {}
        for number, name in enumerate(parts, start=2):
            bar.set_description(f"{number}/{len(parts) + 1} {name}")
            runs[name] = _run(model, *parts[name], setup.make("order"), arriving, solos, {"name": name, **meta}, bar)
    prompts = {request.request_id: text for request, text in zip(requests, texts, strict=True)}
    return Comparison(setup, kv_tokens, kv_tokens * model.kv_bytes_per_token, rate, solo_seconds, prompts, runs)


def _solo_runs(model: Model, requests: Sequence[Request], bar: tqdm) -> dict[str, reference.Solo]:
    reference.solo(model, requests[0])  # once for nothing, so that no first-time cost is measured
    solos = {}
    for request in requests:
        solos[request.request_id] = reference.solo(model, request)
        bar.update()
    return solos


def _run(
    model: Model,
    scheduler: Scheduler,
    kv: KVCache,
    order: Order,
    requests: list[Request],
    solos: dict[str, reference.Solo],
    meta: dict[str, Any],
    bar: tqdm,
) -> Run:
    watched = reference.Watched(model)
    engine = Engine(watched, scheduler, kv, order=order, meta=meta)
    try:
        results = engine.run(requests, on_step=lambda report: bar.update(len(report.finished)))
    except (PlanError, EngineStalled) as error:
        raise type(error)(f"{meta['name']}: {error}") from error
    return Run(engine.trace, tuple(results), reference.judge(watched, requests, results, solos))


def _meta(model: Model, setup: Setup, rate: float, kv_tokens: int) -> dict[str, Any]:
    what = f"{setup.num_requests} {setup.workload} prompts, at most {setup.max_tokens} new tokens"
    groups = {"clients": setup.clients, "priorities": setup.priorities}
    what += "".join(f", {number} {name}" for name, number in groups.items() if number > 1)
    facts = {name: getattr(model, name) for name in ("source", "dtype", "device") if hasattr(model, name)}
    if getattr(model, "fused", None) is not None:
        facts["forward"] = "fast path"
    load = f"load {setup.load:g}: " if setup.rate is None else ""
    return {
        **{name: str(value) for name, value in facts.items()},
        "workload": f"{what}, Poisson arrivals ({load}{rate:.4g} requests/s)",
        "seed": setup.seed,
        "kv_budget": f"KV budget {kv_tokens} tokens",
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
    return name if torch is None else f"{name}, {counted(torch.get_num_threads(), 'thread')}"
