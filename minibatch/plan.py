"""A plan says what one iteration executes: the contract between a scheduler and the engine.

A scheduler answers one question, again before every iteration: given who waits, who is active and what memory is
left, which tokens of which requests does the model compute now? The answer is a :class:`Plan`. Making one changes
nothing; the engine carries it out. A plan holds requests and counts, never block ids: which block a token lands in
is the KV cache's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from minibatch.kv_cache import KVCache
from minibatch.request import RequestState


class Chunk(NamedTuple):
    """Compute ``tokens[start:stop]`` of a request, with ``start == num_computed``.

    A whole prompt, a piece of one, one decode and the recomputation after a preemption are all this.
    If ``stop == num_tokens``, the iteration samples one token from the last position.
    """

    request: RequestState
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the newest token, so that a next one can be sampled."""
        return self.stop == self.request.num_tokens

    @property
    def num_logits(self) -> int:
        """How many of the chunk's last positions need logits: one to sample from, all to score a prompt."""
        wants_prompt = self.request.params.prompt_logprobs is not None
        if (
            wants_prompt
            and len(self.request.prompt_logprobs) < self.request.num_prompt
            and self.start < self.request.num_prompt
        ):
            return self.stop - self.start
        return int(self.samples)


class Padding(NamedTuple):
    """Tokens that are computed for nobody, because a static batch is a rectangle.

    ``dead`` False: left pads that bring a prompt to the longest of its batch. True: the row of a finished request,
    which goes on through the whole model, head included, until the batch ends.
    """

    request: RequestState
    num_tokens: int
    dead: bool


class Admission(NamedTuple):
    """A waiting request becomes active, and the cache sets rows aside for its first ``reserve`` tokens."""

    request: RequestState
    reserve: int


class Waiting(NamedTuple):
    """A request that was examined and left in the queue, and the reason with its numbers."""

    request: RequestState
    reason: str


@dataclass(frozen=True)
class Plan:
    """What one iteration executes, in the order in which the engine applies it: preempt, admit, compute.

    ``wake_at``  with no chunks: nothing to do before this time (a static batch that waits to fill)
    ``waiting``  the waiting requests that were examined; ``rest`` is the one reason that all others share
    """

    chunks: tuple[Chunk, ...] = ()
    padding: tuple[Padding, ...] = ()
    admissions: tuple[Admission, ...] = ()
    preemptions: tuple[RequestState, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    rest: str = ""
    wake_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return sum(c.stop - c.start for c in self.chunks) + sum(p.num_tokens for p in self.padding)


class Scheduler(Protocol):
    """What the engine asks of a scheduler: who takes part in the next iteration, and who leaves after it."""

    def check(self, request: RequestState, kv: KVCache) -> None:
        """Raises a RequestRefused if this scheduler could never run the request to its end."""

    def plan(self, queue: Sequence[RequestState], active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        """The next iteration. ``queue`` in arrival order, ``active`` in admission order. Changes nothing."""

    def leaving(self, active: Sequence[RequestState]) -> list[RequestState]:
        """The members that give up their place and their memory at this iteration boundary."""
