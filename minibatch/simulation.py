"""Runs a workload on a virtual clock: the same engine, with an executor that computes no tokens.

trace = simulate(workload, ChunkedPrefill(), PagedKVCache(7000), CostModel(MODELS["llama-2-7b"], GPUS["a100-80"]))
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    check_plans: bool = True,
    meta: dict[str, Any] | None = None,
) -> Trace:
    """The trace of one run of the workload; light, unless ``record_steps``. Options are those of the engine.

    ``duration``  seconds of an iteration: usually a :class:`~minibatch.cost_model.CostModel`
    """
    engine = Engine(
        SimulatedModel(duration, max_model_len),
        scheduler,
        kv_cache,
        order=order,
        meta={**workload.meta, **(meta or {})},
        record_steps=record_steps,
        check_plans=check_plans,
    )
    with _rare_collections():
        engine.run(workload.requests, on_finish=workload.next)
    return engine.trace


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A simulation makes millions of objects and hardly a cycle: the garbage collector, which by default looks after
    every 700 new ones, would find nothing, and take a tenth of the time for it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
