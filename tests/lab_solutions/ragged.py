"""Lab ragged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lab_solutions import Wrong
from minibatch.models.packing import Packed, Span


def _by_hand(plan, kv, scratch_row):
    """One list of (token, position, slot), and notes on where each chunk is in it."""
    ones = sorted((c for c in plan.chunks if c.stop - c.start == 1), key=lambda chunk: chunk.stop)
    entries, place = [], {}
    for chunk in ones + [c for c in plan.chunks if c.stop - c.start > 1]:
        place[chunk.request] = len(entries)
        for position in range(chunk.start, chunk.stop):
            [token] = chunk.request.tokens(position, position + 1)
            [row] = kv.rows(chunk.request, position, position + 1)
            entries.append((token, position, int(row)))
    spans = [
        Span(first, chunk.stop - chunk.start, kv.rows(chunk.request, 0, chunk.stop))
        for first, chunk in sorted((place[c.request], c) for c in plan.chunks)
    ]
    wanted = []
    for chunk in plan.chunks:
        end = place[chunk.request] + chunk.stop - chunk.start
        wanted += [end - back for back in range(chunk.num_logits, 0, -1)]
    read = len(wanted)
    for pad in plan.padding:
        entries += [(0, 0, scratch_row)] * pad.num_tokens
        if pad.dead:
            wanted.append(len(entries) - 1)
    tokens, positions, slots = ([entry[i] for entry in entries] for i in range(3))
    return Packed(tokens, positions, np.array(slots), spans, wanted, read)


def _counted_through(plan, kv, scratch_row):
    packed = _by_hand(plan, kv, scratch_row)
    return replace(packed, positions=[*range(packed.num_tokens), *packed.positions[packed.num_tokens :]])


def _from_zero(plan, kv, scratch_row):
    packed = _by_hand(plan, kv, scratch_row)
    positions = [i for span in packed.spans for i in range(span.length)]
    return replace(packed, positions=positions + packed.positions[len(positions) :])


def _logits_as_packed(plan, kv, scratch_row):
    packed = _by_hand(plan, kv, scratch_row)
    return replace(packed, logits=sorted(packed.logits))


def _reads_its_own(plan, kv, scratch_row):
    packed = _by_hand(plan, kv, scratch_row)
    return replace(packed, spans=[span._replace(rows=span.rows[-span.length :]) for span in packed.spans])


def _pads_in_the_cache(plan, kv, scratch_row):
    packed = _by_hand(plan, kv, scratch_row)
    slots = list(packed.slots[: packed.num_tokens])
    for pad in plan.padding:
        slots += [int(kv.rows(pad.request, 0, 1)[0])] * pad.num_tokens
    return replace(packed, slots=np.array(slots))


def _own(lengths, queries):
    """The key of each query itself, as [batch, queries, 1]."""
    return (lengths[:, None] - queries + np.arange(queries))[:, :, None]


def _top_left(lengths, queries, window):
    key, query = np.arange(lengths.max()), np.arange(queries)[:, None]
    mask = (key <= query) & (key > query - (window or lengths.max()))
    return np.broadcast_to(mask, (len(lengths), *mask.shape)).copy()


def _one_more(lengths, queries, window):
    own = _own(lengths, queries)
    key = np.arange(lengths.max())
    return (key <= own) & (key >= own - (window or lengths.max()))


def _as_the_longest(lengths, queries, window):
    own = _own(np.full(len(lengths), lengths.max()), queries)
    key = np.arange(lengths.max())
    return (key <= own) & (key > own - (window or lengths.max()))


def _sees_ahead(lengths, queries, window):
    own = _own(lengths, queries)
    key = np.arange(lengths.max())
    return (key < lengths[:, None, None]) & (key > own - (window or lengths.max()))


def _one_window_for_all(lengths, queries, window):
    own = _own(lengths, queries)
    key = np.arange(lengths.max())
    return (key <= own) & (key > lengths[:, None, None] - queries - (window or lengths.max()))


def _by_tri(lengths, queries, window):
    keys = int(max(lengths))
    masks = []
    for length in lengths.tolist():
        mask = np.tri(queries, keys, length - queries)
        if window is not None:
            mask -= np.tri(queries, keys, length - queries - window)
        masks.append(mask > 0)
    return np.stack(masks)


def _by_loops(lengths, queries, window):
    seen = np.zeros((len(lengths), queries, max(lengths)), dtype=bool)
    for n, length in enumerate(lengths):
        for query in range(queries):
            stop = length - queries + query + 1
            seen[n, query, max(0, stop - window) if window else 0 : stop] = True
    return seen


WRONG = {
    "ragged.1": [
        Wrong("positions count through the sequence", _counted_through, "Positions begin anew"),
        Wrong("every chunk begins at position 0", _from_zero, "A later chunk goes on"),
        Wrong("logits in the order of the sequence", _logits_as_packed, "in the order of the plan"),
        Wrong("a chunk reads what it writes", _reads_its_own, "reads the rows of all tokens"),
        Wrong("padding writes to rows of its request", _pads_in_the_cache, "to the scratch row"),
    ],
    "ragged.2": [
        Wrong("aligned at the top left, as is_causal=True", _top_left, "bottom right"),
        Wrong("a window of one more", _one_more, "The query's own key counts"),
        Wrong("all requests as long as the longest", _as_the_longest, "aligned at its own end"),
        Wrong("a chunk sees all of itself", _sees_ahead, "none after it"),
        Wrong("the window of the first query for all", _one_window_for_all, "a window of its own"),
    ],
}
RIGHT = {"ragged.1": [_by_hand], "ragged.2": [_by_tri, _by_loops]}
