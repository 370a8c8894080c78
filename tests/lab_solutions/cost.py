"""Lab cost."""

from __future__ import annotations

import numpy as np

from lab_solutions import Wrong
from minibatch.calibration import FEWEST, _check_enough, _search
from minibatch.cost_model import Counts, _beyond
from minibatch.gpus import Efficiency, smooth_max

# ---------------------------------------------------------------- cost.1


def _of(attended=None, kv_read=None, logits=None, swaps=None):
    """``Counts.of`` in closed forms, with some count of another opinion."""

    def of(cls, plan, window=None):
        window = window or 10**9
        tokens = heads = read = pairs = 0
        for request, start, stop in plan.chunks:
            tokens += stop - start
            heads += logits(request, stop) if logits else stop == request.num_tokens
            read += kv_read(start, stop, window) if kv_read else stop - max(0, start + 1 - window)
            pairs += attended(start, stop, window) if attended else _pairs(start, stop, window)
        swapped = sum(a.request.num_computed for a in plan.admissions if not a.cached)
        swapped += sum(p.request.num_computed for p in plan.preemptions if p.swap or swaps)
        pads = sum(p.num_tokens for p in plan.padding)
        dead = sum(p.num_tokens for p in plan.padding if p.dead)
        return cls(tokens + pads, heads + dead, read, tokens, pairs, swapped)

    return type("Counts", (), {"of": classmethod(of)})


def _pairs(start, stop, window):
    return sum(min(position + 1, window) for position in range(start, stop))


def _by_sets(cls, plan, window=None):
    seen = {}
    for request, start, stop in plan.chunks:
        for query in range(start, stop):
            first = query + 1 - window if window and query + 1 > window else 0
            seen[request.request_id, query] = {(request.request_id, key) for key in range(first, query + 1)}
    padding = [pad for pad in plan.padding for _ in range(pad.num_tokens)]
    moved = [p.request for p in plan.preemptions if p.swap] + [a.request for a in plan.admissions if not a.cached]
    return Counts(
        tokens=len(seen) + len(padding),
        logits=len([c for c in plan.chunks if c.samples]) + len([pad for pad in padding if pad.dead]),
        kv_read=len(set().union(*seen.values())),
        kv_written=len(seen),
        attended=sum(len(keys) for keys in seen.values()),
        swapped=sum(request.num_computed for request in moved),
    )


def _by_arrays(cls, plan, window=None):
    spans = np.array([(start, stop, stop == request.num_tokens) for request, start, stop in plan.chunks]).reshape(-1, 3)
    start, stop, samples = spans.T
    pads = np.array([(p.num_tokens, p.num_tokens * p.dead) for p in plan.padding]).reshape(-1, 2).sum(axis=0)
    unread, unseen = _beyond(spans[:, :2].tolist(), window) if window else (0, 0)
    triangle = (stop * (stop + 1) - start * (start + 1)) // 2
    moved = [p.request.num_computed * p.swap for p in plan.preemptions]
    moved += [0 if a.cached else a.request.num_computed for a in plan.admissions]
    written = (stop - start).sum()
    numbers = written + pads[0], samples.sum() + pads[1], stop.sum() - unread, written, triangle.sum() - unseen
    return cls(*map(int, numbers), sum(moved))


# ---------------------------------------------------------------- cost.2


def _fit(size=2, operations=2, together=smooth_max, error=None, result=lambda *found: found):
    """``fit_linear`` with one thing of another opinion."""

    def fit_linear(tokens, weights, seconds, gpu):
        tokens, weights, seconds = (np.asarray(column, dtype=float) for column in (tokens, weights, seconds))
        _check_enough(len(set(zip(tokens, weights, strict=True))), seconds)

        def loss(bandwidth, compute, sharpness):
            read = size * weights / (bandwidth * gpu.bandwidth)
            computed = operations * weights * tokens / (compute * gpu.flops)
            predicted = together(read, computed, sharpness)
            return float(np.mean(error(predicted, seconds) if error else np.abs(predicted / seconds - 1)))

        return Efficiency(*result(*_search(loss, [(0.7, 0.7, sharpness) for sharpness in (1.2, 2.0, 4.0)])))

    return fit_linear


def _fit_of_rates(tokens, weights, seconds, gpu):
    """The same search, over times of a weight and of a weight and token, and of logarithms."""
    loads = sorted(set(zip(tokens, weights, strict=True)))
    if len(loads) < FEWEST or not all(0 < second < float("inf") for second in seconds):
        raise ValueError("too few measurements, or times that are none")
    tokens, weights, measured = np.array(tokens), np.array(weights), np.log(seconds)

    def loss(read, computed, sharpness):
        predicted = weights * ((read**sharpness + (tokens * computed) ** sharpness) ** (1 / sharpness))
        return float(np.abs(np.log(predicted * 1e-12) - measured).mean())

    typical = [2e12 / gpu.bandwidth, 2e12 / gpu.flops]
    read, computed, sharpness = _search(loss, [(*typical, sharp) for sharp in (1.3, 3.0)])
    return Efficiency(typical[0] / read, typical[1] / computed, sharpness)


WRONG = {
    "cost.1": [
        Wrong(
            "every query sees every key", _of(attended=lambda start, stop, window: (stop - start) * stop), "a triangle"
        ),
        Wrong(
            "every query reads its context again",
            _of(kv_read=lambda start, stop, window: _pairs(start, stop, window)),
            "once for all its queries",
        ),
        Wrong("every chunk is sampled from", _of(logits=lambda request, stop: 1), "skips the head"),
        Wrong(
            "a chunk reads one window",
            _of(kv_read=lambda start, stop, window: min(stop, window)),
            "see different windows",
        ),
        Wrong("every victim's K/V are moved", _of(swaps=True), "its K/V are dropped"),
    ],
    "cost.2": [
        Wrong("a weight is a byte", _fit(size=1), "is 2 bytes"),
        Wrong("the shares in the other order", _fit(result=lambda b, c, s: (c, b, s)), "The first share"),
        Wrong("the longer time is the time", _fit(together=lambda a, b, _: np.maximum(a, b)), "overlap only in part"),
        Wrong("squares of the errors", _fit(error=lambda p, s: (p / s - 1) ** 2), "not squared"),
        Wrong("errors in seconds", _fit(error=lambda p, s: np.abs(p - s)), "not in seconds"),
    ],
}
RIGHT = {
    "cost.1": [
        type("Counts", (), {"of": classmethod(_by_sets)}),
        type("Counts", (), {"of": classmethod(_by_arrays)}),
    ],
    "cost.2": [_fit_of_rates],
}
