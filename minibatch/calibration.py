"""From measured times to a cost model: which rates explain them?

The cost model has few unknowns: the rates at which memory is read and arithmetic is done, how sharp the corner between
them is, and the time that goes by beside. What is minimised is the mean absolute *relative* error: a decode of one
request counts as much as a long prefill, and the few iterations that something else on the machine has slowed down
count little (absolute values follow the many, as a median does).

Often the times cannot tell reading the weights from overhead: both are the same in every iteration. Then it counts as
reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from minibatch.cost_model import CostModel, Counts
from minibatch.gpus import GPU, Efficiency, smooth_max
from minibatch.model_shapes import ModelShape
from minibatch.trace import Trace

FEWEST = 12  # distinct measurements: a few for each unknown
SHARPEST = 20.0  # beyond, a corner is as good as sharp
RELUCTANCE = 0.01  # to call time overhead: so small that it decides only where the times do not


class Errors(NamedTuple):
    """Relative errors of predicted times: mean and median over iterations, without sign; and of their sum, with it."""

    mean: float
    median: float
    total: float


def fit(trace: Trace, model: ModelShape, gpu: GPU | None = None) -> CostModel:
    """A cost model that explains how long the iterations of a trace took.

    ``model``  what the trace was recorded with; the bytes of a value follow from the trace's ``kv_bytes_per_token``
    ``gpu``    what it was recorded on: its peaks stay, its efficiency is fitted. None: "this machine", of which the
               rates themselves are fitted, and the memory is not known

    For several runs, put their ``steps`` into one trace. Raises ValueError if there are no steps, fewer than ``FEWEST``
    distinct ones, or the K/V are not those of ``model``; and if the rates are above twice the peaks of ``gpu``.
    """
    counts, seconds = _measured(trace, model)
    size = _bytes_per_value(trace, model)
    _check_enough(len(set(zip(*counts, strict=True))), seconds)

    def cost(bandwidth: float, flops: float, sharpness: float, overhead: float, row_overhead: float) -> CostModel:
        machine = GPU("this machine", flops, bandwidth, 0, bandwidth, bandwidth, Efficiency(1.0, 1.0, sharpness))
        return CostModel(model, machine, bytes_per_value=size, overhead=overhead, row_overhead=row_overhead)

    def loss(*parameters: float) -> float:
        candidate = cost(*parameters)
        error = np.mean(np.abs(candidate.seconds(counts) / seconds - 1))
        return float(error + RELUCTANCE * candidate.overhead / np.median(seconds))

    fastest = seconds.min()
    bandwidth = model.num_parameters * size / fastest
    flops = np.max(2 * model.num_layers * model.layer_parameters * counts.tokens / seconds)
    starts = [(bandwidth, flops, sharpness, fastest / 10, fastest / 100) for sharpness in (1.2, 2.0, 4.0)]
    found = cost(*_search(loss, starts))
    return found if gpu is None else _on(found, gpu)


def _on(cost: CostModel, gpu: GPU) -> CostModel:
    """The same rates, as shares of a GPU's peaks."""
    shares = cost.gpu.bandwidth / gpu.bandwidth, cost.gpu.flops / gpu.flops
    try:
        return replace(cost, gpu=gpu, efficiency=Efficiency(*shares, cost.efficiency.sharpness))
    except ValueError as error:
        raise ValueError(f"these times are not of one {gpu.name}, or do not determine its rates: {error}") from error


def fit_linear(tokens: Sequence[float], weights: Sequence[float], seconds: Sequence[float], gpu: GPU) -> Efficiency:
    """The efficiency that explains how long 16-bit linear layers took on a GPU.

    ``[n]`` each: tokens that went through, weights of the layers, seconds. Raises ValueError for fewer than ``FEWEST``
    distinct measurements, or times that are not positive.
    """
    tokens, weights, seconds = (np.asarray(column, dtype=float) for column in (tokens, weights, seconds))
    _check_enough(len(set(zip(tokens, weights, strict=True))), seconds)

    def loss(bandwidth: float, compute: float, sharpness: float) -> float:
        read = 2 * weights / (bandwidth * gpu.bandwidth)
        computed = 2 * weights * tokens / (compute * gpu.flops)
        return float(np.mean(np.abs(smooth_max(read, computed, sharpness) / seconds - 1)))

    return Efficiency(*_search(loss, [(0.7, 0.7, sharpness) for sharpness in (1.2, 2.0, 4.0)]))


def held_out_error(cost: CostModel, trace: Trace) -> Errors:
    """How far a cost model is off on a trace, best one that it was not fitted to. Raises ValueError without steps."""
    counts, seconds = _measured(trace, cost.model)
    predicted = cost.seconds(counts)
    errors = np.abs(predicted / seconds - 1)
    return Errors(float(errors.mean()), float(np.median(errors)), float(predicted.sum() / seconds.sum() - 1))


def _measured(trace: Trace, model: ModelShape) -> tuple[Counts, np.ndarray]:
    """What the iterations of a trace computed, one array ``[steps]`` a count, and how long they took."""
    if not trace.steps:
        raise ValueError(f"a trace of {trace.num_steps} iterations without step reports: record it with record_steps")
    counts = np.array([Counts.of_step(step, model.sliding_window) for step in trace.steps], dtype=float)
    seconds = np.array([step.end - step.start for step in trace.steps])
    _check_positive(seconds)
    return Counts(*counts.T), seconds


def _check_positive(seconds: np.ndarray) -> None:
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError(f"times must be positive, got {seconds.min()} to {seconds.max()} s")


def _check_enough(distinct: int, seconds: np.ndarray) -> None:
    if distinct < FEWEST:
        raise ValueError(f"{distinct} distinct measurements; a fit needs {FEWEST}, of short and of long work")
    _check_positive(seconds)


def _bytes_per_value(trace: Trace, model: ModelShape) -> int:
    """From the K/V of one token, which trace and model both know."""
    stored = trace.meta.get("kv_bytes_per_token", 0)
    size, rest = divmod(stored, model.kv_values_per_token)
    if rest or size not in (1, 2, 4, 8):
        ours = f"{model.kv_bytes_per_token(2):,} in 16 and {model.kv_bytes_per_token(4):,} in 32 bits"
        raise ValueError(f"{model.name} caches {ours} a token, the trace's {trace.meta.get('model')} {stored:,} bytes")
    return size


def _search(loss: Callable[..., float], starts: list[tuple[float, ...]]) -> list[float]:
    """The positive parameters, the third of them a sharpness, with the least ``loss(*parameters)``.

    They differ by many powers of ten, so the search is over their logarithms.
    """

    from scipy.optimize import minimize  # here, because it takes a second to import

    def parameters(point: np.ndarray) -> np.ndarray:
        values = np.exp(np.clip(point, -60.0, 60.0))
        values[2] = min(1 + values[2], SHARPEST)
        return values

    def at(point: np.ndarray) -> float:
        return loss(*parameters(point).tolist())

    ends = []
    for start in starts:
        point = np.log([value - (index == 2) for index, value in enumerate(start)])
        for _ in range(4):  # a simplex can collapse on the way: begin anew where it is
            simplex = [point, *(point + 0.5 * axis for axis in np.eye(len(point)))]
            options = {"initial_simplex": simplex, "maxiter": 600, "fatol": 1e-12, "xatol": 1e-9}
            point = minimize(at, point, method="Nelder-Mead", options=options).x
        ends.append(point)
    return parameters(min(ends, key=at)).tolist()
