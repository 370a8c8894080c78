"""Tables that point to the same blocks, what is copied between these, and both as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from minibatch import plot_style
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, RowCopy
from minibatch.labs.states import accepted
from minibatch.labs.strips import EMPTY, GONE, Cell, strips
from minibatch.labs.trial import Trial, request, run
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Scheduler
from minibatch.request import Request, RequestState

Copied = dict[str, list[int]] | None


def forked(part: type[PagedKVCache], tokens: int, ahead: int = 0) -> tuple[PagedKVCache, RequestState, RequestState]:
    """8 blocks of 4; ``a`` has computed its prompt and reserved ``ahead`` more tokens, and ``b`` shares all of it."""
    kv = part(8, 4)
    a, b = accepted(kv, request(tokens, 8), request(tokens, 8))
    kv.reserve(a, tokens)
    if ahead:
        kv.reserve(a, tokens + ahead)
    a.num_computed = b.num_computed = tokens
    kv.fork(a, b)
    return kv, a, b


def answers_of(asked: Request, scheduler: Scheduler, num_blocks: int, case: str, *others: Request) -> Trial:
    """Runs a request with several answers; each has the tokens of a request of its own, in slots."""
    trial = run([asked, *others], scheduler, PagedKVCache(num_blocks, 4), case=f"{case}; {num_blocks} blocks of 4")
    for number, answer in enumerate(trial.results["a"].samples):
        one = replace(asked, params=replace(asked.params, n=1, seed=asked.params.seed + number))
        alone = Engine(ToyModel(), ContinuousBatching(1), ContiguousKVCache(1, 64)).run([one])
        idea = "Each answer has the tokens that it has alone: sharing blocks must not change them."
        trial.expect(answer.tokens, alone[0].tokens, idea=idea, what=f"tokens of answer {number}")
    return trial


def as_lists(copy: RowCopy | None) -> Copied:
    """What is to be copied, for messages."""
    if copy is None:
        return None
    source, target = copy
    return {"from": np.asarray(source).tolist(), "to": np.asarray(target).tolist()}


def tables_drawn(
    kv: PagedKVCache,
    holders: Sequence[RequestState],
    says: str,
    copy: Copied = None,
    before: Mapping[str, Sequence[int]] | None = None,
) -> Figure:
    """The blocks of the pool with their rows, whose tables point to them, and what is copied; ``before``: the tables
    that were there, by label."""
    size, colors = kv.unit_size, dict(zip([one.label for one in holders], plot_style.OWNERS, strict=False))
    tables = {
        f"{name} before": [Cell(f"block {b}", colors[name], size) for b in blocks]
        for name, blocks in (before or {}).items()
    }
    tables |= {
        f"table of {one.label}": [Cell(f"block {b}", colors[one.label], size) for b in kv.units(one)] for one in holders
    }
    used = [block for one in holders for block in kv.units(one)]
    blocks = range(max([*used, 1]) + 1)
    sources = dict(zip(copy["to"], copy["from"], strict=False)) if copy else {}
    rows, counts = [], []
    for block in blocks:
        owners = [one.label for one in holders if block in kv.units(one)]
        color = EMPTY if not owners else colors[owners[0]] if len(owners) == 1 else GONE
        rows += [Cell(row, color) for row in range(block * size, (block + 1) * size)]
        counts.append(Cell(f"{' and '.join(owners) or 'nobody'}: {kv.pool.references[block]}", color, size))
    pool = {"pool": [Cell(f"block {block}", EMPTY, size) for block in blocks], "its rows": rows, "references": counts}
    copied = {"copied from row": [Cell(sources.get(row.text, "")) for row in rows]} if sources else {}
    return strips(tables | pool | copied, says)
