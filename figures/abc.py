"""The example of the seed text as a picture: A, B and C decode for 18, 73 and 141 iterations. Simulated, toy model.

.venv/bin/python figures/abc.py
"""

from pathlib import Path

from minibatch import ContiguousKVCache, ContinuousBatching, Engine, Request, SamplingParams, StaticBatching, ToyModel
from minibatch.plots import compare_figures

DECODES = {"A": 18, "B": 73, "C": 141}  # after the token that the prefill emits
QUEUED = {"D": 60, "E": 90, "F": 30}


def run(scheduler, decodes):
    requests = [Request([1, 2, 3], SamplingParams(max_tokens=n + 1), request_id=name) for name, n in decodes.items()]
    engine = Engine(ToyModel(), scheduler, ContiguousKVCache(num_slots=3, slot_size=160), meta={"workload": "A, B, C"})
    engine.run(requests)
    return engine.trace


def main() -> None:
    traces = {
        "static": run(StaticBatching(3), DECODES),
        "continuous, nothing queued": run(ContinuousBatching(3), DECODES),
        "static, D to F queued": run(StaticBatching(3), DECODES | QUEUED),
        "continuous, D to F queued": run(ContinuousBatching(3), DECODES | QUEUED),
    }
    compare_figures(traces)["membership"].savefig(Path(__file__).with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
