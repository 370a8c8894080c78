"""A request is one token list and the number of its leading tokens that are cached.

    tokens       = prompt + generated
    num_computed = how many leading tokens have their K/V in the cache

A live request always has ``num_tokens - num_computed >= 1``: the newest token is pending. Computing
``tokens[num_computed:stop]`` is then the *same* operation in a prefill, a later chunk of a prefill, a decode
(one pending token) and the resume after a preemption (``num_computed`` went back to 0). No phase is stored
anywhere; schedulers only let computed tokens chase tokens (the view of vLLM V1's scheduler).

The last generated token is never cached, so a request with ``P`` prompt tokens that generates ``G`` holds at
most ``P + G - 1`` rows of K/V.

:class:`Request` is what a user asks for and never changes: the same object may be given to many engines.
:class:`RequestState` is what one engine knows about it. :class:`Result` is what comes back, exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from minibatch.checks import check_float, check_int

if TYPE_CHECKING:
    from minibatch.trace import Timeline


class RequestRefused(ValueError):
    """A request that the engine will not run. The message says which numbers do not fit."""


class InvalidParams(RequestRefused):
    """A sampling parameter is out of range, or contradicts another one."""


class InvalidPrompt(RequestRefused):
    """The prompt is empty, or holds something that is not a token id of this model."""


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for one new token in the context, or does not fit one unchunked iteration."""


class NeverFits(RequestRefused):
    """The K/V of the request would not fit even if it had the whole cache for itself."""


class DuplicateRequest(RequestRefused):
    """A live request already has this id."""


class QueueFull(RequestRefused):
    """``max_queue`` requests are waiting already."""


MOST_ANSWERS = 16384  # to one request: vLLM's limit


