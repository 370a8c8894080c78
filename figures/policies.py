"""One mechanism, three sets of policies, the same requests: what changes is who waits. Simulated, toy model.

.venv/bin/python figures/policies.py
"""

import random
from pathlib import Path

from minibatch import ChunkedPrefill, Engine, PagedKVCache, PrefixCachedKVCache, Request, SamplingParams, ToyModel
from minibatch.plots import compare_figures
from minibatch.policies import FCFS, Priority, Recompute, Swap, by_priority, lowest_priority

COMMON = list(range(12))  # all prompts begin with it: three blocks
URGENT = 6


def requests():
    rng = random.Random(2)
    for i in range(9):
        params = SamplingParams(max_tokens=rng.randint(6, 14), n=2 if i == 3 else 1, temperature=1.0, seed=i)
        prompt = COMMON + [100 + i] * rng.randint(1, 8)
        yield Request(prompt, params, f"r{i}", arrival_time=2.0 * i, priority=int(i != URGENT))


def run(preemption, kv, order):
    engine = Engine(
        ToyModel(),
        ChunkedPrefill(token_budget=12, max_num_seqs=5, preemption=preemption),
        kv,
        order=order,
        meta={"workload": "9 requests with a common beginning, r3 has two answers, r6 is urgent", "seed": 2},
    )
    engine.run(list(requests()))
    return engine.trace


def main() -> None:
    swap = Swap(victim=lowest_priority, displaces=by_priority, host_tokens=40)
    traces = {
        "FCFS, recompute": run(Recompute(), PagedKVCache(14, 4), FCFS()),
        "FCFS, recompute, prefix cache": run(Recompute(), PrefixCachedKVCache(14, 4), FCFS()),
        "priority, swap, prefix cache": run(swap, PrefixCachedKVCache(14, 4), Priority()),
    }
    compare_figures(traces)["membership"].savefig(Path(__file__).with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
