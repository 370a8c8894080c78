"""Is the simulation true? A cost model calibrated on this machine, and measured runs replayed with it.

The four configurations run the workload of ``compare`` for real, twice, the second time with other arrivals. The cost
model is fitted to the iterations of the first runs. Of the second, which it has not seen, its iterations are predicted
one by one, and then each run as a whole is simulated: the same requests, arrivals and answer lengths through the same
scheduler and cache. Errors of iterations could cancel in a run, or add up; so both are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from minibatch import bench, calibration, metrics, reference, workload
from minibatch.calibration import Errors
from minibatch.compare import Setup
from minibatch.configurations import CONFIGURATIONS
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.model_shapes import ModelShape
from minibatch.models import Model
from minibatch.open_loop import from_trace
from minibatch.request import Request
from minibatch.simulation import simulate
from minibatch.trace import Trace

REPLAYED = ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99")
SOLO = 3  # requests that are timed alone, to find the rate that this machine can take
LOAD = Setup(num_requests=12, max_tokens=48)


@dataclass(frozen=True)
class Fidelity:
    """``fitted``, ``held_out``  errors of iterations, of the first and the second runs
    ``measured``, ``simulated``  by configuration, seconds: the ``REPLAYED`` numbers of the second runs
    """

    cost: CostModel
    num_iterations: int
    rate: float
    fitted: Errors
    held_out: Errors
    measured: dict[str, dict[str, float]]
    simulated: dict[str, dict[str, float]]


def run(model: Model, setup: Setup = LOAD, progress: bool = True) -> Fidelity:
    """Measures, fits, predicts. Raises ValueError for a model whose clock is not real or whose shape is not known."""
    if not hasattr(model, "model"):
        raise ValueError(f"{model.name} takes no time of its own: calibrate on a model that computes")
    shape = replace(ModelShape.from_config(model.model.config), name=model.name)
    texts = workload.read_prompts(setup.workload)
    first, second = (
        workload.build(model.tokenizer, workload.pick(texts, setup.num_requests, seed), setup.max_tokens)
        for seed in (setup.seed, setup.seed + 1)
    )
    slot_size = max(len(request.prompt) for request in (*first, *second)) + setup.max_tokens
    slot_size = -(-slot_size // setup.block_size) * setup.block_size
    kv_tokens = setup.kv_tokens or 4 * slot_size
    reference.solo(model, first[0])  # once for nothing, so that no first-time cost is measured
    rate = setup.rate or setup.load * SOLO / sum(reference.solo(model, r).seconds for r in first[:SOLO])

    with tqdm(total=8 * setup.num_requests, unit="request", disable=not progress) as bar:

        def measure(name: str, requests: Sequence[Request], seed: int) -> Trace:
            scheduler, kv = setup.configuration(name, kv_tokens, slot_size)
            engine = Engine(model, scheduler, kv, order=setup.make("order"), meta={"name": name})
            engine.run(workload.poisson(requests, rate, seed), on_step=lambda report: bar.update(len(report.finished)))
            return engine.trace

        seen, unseen = {}, {}
        for name in CONFIGURATIONS:  # one after the other, for a machine's speed drifts
            seen[name] = measure(name, first, setup.seed)
            unseen[name] = measure(name, second, setup.seed + 1)
    cost = calibration.fit(_together(seen), shape)
    replays = {
        name: simulate(
            from_trace(trace), *setup.configuration(name, kv_tokens, slot_size), cost, order=setup.make("order")
        )
        for name, trace in unseen.items()
    }
    return Fidelity(
        cost,
        sum(trace.num_steps for trace in seen.values()),
        rate,
        calibration.held_out_error(cost, _together(seen)),
        calibration.held_out_error(cost, _together(unseen)),
        {name: _numbers(trace) for name, trace in unseen.items()},
        {name: _numbers(trace) for name, trace in replays.items()},
    )


def _together(traces: dict[str, Trace]) -> Trace:
    """The iterations of several runs, for a fit."""
    first, *_ = traces.values()
    return replace(first, steps=[step for trace in traces.values() for step in trace.steps])


def _numbers(trace: Trace) -> dict[str, float]:
    numbers = metrics.summary(trace)
    return {name: numbers[name] for name in REPLAYED}


def describe(found: Fidelity) -> str:
    """As text for a terminal."""
    gpu, cost = found.cost.gpu, found.cost
    lines = [
        f"cost model of {cost.model.name} on this machine, from {found.num_iterations:,} measured iterations",
        f"  memory {gpu.bandwidth / 1e9:.3g} GB/s, arithmetic {gpu.flops / 1e9:.4g} GFLOP/s, "
        f"sharpness {cost.efficiency.sharpness:.2f}",
        f"  besides {1e3 * cost.overhead:.3g} ms an iteration and {1e3 * cost.row_overhead:.3g} ms a sampled row",
        "",
        _errors("iterations it was fitted to", found.fitted),
        _errors("iterations held out", found.held_out),
        "",
        f"runs replayed (held out; {found.rate:.3g} requests/s): simulated, against measured, in seconds",
    ]
    rows = [
        [
            name,
            *(
                f"{found.simulated[name][n]:.3g} / {found.measured[name][n]:.3g} ({_off(found, name, n):+.0%})"
                for n in REPLAYED
            ),
        ]
        for name in found.measured
    ]
    return "\n".join(
        [*lines, bench.table(["", *(n.replace("_p", " P").replace("ttft", "TTFT") for n in REPLAYED)], rows)]
    )


def _errors(what: str, errors: Errors) -> str:
    return f"{what:<28}off by {errors.mean:.1%} on average, median {errors.median:.1%}; in total {errors.total:+.1%}"


def _off(found: Fidelity, name: str, number: str) -> float:
    return found.simulated[name][number] / found.measured[name][number] - 1
