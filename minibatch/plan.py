"""A plan says what one iteration executes: the contract between a scheduler and the engine.

A scheduler answers one question, again before every iteration: given who waits, who is active and what memory is
left, which tokens of which requests does the model compute now? The answer is a :class:`Plan`. Making one changes
nothing; the engine carries it out. A plan holds requests and counts, never block ids: which block a token lands in
is the KV cache's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minibatch.kv_cache import KVCache
from minibatch.request import RequestState

if TYPE_CHECKING:
    from minibatch.policies.queueing import Order


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
    def kinds(self) -> tuple[int, int, int]:
        """Its tokens as (prefill, decode, recomputed): below the high-water mark of the request, they are computed
        again; of the others, those of the prompt are prefill."""
        request, start, stop = self
        recomputed = max(min(stop, request.high_water) - start, 0)
        fresh = start + recomputed
        prefill = max(min(stop, request.num_prompt) - fresh, 0)
        return prefill, stop - fresh - prefill, recomputed

    @property
    def num_logits(self) -> int:
        """How many of the chunk's last positions need logits: one to sample from, all to score a prompt."""
        return self.stop - self.start if self.scores_prompt else int(self.samples)

    @property
    def forks(self) -> bool:
        """Whether it completes a prompt that has several answers (``n > 1``)."""
        return bool(self.request.siblings) and self.samples

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted that no earlier chunk has given."""
        request = self.request
        wanted = request.params.prompt_logprobs is not None and self.start < request.num_prompt
        return wanted and len(request.prompt_logprobs) < request.num_prompt


class Padding(NamedTuple):
    """Tokens that are computed for nobody, because a static batch is a rectangle.

    ``dead`` False: left pads that bring a prompt to the longest of its batch. True: the row of a finished request,
    which goes on through the whole model, head included, until the batch ends.
    """

    request: RequestState
    num_tokens: int
    dead: bool


class Admission(NamedTuple):
    """A waiting request becomes active, and the cache sets rows aside for its first ``reserve`` tokens.

    ``cached`` of these need not be computed: a prefix cache has their K/V.
    """

    request: RequestState
    reserve: int
    cached: int = 0


class Preemption(NamedTuple):
    """An active request gives up its rows and waits again, because ``by`` needs them.

    Its K/V is dropped, and computed again later; or, with ``swap``, copied to host memory, and back later.
    """

    request: RequestState
    by: RequestState
    swap: bool = False


class Waiting(NamedTuple):
    """A request that was examined and left without tokens, and the reason with its numbers."""

    request: RequestState
    reason: str


@dataclass(frozen=True)
class Plan:
    """What one iteration executes, in the order in which the engine applies it: preempt, admit, compute.

    ``wake_at``  with no chunks: nothing to do before this time (a static batch that waits to fill)
    ``waiting``  the requests that were examined and go without; ``rest`` is the one reason that all others share
    """

    chunks: tuple[Chunk, ...] = ()
    padding: tuple[Padding, ...] = ()
    admissions: tuple[Admission, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    rest: str = ""
    wake_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return sum([stop - start for _, start, stop in self.chunks]) + sum([pad.num_tokens for pad in self.padding])


class PlanError(RuntimeError):
    """A scheduler or policy returned a plan that cannot be carried out. Raised before anything runs."""


def check_plan(
    plan: Plan,
    scheduler: Scheduler,
    kv: KVCache,
    live: Mapping[str, RequestState],
    active: Sequence[RequestState],
) -> None:
    """Raises PlanError, naming the scheduler and the numbers, if the plan breaks a rule of this module.

    ``live`` are the engine's requests that have not ended, by id; ``active`` those that hold memory.
    """

    def fail(what: str) -> None:
        raise PlanError(f"{type(scheduler).__name__} planned {what}")

    def status(request: RequestState) -> str:
        return request.status.value if live.get(request.request_id) is request else "not a live request of this engine"

    for change in plan.preemptions:
        if not isinstance(change, Preemption):
            fail(f"{change!r} among its preemptions, which is not a Preemption")
    gone, joined = {p.request for p in plan.preemptions}, {a.request: a for a in plan.admissions}
    if len(gone) < len(plan.preemptions) or len(joined) < len(plan.admissions):
        twice = [change.request.label for change in (*plan.preemptions, *plan.admissions)]
        fail(f"one request twice among {', '.join(twice)}")
    draft = kv.draft()
    for request, _, _ in plan.preemptions:
        if status(request) != "active":
            fail(f"to preempt {request.label}, which is {status(request)}")
        draft.release(request)
    for request, reserve, cached in plan.admissions:
        if status(request) != "waiting":
            fail(f"to admit {request.label}, which is {status(request)}")
        if cached != draft.cached_tokens(request):
            fail(f"to admit {request.label} with {cached} cached tokens, but {draft.cached_tokens(request)} are cached")
        if not draft.reserve(request, reserve):
            fail(f"to admit {request.label}, but it {draft.shortage(request, reserve)}")
    computing = {request for request, _, _ in plan.chunks}
    if len(computing) < len(plan.chunks):
        (request, _), *_ = Counter(chunk.request for chunk in plan.chunks).most_common(1)
        fail(f"two chunks of {request.label}")
    running = (request for request in active if not request.is_finished)
    if strangers := (computing & gone) | (computing - joined.keys()).difference(running):
        first = next(chunk.request for chunk in plan.chunks if chunk.request in strangers)
        fail(f"a chunk of {first.label}, which is not active in this iteration")
    for request, start, stop in plan.chunks:
        computed = request.num_computed
        if start == computed and start < stop <= request.num_tokens and stop <= request.room:
            continue
        if request in joined:
            computed += joined[request].cached
        if not computed == start < stop <= request.num_tokens:
            have = f"{computed} of its {request.num_tokens} tokens are computed"
            fail(f"tokens {start}:{stop} of {request.label}, but {have}")
        if not draft.reserve(request, stop):
            fail(f"tokens {start}:{stop} of {request.label}, but it {draft.shortage(request, stop)}")
    for request, num_tokens, _ in plan.padding:
        if num_tokens < 1:
            fail(f"{num_tokens} tokens of padding beside {request.label}")
    if scheduler.token_budget is not None and plan.num_tokens > scheduler.token_budget:
        fail(f"{plan.num_tokens} tokens in an iteration of at most {scheduler.token_budget}")


class Scheduler(Protocol):
    """What the engine asks of a scheduler: who takes part in the next iteration, and who leaves after it."""

    token_budget: int | None  # most tokens of one iteration, None if there is no limit

    def max_request_tokens(self, kv: KVCache) -> int:
        """The most tokens that a request may ever have cached here; cuts those that set no ``max_tokens``."""

    def check(self, request: RequestState, kv: KVCache) -> None:
        """Raises a RequestRefused if this scheduler could never run the request to its end."""

    def plan(self, queue: Order, active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        """The next iteration. ``queue`` knows who is next, ``active`` is in admission order. Changes nothing."""

    def leaving(self, active: Sequence[RequestState]) -> list[RequestState]:
        """The members that give up their place and their memory at this iteration boundary."""
