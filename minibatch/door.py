"""The door: what can be known to be impossible about a request is refused before it enters, with its numbers.

Behind the door nothing can go wrong for one request that would harm another: its ids exist, its length fits context,
cache and iteration, its stop conditions can be tested.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from numbers import Integral

from minibatch.checks import check_int, is_finite
from minibatch.contents import pieces
from minibatch.detokenizer import TextStream
from minibatch.kv_cache import KVCache
from minibatch.models import Model
from minibatch.plan import Scheduler
from minibatch.request import (
    DuplicateRequest,
    Group,
    InvalidParams,
    InvalidPrompt,
    NeverFits,
    PromptTooLong,
    Request,
    RequestState,
    SamplingParams,
)
from minibatch.trace import Timeline


class Door:
    """Of one engine: knows the limits that its parts set, and which labels its trace has."""

    def __init__(self, model: Model, scheduler: Scheduler, kv: KVCache, max_model_len: int | None) -> None:
        self.model, self.scheduler, self.kv, self.max_model_len = model, scheduler, kv, max_model_len
        self._labels: set[str] = set()
        self._num_requests = 0

    def timeline(self, request: Request, now: float) -> Timeline:
        """Everybody gets one, the refused too; so nothing in it may depend on the request being in order."""
        arrival = float(request.arrival_time) if is_time(request.arrival_time) else now
        priority = request.priority if isinstance(request.priority, int) else 0
        return Timeline(self._label(request.request_id), str(request.client), priority, 0, 0, arrival)

    def accept(self, request: Request, timeline: Timeline, live: Container[str]) -> RequestState:
        """The state of a request that can run; raises a RequestRefused for one that never could.

        ``live`` are the ids in use. With ``n > 1`` the state is that of the first answer, the others are its siblings.
        """
        check_envelope(request)
        own_id = timeline.request_id if request.request_id is None else request.request_id
        ids = answer_ids(own_id, request.params.n)
        for request_id in dict.fromkeys((own_id, *ids)):
            if request_id in live:
                raise DuplicateRequest(f"request id {request_id!r} is in use by a live request")
        prompt = check_prompt(request.prompt, self.model.vocab_size)
        check_vocabulary(request, self.model.vocab_size, self.model.tokenizer is not None)
        check_simulated(request, self.model.simulated)
        params = replace(request.params)  # of its own: its collections may change under the caller's hands
        most = self.scheduler.max_request_tokens(self.kv)
        timeline.num_prompt = len(prompt)
        timeline.max_new_tokens = new_token_limit(len(prompt), params.max_tokens, self.max_model_len, most)
        stop_token_ids = self._stop_token_ids(params)
        states = [
            RequestState(
                request=replace(request, params=params),
                request_id=request_id,
                label=timeline.request_id,
                prompt=prompt,
                arrival_time=timeline.arrival,
                max_new_tokens=timeline.max_new_tokens,
                stop_token_ids=stop_token_ids,
                seed=0 if params.seed is None else params.seed + index,
                timeline=timeline,
                text=None if self.model.tokenizer is None else TextStream(self.model.tokenizer, params, stop_token_ids),
            )
            for index, request_id in enumerate(ids)
        ]
        state = states[0]
        state.siblings = states[1:]
        if state.siblings and not self.kv.shares:
            raise InvalidParams(f"n = {params.n}: answers share the K/V of their prompt, and {self.kv!r} cannot share")
        self.kv.check(state.max_cached_tokens, f"prompt {state.num_prompt} + {state.max_new_tokens} new tokens")
        self.scheduler.check(state, self.kv)
        if state.siblings:
            self._split(states, timeline, own_id)
        return state

    def _split(self, states: list[RequestState], timeline: Timeline, request_id: str) -> None:
        """A timeline an answer, from that of the request, which becomes the first's."""
        group, group_label = Group(request_id, states), timeline.request_id
        for index, state in enumerate(states):
            label = self._unused(f"{group_label}#{index}")
            state.label, state.group = label, group
            if index:  # the first one computes the prompt for all
                state.num_cached = state.num_prompt
                state.timeline = replace(timeline, token_times=[], runs=[])
            state.timeline.request_id, state.timeline.group = label, group_label

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        known = (token for token in self.model.eos_token_ids if token < self.model.vocab_size)
        return frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *known))

    def _label(self, request_id: str | None) -> str:
        """The id itself, where it is new; else with the first free suffix, so that the trace stays unambiguous."""
        base = f"r{self._num_requests}" if request_id is None else str(request_id)
        self._num_requests += 1
        return self._unused(base)

    def _unused(self, base: str) -> str:
        label, uses = base, 1
        while label in self._labels:
            uses += 1
            label = f"{base}~{uses}"
        self._labels.add(label)
        return label


def answer_ids(request_id: str, n: int) -> list[str]:
    """One id an answer: the request's own, or ``id#0``, ``id#1``, ..."""
    return [request_id] if n == 1 else [f"{request_id}#{index}" for index in range(n)]


