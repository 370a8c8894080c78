"""A language model of a few lines, for tests and pictures: instant, no torch, and impossible to fool.

Its next token is a hash over the (position, token) pairs that it *reads through the KV store*, in order. A wrong row,
a wrong position, a stale block, a neighbour's block or a missing token all change the output, just as in a real model
they would. And as real keys and values depend on all tokens before theirs, a row also keeps a hash of these: read after
others than those, it changes the output as well. So a scheduler or cache that corrupts anything cannot give the tokens
of a solo run.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from minibatch.clock import Clock, VirtualClock
from minibatch.kv_cache import KVCache
from minibatch.plan import Chunk, Plan


class ByteTokenizer:
    """Token ids are the bytes of UTF-8, so most characters beyond ASCII take several tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


Entry = tuple[int, int, int]  # the "K/V" of a token: hash of all before it, position, token


class ToyStore(list[Entry | None]):
    """An entry a row; None: never written. The last is the scratch row that padding writes."""

    def __init__(self, num_rows: int) -> None:
        super().__init__([None] * (num_rows + 1))
        self._host: dict[Hashable, list[Entry | None]] = {}

    def copy_rows(self, source: np.ndarray, target: np.ndarray) -> None:
        for row, entry in zip(target.tolist(), [self[row] for row in source.tolist()], strict=True):
            self[row] = entry

    def swap_out(self, key: Hashable, rows: np.ndarray) -> None:
        self._host[key] = [self[row] for row in rows.tolist()]

    def swap_in(self, key: Hashable, rows: np.ndarray) -> None:
        for row, entry in zip(rows.tolist(), self._host.pop(key), strict=True):
            self[row] = entry

    def swap_drop(self, key: Hashable) -> None:
        del self._host[key]


class ToyModel:
    """``eos_token_id`` None: it never ends a sequence by itself."""

    name = "toy"
    simulated = False
    kv_bytes_per_token = 1  # its store holds one entry a token; call that a byte

    def __init__(
        self, vocab_size: int = 256, eos_token_id: int | None = None, max_model_len: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset() if eos_token_id is None else frozenset({eos_token_id})
        self.tokenizer = ByteTokenizer() if vocab_size >= 256 else None

    def clock(self) -> Clock:
        return VirtualClock()

    def allocate(self, num_rows: int) -> ToyStore:
        return ToyStore(num_rows)

    def forward(self, plan: Plan, kv: KVCache, store: ToyStore) -> np.ndarray:
        """Writes every chunk's entries before it reads any, as a batched attention kernel does."""
        for request, start, stop in plan.chunks:
            rows = kv.rows(request, max(start - 1, 0), stop).tolist()
            past = hash(store[rows.pop(0)]) if start else 0
            for row, position, token in zip(rows, range(start, stop), request.tokens(start, stop), strict=True):
                store[row] = (past, position, token)
                past = hash(store[row])
        if plan.padding:
            store[-1] = (0, 0, 0)
        logits = [row for chunk in plan.chunks for row in self._logits(chunk, kv, store)]
        return np.array(logits).reshape(-1, self.vocab_size)

    def _logits(self, chunk: Chunk, kv: KVCache, store: ToyStore) -> list[np.ndarray]:
        logits, state, first = [], 0, chunk.stop - chunk.num_logits
        if first < chunk.stop:
            for index, row in enumerate(kv.rows(chunk.request, 0, chunk.stop).tolist()):
                past, position, token = store[row]  # a TypeError here: the row was never written
                seen = state if state == past else hash((state, past))  # equal, unless somebody mixed up the rows
                state = hash((seen, position, token))  # of integers only, so the same in every process
                if index >= first:
                    logits.append(np.random.Generator(np.random.PCG64(state % 2**64)).standard_normal(self.vocab_size))
        return logits