class EngineStalled(RuntimeError):
    """Work is pending, nothing can run and nothing is going to change: a policy's bug. Names the head of the queue."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; vLLM's field names and meanings.

    One default differs: ``temperature`` is 0 (greedy), so that a run is reproducible unless randomness is asked for.

    ``n``                    how many answers; they share the prompt's K/V, and answer ``i`` has the seed ``seed + i``
    ``max_tokens``           most tokens to generate; None: as many as context and cache allow
    ``min_tokens``           end-of-sequence and stop conditions are masked until this many are generated
    ``temperature``          0 takes the most likely token (the lowest id on a tie)
    ``top_k``                keep the k most likely tokens; 0 or -1 keeps all
    ``top_p``, ``min_p``     nucleus mass; least probability relative to the most likely token
    ``repetition_penalty``   divides (multiplies, if negative) the logits of tokens seen in prompt *or* output
    ``presence_penalty``     subtracted once from tokens seen in the *output*
    ``frequency_penalty``    subtracted once per occurrence in the *output*
    ``logit_bias``           token id -> number added to its logit
    ``stop``                 strings that end the text (not part of it, unless ``include_stop_str_in_output``)
    ``stop_token_ids``       further ids that end a request, besides the model's end-of-sequence ids
    ``ignore_eos``           go on after an end-of-sequence token
    ``seed``                 makes this request's draws a function of (seed, index of the token) alone
    ``logprobs``             with every token, its log-probability and those of the k most likely ones
    ``prompt_logprobs``      the same for the tokens of the prompt (the first has none); all of them are computed then,
                             whatever a prefix cache has
    ``skip_special_tokens``  leave special tokens out of the text
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Normalises the collections; raises InvalidParams naming field, value and range."""
        set_field = object.__setattr__  # frozen: normalised once, here, and never again
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else _collect(self, "stop", tuple))
        set_field(self, "stop_token_ids", _collect(self, "stop_token_ids", tuple))
        set_field(self, "logit_bias", _collect(self, "logit_bias", dict))
        check_int("n", self.n, 1, InvalidParams)
        if self.n > MOST_ANSWERS:
            raise InvalidParams(f"n must be at most {MOST_ANSWERS}, got {self.n}")
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, InvalidParams)
        check_int("min_tokens", self.min_tokens, 0, InvalidParams)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        check_int("top_k", self.top_k, -1, InvalidParams)
        check_float("temperature", self.temperature, 0.0, math.inf, InvalidParams)
        check_float("top_p", self.top_p, 0.0, 1.0, InvalidParams, above=True)
        check_float("min_p", self.min_p, 0.0, 1.0, InvalidParams)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, InvalidParams, above=True)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0, InvalidParams)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0, InvalidParams)
        for name in ("logprobs", "prompt_logprobs", "seed"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, InvalidParams)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParams(f"{name} must be True or False, got {getattr(self, name)!r}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidParams(f"stop must be non-empty strings, got {text!r}")
        for token, bias in self.logit_bias.items():
            check_float(f"logit_bias[{token!r}]", bias, -math.inf, math.inf, InvalidParams)
        for name in INTEGERS + FLOATS:  # numpy's numbers and fractions are welcome, but go no further
            if getattr(self, name) is not None:
                set_field(self, name, (int if name in INTEGERS else float)(getattr(self, name)))


INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "seed")
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _collect(params: SamplingParams, name: str, kind: type) -> Any:
    """The field as a tuple or dict of its own; None is an empty one."""
    value = getattr(params, name)
    try:
        return kind(() if value is None else value)
    except (TypeError, ValueError):
        raise InvalidParams(f"{name} must be a {kind.__name__}, got {value!r}") from None


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    ``prompt``        token ids
    ``arrival_time``  seconds on the engine's clock (open loop); None: when it is submitted. One that has passed joins
                      the end of the queue, and its waiting still counts from then
    ``priority``, ``client``  who asks; policies and metrics may tell requests apart by them. A lower number is more
                      urgent
    ``cache_salt``    a prefix cache is shared only among requests with the same salt (tenants, adapters)
    ``output_length`` of a simulated request: it ends by itself after so many tokens, which no policy can see; None: it
                      runs to its ``max_tokens``
    """

    prompt: Sequence[int]
    params: SamplingParams = SamplingParams()
    request_id: str | None = None
    arrival_time: float | None = None
    priority: int = 0
    client: str = "default"
    cache_salt: str | None = None
    output_length: int | None = None


class Status(Enum):
    """submitted -> queue -> active -> finished, and back to the queue by preemption. There is nothing else."""

    SUBMITTED = "submitted"  # its arrival time has not come
    WAITING = "waiting"
    ACTIVE = "active"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, repr=False)  # compared and hashed by identity: two requests are never the same
class RequestState:
    """What one engine knows about one request. Only the engine changes it.

    ``request_id``       the user's id, or one that the engine made
    ``label``            the same, unique in the engine's trace: an id that is used again (even after a refusal) gets a
                         suffix there
    ``max_new_tokens``   G: ``max_tokens``, cut to what context and cache allow
    ``stop_token_ids``   every id that ends this request
    ``rank``             its number in the order of arrival
    ``num_tokens``       prompt and generated ones; a number of its own, because it is asked for so often
    ``num_computed``     leading tokens whose K/V are cached; of a waiting request, those that were swapped out
    ``num_cached``       prompt tokens whose K/V a prefix cache had when it was first admitted
    ``room``             leading tokens that can be written without asking the cache, which keeps this number
    ``high_water``       the most ``num_computed`` has been: positions below it, computed again, are recomputation
    ``last_scheduled``   index of the last iteration that computed some of its tokens, -1 if none
    ``siblings``         with ``n > 1``, until its prompt is computed: the other answers, which will fork off then
    """

    request: Request
    request_id: str
    label: str
    prompt: Sequence[int]
    arrival_time: float
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    timeline: Timeline
    generated: list[int] = field(default_factory=list)
    rank: float = 0.0
    num_computed: int = 0
    num_cached: int = 0
    room: int = 0
    high_water: int = 0
    last_scheduled: int = -1
    status: Status = Status.SUBMITTED
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: Any = None  # detokenizer.TextStream, if the engine has a tokenizer
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    result: Result | None = None
    siblings: list[RequestState] = field(default_factory=list)
    group: Group | None = None
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt)
        self.num_tokens = self.num_prompt + len(self.generated)

    def __repr__(self) -> str:
        return f"<{self.label}: {self.num_prompt} + {len(self.generated)} tokens, {self.num_computed} computed>"

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def num_pending(self) -> int:
        """Tokens that have no K/V yet; 1 for a decode."""
        return self.num_tokens - self.num_computed

    @property
    def max_cached_tokens(self) -> int:
        """The most rows of K/V it can ever hold, P + G - 1: the last token it generates is never fed back."""
        return self.num_prompt + self.max_new_tokens - 1

    @property
    def num_seqs(self) -> int:
        """Places that it takes among the active requests: one an answer."""
        return 1 + len(self.siblings)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_decoding(self) -> bool:
        """Whether all that is pending is its newest generated token."""
        return self.num_tokens - self.num_computed == 1 and bool(self.generated)

    def tokens(self, start: int, stop: int) -> list[int]:
        """``tokens[start:stop]`` of the one list that a request is, without building the whole of it."""
        split = self.num_prompt
        return [*self.prompt[start:stop], *self.generated[max(start - split, 0) : max(stop - split, 0)]]

    def to_result(self, error: Exception | None = None) -> Result:
        """What the user gets, once it has finished."""
        return Result(
            request_id=self.request_id,
            finish_reason=self.finish_reason,
            tokens=tuple(self.generated),
            text="" if self.text is None else self.text.text,
            stop_reason=self.stop_reason,
            error=None if error is None else f"{type(error).__name__}: {error}",
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            timeline=self.timeline,
        )


@dataclass(eq=False)
class Group:
    """A request with ``n > 1``: its answers, each a sequence of its own, and the one Result once all have ended."""

    request_id: str
    states: list[RequestState]
    result: Result | None = None

    @property
    def is_finished(self) -> bool:
        return all(state.is_finished for state in self.states)

    def to_result(self) -> Result:
        """Of the first answer, with all of them in ``samples``."""
        samples = tuple(state.result for state in self.states)
        return replace(samples[0], request_id=self.request_id, samples=samples)


@dataclass(frozen=True)
class Result:
    """How one request ended; every submitted request gets exactly one.

    ``finish_reason``   ``stop`` (end of sequence, stop id or stop string), ``length``, ``abort``, ``rejected``
    ``stop_reason``     the stop id or stop string that ended it; None for end of sequence and the other reasons
    ``tokens``          generated ids, prompt excluded, the stop token included
    ``text``            the text of ``tokens`` (cut at a stop string); empty without a tokenizer
    ``logprobs``        one ``sampling.Sample`` a token, if asked for
    ``timeline``        when it arrived, was first scheduled, emitted each token, was preempted, ended
    ``samples``         with ``n > 1``: the Result of each answer; the other fields are then those of the first
    """

    request_id: str
    finish_reason: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: tuple[Any, ...] | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    timeline: Timeline | None = None
    samples: tuple[Result, ...] = ()
