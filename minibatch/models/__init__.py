"""Executors: what carries out a plan. All have one interface, :class:`Model`.

``vocab_size``           token ids are ``0 <= id < vocab_size``
``max_model_len``        positions that the model supports, None if unlimited
``eos_token_ids``        ids that end a sequence
``tokenizer``            has ``encode(text) -> ids`` and ``decode(ids, skip_special_tokens) -> text``; or None
``kv_bytes_per_token``   bytes of K and V of one token over all layers
"""

from __future__ import annotations

from typing import Any, Protocol

from minibatch.clock import Clock
from minibatch.kv_cache import KVCache
from minibatch.plan import Plan


class UnsupportedModel(ValueError):
    """This model would run, and give wrong tokens. The message names the model and the reason."""


class ModelUnavailable(RuntimeError):
    """The weights cannot be had. The message says where they were looked for, and the remedy."""


class Model(Protocol):
    name: str
    vocab_size: int
    max_model_len: int | None
    eos_token_ids: frozenset[int]
    tokenizer: Any
    kv_bytes_per_token: int

    def clock(self) -> Clock:
        """The clock that fits this executor: real if it computes, virtual if it only says how long things take."""

    def allocate(self, num_rows: int) -> Any:
        """Storage for the K/V of ``num_rows`` tokens, plus a scratch row for padding. One engine owns it."""

    def forward(self, plan: Plan, kv: KVCache, store: Any) -> Any:
        """Computes the plan's chunks and padding; K/V go to the rows of ``store`` that ``kv`` names.

        Returns logits ``[rows, vocab_size]`` (numpy or torch): of each chunk, in order, the last ``num_logits``.
        """
