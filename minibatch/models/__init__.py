"""Executors: what carries out a plan. All have one interface, :class:`Model`.

``vocab_size``           token ids are ``0 <= id < vocab_size``
``max_model_len``        positions that the model supports, None if unlimited
``eos_token_ids``        ids that end a sequence
``tokenizer``            has ``encode(text) -> ids`` and ``decode(ids, skip_special_tokens) -> text``; or None
``kv_bytes_per_token``   bytes of K and V of one token over all layers
``simulated``            whether it computes no tokens, only time
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np

from minibatch.clock import Clock
from minibatch.kv_cache import KVCache
from minibatch.plan import Plan


class UnsupportedModel(ValueError):
    """This model would run, and give wrong tokens. The message names the model and the reason."""


class ModelUnavailable(RuntimeError):
    """The weights cannot be had. The message says where they were looked for, and the remedy."""


class Store(Protocol):
    """The K/V of one engine, row by row. Rows are int64 arrays ``[n]``; ``key`` is whatever was swapped out."""

    def copy_rows(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies the K/V of the rows ``source`` to the rows ``target``, in every layer."""

    def swap_out(self, key: Hashable, rows: np.ndarray) -> None:
        """Copies the K/V of ``rows``, in order, to host memory."""

    def swap_in(self, key: Hashable, rows: np.ndarray) -> None:
        """Copies what was swapped out to ``rows``, and forgets it."""

    def swap_drop(self, key: Hashable) -> None:
        """Forgets what was swapped out."""


class Model(Protocol):
    name: str
    vocab_size: int
    max_model_len: int | None
    eos_token_ids: frozenset[int]
    tokenizer: Any
    kv_bytes_per_token: int
    simulated: bool

    def clock(self) -> Clock:
        """The clock that fits this executor: real if it computes, virtual if it only says how long things take."""

    def allocate(self, num_rows: int) -> Store:
        """Storage for the K/V of ``num_rows`` tokens, plus a scratch row for padding. One engine owns it."""

    def forward(self, plan: Plan, kv: KVCache, store: Store) -> Any:
        """Computes the plan's chunks and padding; K/V go to the rows of ``store`` that ``kv`` names.

        Returns logits ``[rows, vocab_size]`` (numpy or torch): of each chunk, in order, the last ``num_logits``. A
        simulated model returns the next tokens instead (see :mod:`minibatch.next_tokens`).
        """
