"""The four configurations, and the knobs that they share: what ``compare`` measures and ``simulate`` simulates.

static, continuous, paged and chunked are one engine with other parts. What differs between two neighbours of this
ladder is one thing, so a difference in the numbers has one cause:

    static -> continuous   membership may change between iterations (so a batch is no rectangle, and has no padding)
    continuous -> paged    memory is allocated by need instead of by maximum
    paged -> chunked       prompts are cut to a token budget instead of computed whole
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minibatch import policies
from minibatch.checks import check_int
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Scheduler
from minibatch.policies import ADMISSIONS, ORDERS, PREEMPTIONS
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import NeverFits
from minibatch.static_batching import StaticBatching

CONFIGURATIONS = ("static", "continuous", "paged", "chunked")
PHASE_ORDERS = ("mixed", "prefill-first")
# What is called of a policy, and what is read: one that lacks some of it should fail now, not after minutes.
POLICIES = {
    "order": (ORDERS, ("add", "take", "end", "walk", "note"), ("used", "lookahead")),
    "admission": (ADMISSIONS, ("tokens", "objection", "check"), ("reserves_maximum",)),
    "preemption": (PREEMPTIONS, ("choose", "outranked"), ("host_tokens",)),
}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """
    ``block_size``   tokens a block, of paged and chunked
    ``max_num_seqs`` most active requests, where memory does not set the limit first
    ``token_budget`` tokens an iteration, of chunked
    ``max_num_batched_tokens``  the same of continuous and paged, which do not cut prompts; None: what the longest
                     request needs
    ``phase_order``  how continuous and paged treat the decodes while there are prompts: ``mixed`` or ``prefill-first``
    ``order``        who is next, of all four; ``admission``: does it fit, ``preemption``: who gives way, of all but
                     static. Names from ``policies/``, or dotted ones (see :func:`minibatch.policies.make`)
    ``prefix_cache`` whether paged and chunked find computed blocks again
    """

    block_size: int = 16
    max_num_seqs: int = 256
    token_budget: int = 512
    max_num_batched_tokens: int | None = None
    phase_order: str = "mixed"
    order: str = "fcfs"
    admission: str = "watermark"
    preemption: str = "recompute"
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a number that makes no sense, or a policy that does not exist."""
        for name in ("block_size", "max_num_seqs", "token_budget"):
            check_int(name, getattr(self, name), 1)
        if self.max_num_batched_tokens is not None:
            check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.phase_order not in PHASE_ORDERS:
            raise ValueError(f"phase_order must be one of {', '.join(PHASE_ORDERS)}, got {self.phase_order!r}")
        for kind in POLICIES:
            self.make(kind)

    def make(self, kind: str) -> Any:
        """A new ``order``, ``admission`` or ``preemption``. Raises ValueError that names what is wrong with it."""
        name, (table, methods, attributes) = getattr(self, kind), POLICIES[kind]
        try:
            policy = policies.make(name, table, methods)
        except Exception as error:  # of any type: it may come from somebody's own module
            what = error if isinstance(error, ValueError) else f"{name}: {type(error).__name__}: {error}"
            raise ValueError(f"{kind}: {what}") from error
        if missing := [attribute for attribute in attributes if not hasattr(policy, attribute)]:
            base = "derive it from a class of minibatch.policies; an __init__ of its own has to call super().__init__()"
            raise ValueError(f"{kind}: {name} makes {policy!r}, which has no {', '.join(missing)}: {base}")
        return policy

    def configurations(self, kv_tokens: int, slot_size: int) -> dict[str, tuple[Scheduler, KVCache]]:
        """All four, see :meth:`configuration`."""
        return {name: self.configuration(name, kv_tokens, slot_size) for name in CONFIGURATIONS}

    def configuration(self, name: str, kv_tokens: int, slot_size: int) -> tuple[Scheduler, KVCache]:
        """Scheduler and cache, on ``kv_tokens`` tokens; a contiguous slot holds ``slot_size``, the longest request.

        A new cache at every call: one belongs to one engine. Raises NeverFits if not one slot fits.
        """
        decisions = {"admission": self.make("admission"), "preemption": self.make("preemption")}
        most = self.max_num_batched_tokens or max(1024, slot_size)
        whole = ContinuousBatching(self.max_num_seqs, most, self.phase_order, **decisions)
        if name in ("paged", "chunked"):
            if kv_tokens < self.block_size:
                raise NeverFits(f"a block takes {self.block_size} tokens, the KV cache has {kv_tokens}")
            paged = PrefixCachedKVCache if self.prefix_cache else PagedKVCache
            cut = ChunkedPrefill(self.token_budget, self.max_num_seqs, **decisions)
            return whole if name == "paged" else cut, paged(kv_tokens // self.block_size, self.block_size)
        slots = kv_tokens // slot_size
        if not slots:
            raise NeverFits(f"a slot for the longest request takes {slot_size} tokens, the KV cache has {kv_tokens}")
        static = StaticBatching(min(slots, self.max_num_seqs))
        return static if name == "static" else whole, ContiguousKVCache(slots, slot_size)
