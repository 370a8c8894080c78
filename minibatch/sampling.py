"""From logits to one token a request; nothing that happens to one row can reach another.

A sampler that treats the batch as one tensor needs every penalty, bias and seed as a tensor too, lined up with the
rows; when a request leaves, all of them have to move together, and a server that forgets one applies it to the wrong
request. Here a row is a pure function of (its logits, its parameters, its tokens, its seed). Only rows that want the
most likely token of the logits as they are share an operation: one argmax for all of them.

The steps of a row are those of vLLM V1 (documented on its ``Sampler`` class):

    logit bias, mask of ``min_tokens`` -> repetition, frequency, presence penalty -> the most likely id if
    ``temperature`` is 0, else temperature -> min_p -> top_k -> top_p -> draw

Reported log-probabilities are those of the model, before all that (vLLM's default, ``raw_logprobs``). Differences:

* vLLM masks before it adds the bias. The bias is finite, so the order makes no difference.
* vLLM raises temperatures below 0.01 to 0.01, so as not to overflow. Here they are what they say.
* Ids that tie for the last place of ``top_k`` or ``top_p`` are taken from the lowest id; vLLM keeps all for ``top_k``.
* vLLM draws with exponential noise for each id, from a generator with a state. Here one uniform number is looked up
  in the cumulative distribution. It comes from Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
  SC 2011), which has no state: number ``i`` of a seed is *computed* from (seed, i). A request that was chunked,
  preempted or moved between rows draws the same numbers, because there is nothing that could get out of step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minibatch.request import RequestState, SamplingParams


class SamplingError(RuntimeError):
    """No token can be taken from a row: its logits are not numbers, or every id is banned.

    ``request_id`` says whose row it is. Sampling changes nothing, so the engine can end that one request and sample the
    other rows again: they get the same tokens.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id}: {reason}")
        self.request_id = request_id


class Sample(NamedTuple):
    """A token; with ``logprobs=k`` also its log-probability, and in ``top`` those of the k most likely ids, most
    likely first, and of the token itself."""

    token: int
    logprob: float | None = None
    top: dict[int, float] | None = None


Outcome = Sample | SamplingError | int  # of a request that was to get a token; an int from a simulated model


def token_of(outcome: Outcome | None) -> int | None:
    """The token that a request was given, None if it was given none."""
    return getattr(outcome, "token", outcome if isinstance(outcome, int) else None)


def sample(logits: Any, requests: Sequence[RequestState]) -> list[Sample]:
    """The next token of each request; row i of ``logits`` ``[R, vocab]`` (numpy or torch) is that of ``requests[i]``.

    Raises SamplingError for the first row from which nothing can be taken. Changes neither logits nor requests.
    """
    if len(logits) != len(requests):
        raise ValueError(f"{len(logits)} rows of logits for {len(requests)} requests")
    logits = _view(logits)
    plain = [_is_plain(request) for request in requests]
    best = _greedy(logits) if any(plain) else []
    samples = []
    for i, request in enumerate(requests):
        if not plain[i]:
            samples.append(_sample_row(_host_row(logits[i]), request))
            continue
        token, logit = best[i]
        _require_finite(logit, request)
        samples.append(Sample(token))
    return samples


def prompt_logprobs(logits: Any, tokens: Sequence[int], k: int) -> list[Sample]:
    """Scores a text: ``tokens[i]`` is what really followed row i of ``logits`` ``[len(tokens), vocab]``.

    A row with NaN or +inf has no distribution: its log-probabilities are NaN. Scoring decides nothing, so it refuses
    nothing.
    """
    if len(logits) != len(tokens):
        raise ValueError(f"{len(logits)} rows of logits for {len(tokens)} tokens")
    logits = _view(logits)
    return [_scored(_host_row(logits[i]), token, k) for i, token in enumerate(tokens)]


def uniform(seed: int, index: int) -> float:
    """Random number ``index`` of a request, in [0, 1): a function of its arguments and of nothing else."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128, counter=index)).random()


def weights_to_draw(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """How likely each id is to be drawn: the most likely 1, those that cannot be drawn 0.

    ``logits`` float64 ``[vocab]``, penalties applied; ``temperature > 0``.
    """
    with np.errstate(over="ignore", under="ignore"):
        # The best at 0 before the division: a tiny temperature sends the others to -inf, and nothing to +inf or NaN.
        weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p] = 0.0
    if params.top_k > 0:
        weights[~_best(logits, params.top_k)] = 0.0
    if params.top_p < 1:
        # All ids rarer than ``rare`` together hold less than half of 1 - top_p: no need to sort those.
        total = weights.sum()
        rare = 0.5 * (1 - params.top_p) * total / len(weights)
        mass = np.cumsum(np.sort(weights[weights > rare])[::-1])
        count = 1 + np.searchsorted(mass, params.top_p * total)  # as few as reach the mass
        weights[~_best(logits, count)] = 0.0
    return weights


# --- rows that take the most likely token as it is --------------------------------------------------------------------


def _is_plain(request: RequestState) -> bool:
    """Whether the request wants the argmax of the model's own logits, and nothing besides."""
    p = request.params
    penalised = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
    changed = penalised or bool(p.logit_bias) or _is_masked(request)
    return p.temperature == 0 and p.logprobs is None and not changed