def check_envelope(request: Request) -> None:
    """Raises InvalidParams for what is no id, client, priority, SamplingParams or time on the clock."""
    if request.request_id is not None and not isinstance(request.request_id, str):
        raise InvalidParams(f"request_id must be a string, got {request.request_id!r}")
    if not isinstance(request.client, str):
        raise InvalidParams(f"client must be a string, got {request.client!r}")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        raise InvalidParams(f"priority must be an integer, got {request.priority!r}")
    if not isinstance(request.params, SamplingParams):
        raise InvalidParams(f"params must be SamplingParams, got {request.params!r}")
    if request.output_length is not None:
        check_int("output_length", request.output_length, request.params.min_tokens + 1, InvalidParams)
    if request.cache_salt is not None and not isinstance(request.cache_salt, str):
        raise InvalidParams(f"cache_salt must be a string, got {request.cache_salt!r}")
    if request.arrival_time is not None and not is_time(request.arrival_time):
        raise InvalidParams(f"arrival_time must be a number of seconds from 0 on, got {request.arrival_time!r}")


def is_time(value: object) -> bool:
    """Whether this is a time on the engine's clock: seconds from 0 on."""
    return is_finite(value) and value >= 0


def check_prompt(prompt: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The prompt as a list of its own; raises InvalidPrompt naming the first token that is not an id of this model.

    Ranges stay what they are, however long: they cannot change, and their ids lie between their ends.
    """
    if isinstance(prompt, (str, bytes)):
        raise InvalidPrompt("the prompt is text, an engine takes token ids: encode it, or use LLM.generate")
    if not hasattr(prompt, "__len__") or not hasattr(prompt, "__getitem__"):
        raise InvalidPrompt(f"the prompt must be a sequence of token ids, got {prompt!r}")
    try:
        if len(prompt) == 0:
            raise InvalidPrompt("the prompt is empty: there is nothing to continue from")
    except OverflowError:
        raise InvalidPrompt(f"the prompt has more tokens than can be counted: {prompt!r}") from None
    if (ranges := pieces(prompt)) is not None:
        first = 0
        for piece in ranges:
            for index in (0, len(piece) - 1):
                _check_token(piece[index], vocab_size, f"prompt token {first + index}", InvalidPrompt)
            first += len(piece)
        return prompt
    for index, token in enumerate(prompt):
        _check_token(token, vocab_size, f"prompt token {index}", InvalidPrompt)
    return [int(token) for token in prompt]


def check_vocabulary(request: Request, vocab_size: int, has_tokenizer: bool) -> None:
    """Raises InvalidParams for stop ids or biased ids outside the vocabulary, or stop strings without a tokenizer."""
    params = request.params
    for token in params.stop_token_ids:
        _check_token(token, vocab_size, "stop_token_ids", InvalidParams)
    for token in params.logit_bias:
        _check_token(token, vocab_size, "logit_bias", InvalidParams)
    if params.stop and not has_tokenizer:
        raise InvalidParams(f"stop strings {params.stop} need a tokenizer, and this model has none")


def check_simulated(request: Request, simulated: bool) -> None:
    """Raises InvalidParams for what needs logits where there are none, or says when an answer ends that ends itself."""
    if simulated:
        for name in ("logprobs", "prompt_logprobs", "stop_token_ids", "logit_bias"):
            if getattr(request.params, name) not in (None, (), {}):
                raise InvalidParams(
                    f"{name} cannot be had: a simulated model computes no logits, its tokens are numbers"
                )
    elif request.output_length is not None:
        raise InvalidParams(
            f"output_length {request.output_length} is for simulated models: this one ends an answer itself"
        )


def new_token_limit(num_prompt: int, max_tokens: int | None, max_model_len: int | None, max_cached: int) -> int:
    """G, the most tokens that a request may generate: what it asks for, cut to the context.

    ``max_tokens`` None asks for all that context and cache (``max_cached`` tokens a request) have room for.
    Raises PromptTooLong if the context has no room for one new token, NeverFits if the cache cannot hold the prompt.
    """
    if max_model_len is not None and num_prompt >= max_model_len:
        raise PromptTooLong(
            f"prompt {num_prompt} leaves no room for a new token: the context is {max_model_len} tokens"
        )
    limits = [] if max_model_len is None else [max_model_len - num_prompt]
    if max_tokens is not None:
        return min([max_tokens, *limits])
    if num_prompt > max_cached:
        raise NeverFits(f"prompt {num_prompt} does not fit: the cache holds at most {max_cached} tokens a request")
    return min([max_cached - num_prompt + 1, *limits])


def _check_token(token: object, vocab_size: int, what: str, error: type[InvalidPrompt] | type[InvalidParams]) -> None:
    if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral)):
        raise error(f"{what} is {token!r}: not an integer")
    if not 0 <= token < vocab_size:
        raise error(f"{what} is {token}: this model's ids are 0 to {vocab_size - 1}")
