"""Runs a workload on a virtual clock: the same engine, with an executor that computes no tokens.

trace = simulate(workload, ChunkedPrefill(), PagedKVCache(7000), CostModel(MODELS["llama-2-7b"], GPUS["a100-80"]))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minibatch.engine import Engine
from minibatch.kv_cache import KVCache
from minibatch.models.simulated_model import SimulatedModel
from minibatch.plan import Plan, Scheduler
from minibatch.policies.queueing import Order
from minibatch.trace import Trace
from minibatch.workloads import Workload


def simulate(
    workload: Workload,
    scheduler: Scheduler,
    kv_cache: KVCache,
    duration: Callable[[Plan], float],
    *,
    order: Order | None = None,
    max_model_len: int | None = None,
    record_steps: bool = False,
    meta: dict[str, Any] | None = None,
) -> Trace:
    """The trace of one run of the workload; light, unless ``record_steps``.

    ``duration``  seconds of an iteration: usually a :class:`~minibatch.cost_model.CostModel`
    """
    engine = Engine(
        SimulatedModel(duration, max_model_len),
        scheduler,
        kv_cache,
        order=order,
        meta={**workload.meta, **(meta or {})},
        record_steps=record_steps,
    )
    engine.run(workload.requests, on_finish=workload.next)
    return engine.trace
