"""The toy model behind the packed sequence: it sees a plan as an executor of real models does, packed and masked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from minibatch.kv_cache import KVCache
from minibatch.models import packing
from minibatch.models.packing import Span
from minibatch.models.toy_model import ToyModel, ToyStore
from minibatch.plan import Plan


class PackedToy(ToyModel):
    """Its tokens are those of the toy model, as long as sequence and masks are right."""

    def forward(self, plan: Plan, kv: KVCache, store: ToyStore) -> np.ndarray:
        packed = packing.pack(plan, kv, kv.num_rows)
        for span in packed.spans:
            for place, index in _places(span):
                past = hash(store[span.rows[index - 1]]) if index else 0
                store[packed.slots[place]] = (past, packed.positions[place], packed.tokens[place])
        for slot in packed.slots[packed.num_tokens :]:
            store[slot] = (0, 0, 0)
        seen = {place: rows for spans in packing.alike(packed.spans) for place, rows in _seen(spans)}
        logits = [self._answer(store, seen[place]) for place in packed.logits[: packed.num_logits]]
        return np.array(logits).reshape(-1, self.vocab_size)

    def _answer(self, store: ToyStore, rows: Iterable[int]) -> np.ndarray:
        state = 0
        for row in rows:
            past, position, token = store[row]
            state = hash((state if state == past else hash((state, past)), position, token))
        return np.random.Generator(np.random.PCG64(state % 2**64)).standard_normal(self.vocab_size)


def _places(span: Span) -> list[tuple[int, int]]:
    """Of its tokens: the place in the sequence, and in the rows."""
    return [(span.first + i, len(span.rows) - span.length + i) for i in range(span.length)]


def _seen(spans: Sequence[Span]) -> Iterable[tuple[int, list[int]]]:
    """Which rows each query reads, by the mask of these spans, whose rows are padded to the longest."""
    lengths = np.array([len(span.rows) for span in spans])
    mask = packing.visible(lengths, spans[0].length, None)
    for span, visible in zip(spans, mask, strict=True):
        padded = [*span.rows, *[span.rows[-1]] * (lengths.max() - len(span.rows))]
        for (place, _), keys in zip(_places(span), visible, strict=True):
            yield place, [row for row, shown in zip(padded, keys, strict=True) if shown]
