"""From an iteration's logits to its next tokens: which rows are sampled, which score a prompt, whom an error hits."""

from __future__ import annotations

from typing import Any

from minibatch.plan import Chunk, Plan
from minibatch.request import RequestState
from minibatch.sampling import Sample, SamplingError, prompt_logprobs, sample


def next_tokens(plan: Plan, logits: Any) -> dict[RequestState, Sample | SamplingError]:
    """The next token of each request whose chunk reached its newest one, in plan order; after a prompt with several
    answers (``n > 1``) one for each of them, from the same logits.

    ``logits`` ``[rows, vocab_size]`` as ``Model.forward`` returns them. A request whose distribution is broken gets its
    SamplingError; the draws of the others do not depend on it.
    """
    rows, row = [], 0
    for chunk in plan.chunks:
        num_logits = chunk.num_logits
        if chunk.scores_prompt:
            _score_prompt(chunk, logits[row : row + num_logits])
        row += num_logits
        if chunk.samples:
            rows += [(row - 1, answer) for answer in (chunk.request, *chunk.request.siblings)]
    failed: dict[RequestState, SamplingError] = {}
    while True:
        requests = [request for _, request in rows]
        try:
            indices = [index for index, _ in rows]
            drawn = sample(logits if indices == list(range(row)) else logits[indices], requests)
            return failed | dict(zip(requests, drawn, strict=True))
        except SamplingError as error:
            concerned = {request: error for request in requests if request.request_id == error.request_id}
            if not concerned:
                raise
            failed |= concerned
            rows = [(index, request) for index, request in rows if request not in failed]


def _score_prompt(chunk: Chunk, logits: Any) -> None:
    """Log-probabilities of the prompt tokens that follow the chunk's positions; a recomputation adds none twice.

    ``logits`` are those of positions ``start`` to ``stop - 1``, which predict tokens ``start + 1`` to ``stop``.
    """
    state = chunk.request
    if not state.prompt_logprobs:
        state.prompt_logprobs.append(None)  # nothing precedes the first token
    first, last = max(len(state.prompt_logprobs), chunk.start + 1), min(chunk.stop + 1, state.num_prompt)
    if first < last:
        rows = logits[first - chunk.start - 1 : last - chunk.start - 1]
        state.prompt_logprobs += prompt_logprobs(rows, state.tokens(first, last), state.params.prompt_logprobs)
