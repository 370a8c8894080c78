"""Packing: the chunks of a plan side by side in one sequence, and who may look at whom in it.

Only attention looks at more than one token; every other layer of a transformer maps each token by itself. So the
tokens of all requests can stand in one *ragged* sequence and share every matrix product (Orca's *selective batching*:
Yu et al., OSDI 2022, section 3.2). What keeps the requests apart is arithmetic on indices: positions that begin anew
for each, cache rows to write to and to read from, and a mask. It happens once an iteration, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minibatch.kv_cache import KVCache
from minibatch.plan import Plan


class Span(NamedTuple):
    """A chunk's place in the packed sequence, and the rows of its request's tokens up to the chunk's end."""

    first: int
    length: int
    rows: np.ndarray

    @property
    def stop(self) -> int:
        return self.first + self.length


@dataclass(frozen=True)
class Packed:
    """The packed sequence of ``T`` tokens.

    ``tokens``      ids, int ``[T]``: decodes first, by context length, so that those which attend together stand
                    together; then longer chunks in the order of the plan; then padding (id 0, position 0)
    ``positions``   of each token in its own request, int ``[T]``
    ``slots``       the cache row that each token's K/V is written to, int64 ``[T]``; padding's is the scratch row
    ``spans``       one a chunk, in the order in which they stand in the sequence
    ``logits``      indices of the tokens whose logits are wanted: in the order of the *plan*, of each chunk the last
                    ``num_logits``; then one a dead row of padding, which pays for its logits and nobody reads them
    ``num_logits``  how many of these are read
    """

    tokens: list[int]
    positions: list[int]
    slots: np.ndarray
    spans: list[Span]
    logits: list[int]
    num_logits: int

    @property
    def num_tokens(self) -> int:
        """Without the padding."""
        return self.spans[-1].stop if self.spans else 0


def pack(plan: Plan, kv: KVCache, scratch_row: int) -> Packed:
    """The plan's chunks, and its padding, as one sequence. ``kv`` has rows for all that they compute."""
    chunks = plan.chunks
    rows = [kv.rows(chunk.request, 0, chunk.stop) for chunk in chunks]
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (lengths[i] > 1, len(rows[i]) if lengths[i] == 1 else 0))
    tokens, positions, slots, spans = [], [], [], {}
    for i in order:
        request, start, stop = chunks[i]
        spans[i] = Span(len(tokens), lengths[i], rows[i])
        tokens += request.tokens(start, stop)
        positions += range(start, stop)
        slots.append(rows[i][start:])
    logits = [index for i, c in enumerate(chunks) for index in range(spans[i].stop - c.num_logits, spans[i].stop)]
    num_logits = len(logits)
    for pad in plan.padding:
        tokens += [0] * pad.num_tokens
        positions += [0] * pad.num_tokens
        slots.append(np.full(pad.num_tokens, scratch_row))
        logits += [len(tokens) - 1] * pad.dead
    return Packed(tokens, positions, np.concatenate(slots), [spans[i] for i in order], logits, num_logits)


WASTE = 512  # rows that are read and attended to in about the time that one more operation takes


def alike(spans: Sequence[Span]) -> list[list[Span]]:
    """Decodes of similar context together, longer chunks alone.

    Those who attend together are padded to the longest context among them. A group ends where one more decode would
    make all this padding more than ``WASTE`` rows: then it is cheaper to attend in two operations. ``spans`` as
    ``pack`` puts them, decodes in order of context.
    """
    groups: list[list[Span]] = []
    wasted = 0
    for span in spans:
        if span.length == 1 and groups:
            wasted += len(groups[-1]) * (len(span.rows) - len(groups[-1][-1].rows))
        if span.length > 1 or not groups or wasted > WASTE:
            groups.append([])
            wasted = 0
        groups[-1].append(span)
    return groups


def reachable(span: Span, window: int | None) -> np.ndarray:
    """The rows that some query of the span sees: the window of the first query begins ``window - 1`` keys before it."""
    return span.rows if window is None else span.rows[-(window + span.length - 1) :]


class Ragged(NamedTuple):
    """Queries and keys of ``n`` spans, each sort one behind the other: what kernels for ragged batches are told.

    ``rows``          of all keys, int64 ``[keys]``
    ``query_starts``  where the queries of each span begin, and the last of them end, int32 ``[n + 1]``
    ``key_starts``    the same of its keys
    ``max_queries``   the most of one span; ``max_keys`` likewise
    """

    rows: np.ndarray
    query_starts: np.ndarray
    key_starts: np.ndarray
    max_queries: int
    max_keys: int


def ragged(spans: Sequence[Span], window: int | None) -> Ragged:
    """All spans for one attention call. No key is padded, and none is there that no query of its span may see.

    Aligned at the bottom right the rest of the mask is as before: what was cut away stood before every window.
    """
    keys = [reachable(span, window) for span in spans]
    lengths = [span.length for span in spans], [len(rows) for rows in keys]
    starts = np.cumsum([[0, *part] for part in lengths], axis=1, dtype=np.int32)
    return Ragged(np.concatenate(keys), *starts, *map(max, lengths))


def visible(lengths: np.ndarray, queries: int, window: int | None) -> np.ndarray:
    """Who sees whom, bool ``[batch, queries, keys]``: the last keys of each request (``lengths``) are its queries' own.

    ``lengths``  int ``[batch]``: tokens of each request up to the end of its chunk; ``keys`` is the longest of them
    ``window``   a query sees this many keys, itself included; None: all up to its own

    Aligned at the bottom right. (``is_causal=True`` of PyTorch aligns at the top left, which is right only for the
    first chunk of a prompt.)
    """
    own = (lengths[:, None] - queries + np.arange(queries))[:, :, None]  # the query's own key
    key = np.arange(lengths.max())
    return (key <= own) & (key > own - (window or lengths.max()))