def _greedy(logits: Any) -> list[tuple[int, float]]:
    """(id, logit) of the most likely id of each row; the lowest id on a tie, in numpy as in torch.

    An argmax takes NaN for the largest of all, so this logit tells of any NaN or +inf in the row: no second pass.
    """
    ids = logits.argmax(-1).tolist()
    return list(zip(ids, logits[list(range(len(ids))), ids].tolist(), strict=True))


# --- rows that are treated alone --------------------------------------------------------------------------------------


def _sample_row(row: np.ndarray, request: RequestState) -> Sample:
    """One token from one float64 row, which is used up."""
    k = request.params.logprobs
    raw = None if k is None else row.copy()
    _process(row, request)
    _require_finite(row.max(), request)
    token = _choose(row, request)
    return Sample(token) if raw is None else _scored(raw, token, k)


def _process(row: np.ndarray, request: RequestState) -> None:
    """Bias, mask and penalties, in place. A banned id (-inf) stays banned: everything that is added is finite."""
    params = request.params
    with np.errstate(over="ignore"):
        for token, bias in params.logit_bias.items():
            row[token] += bias
        if _is_masked(request):
            row[list(request.stop_token_ids)] = -np.inf
        if params.repetition_penalty != 1:
            seen = np.zeros(len(row), dtype=bool)  # marks: a token that was seen twice is penalised once
            seen[np.asarray(request.prompt, dtype=np.int64)] = True
            seen[np.asarray(request.generated, dtype=np.int64)] = True
            logits = row[seen]
            row[seen] = np.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            ids, counts = np.unique(np.asarray(request.generated, dtype=np.int64), return_counts=True)
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _is_masked(request: RequestState) -> bool:
    """Whether the ids that end the request are banned, because it is still too short."""
    return len(request.generated) < request.params.min_tokens and bool(request.stop_token_ids)


def _choose(row: np.ndarray, request: RequestState) -> int:
    """Greedy, or the draw that belongs to this place in this request: the first id whose cumulative weight is above."""
    if request.params.temperature == 0:
        return int(row.argmax())
    mass = np.cumsum(weights_to_draw(row, request.params))
    point = uniform(request.seed, len(request.generated)) * mass[-1]  # below mass[-1]: uniform is at most 1 - 2**-53
    return int(np.searchsorted(mass, point, side="right"))


# --- helpers ----------------------------------------------------------------------------------------------------------


def _scored(row: np.ndarray, token: int, k: int) -> Sample:
    """The token with log-softmax of the float64 row, at itself and at the k most likely ids."""
    with np.errstate(invalid="ignore", under="ignore"):
        shifted = row - row.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
    best = np.flatnonzero(_best(logprobs, k))
    top = [*best[np.argsort(-logprobs[best], kind="stable")].tolist(), token]
    return Sample(token, float(logprobs[token]), {i: float(logprobs[i]) for i in top})


def _best(values: np.ndarray, k: int) -> np.ndarray:
    """Marks the k largest values; of those that tie for the last place, the first.

    A partition is enough. To rank a whole vocabulary takes ten times as long.
    """
    if k >= len(values):
        return np.ones(len(values), dtype=bool)
    if k == 0:
        return np.zeros(len(values), dtype=bool)
    last = np.partition(values, -k)[-k]
    marked = values > last
    marked[np.flatnonzero(values == last)[: k - np.count_nonzero(marked)]] = True
    return marked


def _require_finite(largest: float, request: RequestState) -> None:
    """Checks the largest logit of a row: NaN if any is, -inf if no id is left."""
    if not math.isfinite(largest):
        what = "every id is banned (-inf)" if largest == -math.inf else f"the largest logit is {largest}"
        raise SamplingError(request.request_id, f"no token can be taken: {what}")


def _view(logits: Any) -> Any:
    """A torch tensor in the memory of the CPU as a numpy array; whatever lies on another device stays there.

    Over 49,152 ids the argmax of numpy was measured 15 times as fast as that of torch on a CPU.
    """
    if isinstance(logits, np.ndarray) or logits.device.type != "cpu":
        return logits
    wide = logits.detach() if logits.element_size() >= 4 else logits.detach().float()  # numpy knows no bfloat16
    return wide.numpy()


def _host_row(row: Any) -> np.ndarray:
    """A private float64 copy of one row; every narrower format converts to it exactly."""
    return np.array(row if isinstance(row, np.ndarray) else row.detach().cpu().double().numpy(), dtype=np.float64)
