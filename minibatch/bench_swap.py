"""``minibatch bench --swap``: from which length on is it cheaper to copy K/V to the host and back than to compute it
again?

Preemption has both ways (vLLM: Kwon et al., SOSP 2023, sections 4.5 and 7.3). A swap moves every byte twice and
computes nothing; a recomputation is one prefill, of which the weights are read once, however short it is. Which of them
is cheaper depends on the length and on the machine, so it is measured here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from minibatch.bench import Times, table, timed
from minibatch.checks import check_int
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.models import Model
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Chunk, Plan
from minibatch.request import Request, RequestState, SamplingParams

BLOCK = 16


@dataclass(frozen=True)
class Length:
    """A context of ``tokens`` tokens, and how long it takes to have its K/V back.

    ``recompute``  one prefill of it, without logits
    ``swap``       its ``kv_bytes`` to the host, and back
    ``decode``     one token more, alone: what an iteration takes at the least
    """

    tokens: int
    kv_bytes: int
    recompute: Times
    swap: Times
    decode: Times


@dataclass(frozen=True)
class Line:
    """``start + per_token * tokens`` ms."""

    start: float
    per_token: float


@dataclass(frozen=True)
class BreakEven:
    """``short`` and ``long``: what is cheaper for the shortest and for the longest context measured, ``swap`` or
    ``recompute``. ``changes``: how often the cheaper one changes in between; if once, at ``tokens``."""

    short: str
    long: str
    tokens: float | None
    changes: int


@dataclass(frozen=True)
class Swapping:
    model: str
    dtype: str
    device: str
    lengths: tuple[Length, ...]
    recompute: Line
    swap: Line
    break_even: BreakEven


def run(model: Model, longest: int = 1024, repeats: int = 7, progress: bool = True) -> Swapping:
    """Lengths from a block to ``longest``, each twice the one before, as far as the model's context goes.

    Raises ValueError for a model that does not compute, or whose context is shorter than a block.
    """
    check_int("longest", longest, BLOCK)
    check_int("repeats", repeats, 1)
    if model.clock().kind != "real":
        raise ValueError(f"{model.name} computes nothing, so its times say nothing: give a model that does, by --model")
    most = longest if model.max_model_len is None else min(longest, model.max_model_len - 1)
    sizes = [BLOCK << i for i in range(most.bit_length()) if BLOCK << i <= most]
    if not sizes:
        raise ValueError(f"{model.name} has a context of {model.max_model_len} tokens: nothing to measure")
    lengths = _measure(model, sizes, repeats, progress)
    recompute, swap = ([getattr(one, what).median for one in lengths] for what in ("recompute", "swap"))
    facts = (model.name, getattr(model, "dtype", "?"), str(getattr(model, "device", "?")))
    found = break_even(sizes, recompute, swap)
    return Swapping(*facts, lengths, fit(sizes, recompute), fit(sizes, swap), found)


def _measure(model: Model, sizes: Sequence[int], repeats: int, progress: bool) -> tuple[Length, ...]:
    """In rounds, so that what slows the machine down for a while slows all lengths down alike."""
    engine = _engine(model, sizes)
    seconds: dict[tuple[int, str], list[float]] = {}
    order = random.Random(0)
    for number in tqdm(range(1 + repeats), desc="swap", disable=not progress):
        for state in order.sample(engine.active, len(sizes)):
            for name, job in _jobs(engine, state).items():
                spent = timed(lambda job=job: (job(), _wait_for(model)))[0]
                if number:  # the first round warms up
                    seconds.setdefault((state.num_computed, name), []).append(spent)
    size = model.kv_bytes_per_token
    jobs = ("recompute", "swap", "decode")
    return tuple(Length(n, n * size, *(Times.of(seconds[n, name]) for name in jobs)) for n in sizes)


def _engine(model: Model, sizes: Sequence[int]) -> Engine:
    """Its active requests have contexts of these sizes, and a pending token each."""
    scheduler = ContinuousBatching(len(sizes), sum(sizes) + len(sizes))
    engine = Engine(model, scheduler, PagedKVCache(sum(size // BLOCK + 1 for size in sizes), BLOCK))
    rng = random.Random(0)
    for size in sizes:
        prompt = [rng.randrange(model.vocab_size) for _ in range(size)]
        engine.submit(Request(prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
    engine.step()
    for state in engine.active:
        engine.kv.reserve(state, state.num_tokens)
    return engine


def _jobs(engine: Engine, state: RequestState) -> dict[str, Callable[[], Any]]:
    size, kv, store = state.num_computed, engine.kv, engine.store
    again, newest = (Plan(chunks=(Chunk(state, *span),)) for span in ((0, size), (size, size + 1)))

    def swap() -> None:
        store.swap_out(state, kv.rows(state, 0, size))
        store.swap_in(state, kv.rows(state, 0, size))

    return {
        "recompute": lambda: engine.model.forward(again, kv, store),
        "swap": swap,
        "decode": lambda: engine.model.forward(newest, kv, store),
    }


def _wait_for(model: Model) -> None:
    """A GPU has been told what to do, and has not done it yet."""
    device = getattr(model, "device", None)
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


# --------------------------------------------------------------------------------------------------------- arithmetic


def fit(sizes: Sequence[float], times: Sequence[float]) -> Line:
    """The line with the least squared *relative* errors: else the longest contexts alone would decide."""
    if len(sizes) == 1:
        return Line(0.0, times[0] / sizes[0])
    per_token, start = np.polyfit(sizes, times, 1, w=1 / np.asarray(times))
    return Line(float(start), float(per_token))


def break_even(sizes: Sequence[int], recompute: Sequence[float], swap: Sequence[float]) -> BreakEven:
    """From two sizes between which the cheaper one changes, by a straight line."""
    lead = np.subtract(recompute, swap)  # above 0: a swap is cheaper
    changes = [i for i in range(1, len(sizes)) if (lead[i] > 0) != (lead[i - 1] > 0)]
    first, last = ("swap" if one > 0 else "recompute" for one in (lead[0], lead[-1]))
    if len(changes) != 1:
        return BreakEven(first, last, None, len(changes))
    (low, high), (before, after) = ((each[changes[0] - 1], each[changes[0]]) for each in (sizes, np.abs(lead)))
    return BreakEven(first, last, float(low + (high - low) * before / (before + after)), 1)


# ------------------------------------------------------------------------------------------------------------ in words


def describe(swapping: Swapping) -> str:
    count = swapping.lengths[0].swap.count
    titles = ("tokens", "MiB", "recompute ms", "(10-90 %)", "swap ms", "(10-90 %)", "ratio", "decode ms", "swap/decode")
    return "\n".join(
        [
            f"swap        {swapping.model}, {swapping.dtype}, {swapping.device}; medians of {count}, in turns",
            "            MiB: K/V of the context, which a swap moves twice. decode: an iteration of one request",
            "",
            table(titles, map(_row, swapping.lengths)),
            "",
            f"recompute   {_line(swapping.recompute, [(x.tokens, x.recompute.median) for x in swapping.lengths])}",
            f"swap        {_line(swapping.swap, [(x.tokens, x.swap.median) for x in swapping.lengths])}",
            f"break-even  {_verdict(swapping)}",
        ]
    )


def _row(length: Length) -> list[str]:
    again, swap, decode = length.recompute, length.swap, length.decode
    return [
        f"{length.tokens:,}",
        f"{length.kv_bytes / 2**20:.2f}",
        f"{again.median:.2f}",
        f"{again.p10:.2f}-{again.p90:.2f}",
        f"{swap.median:.2f}",
        f"{swap.p10:.2f}-{swap.p90:.2f}",
        f"{again.median / swap.median:.1f}",
        f"{decode.median:.2f}",
        f"{swap.median / decode.median:.0%}",
    ]


def _line(line: Line, measured: Sequence[tuple[int, float]]) -> str:
    """The fitted line, unless the points do not lie on one."""
    off = {tokens: ms / (line.start + line.per_token * tokens) for tokens, ms in measured}
    worst = max(off, key=lambda tokens: abs(np.log(max(off[tokens], 1e-9))))
    if not 0.67 <= off[worst] <= 1.5:
        return f"no straight line: at {worst:,} tokens measured {off[worst]:.2g} times what one would say"
    factor = max(off[worst], 1 / off[worst])
    return f"{line.start:.3g} ms + {1000 * line.per_token:.3g} us a token (within a factor of {factor:.2g})"


def _verdict(swapping: Swapping) -> str:
    found, name = swapping.break_even, {"swap": "swapping", "recompute": "recomputing"}
    measured = f"{swapping.lengths[0].tokens:,} to {swapping.lengths[-1].tokens:,} tokens"
    if found.tokens is not None:
        text = (
            f"{name[found.short]} is cheaper up to about {found.tokens:,.0f} tokens, {name[found.long]} from there on"
        )
    elif found.changes:
        text = f"not clear: from {measured} the cheaper one changes {found.changes} times; try more --repeats"
    else:
        text = f"{name[found.short]} is cheaper from the first block on, at every length measured ({measured})"
    if swapping.device == "cpu":
        text += "\n            (host and device are the same memory here; on a GPU the copies cross the bus)"
    return text
