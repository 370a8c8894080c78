"""Policies may change when a token is made, never which: swapped, recomputed, found in the prefix cache, shared by
several answers, displaced by somebody more urgent, and all of that in one run.

Real architectures in float64 against transformers' own ``generate``, as in ``test_equality.py``. Before every step NaN
goes into each row that nobody may read again, so K/V that was not copied, came back to the wrong rows or was found by
the wrong request cannot go unnoticed. Every test also asserts that what it is about has happened in its run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from helpers import check_drained, check_invariants, solo, timeline, unused_rows
from tiny_models import VOCAB, tiny_model

from minibatch import (
    ChunkedPrefill,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    TransformersModel,
)
from minibatch.clock import VirtualClock
from minibatch.models.attention import KVStore, Layer
from minibatch.policies import Fair, ReserveMaximum, Swap, by_priority, lowest_priority
from minibatch.prefix_cache import PrefixCachedKVCache

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = ["llama", "mistral", "gpt2"]  # grouped heads; a sliding window; learned positions and no grouped heads
ALL = ["llama", "qwen3", "gemma3", "mistral", "gpt2", "mixtral", "qwen3_moe"]
DRAWN = {"temperature": 0.9, "top_p": 0.95}
SCHEDULERS = {
    "whole": lambda **policies: ContinuousBatching(6, 64, **policies),
    "chunked": lambda **policies: ChunkedPrefill(11, 6, max_chunk=7, **policies),
}


# ---------------------------------------------------------------- runs and oracles


@cache
def model(family: str) -> TransformersModel:
    """Without an end of sequence, so that who is displaced when does not depend on a model's random weights."""
    return TransformersModel(tiny_model(family))


def text(seed: int, size: int) -> list[int]:
    return torch.randint(VOCAB, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(name: str, prompt: Sequence[int], new: int, at: float = 0.0, *, priority=0, client="x", salt=None, **params):
    return Request(tuple(prompt), SamplingParams(max_tokens=new, **params), name, at, priority, client, salt)


def poison(engine: Engine) -> None:
    """NaN in every row whose content nobody may ever read again, the scratch row apart."""
    free = unused_rows(engine)
    for tensor in [*engine.store.keys, *engine.store.values]:
        tensor[free] = float("nan")


def run(family: str, scheduler, kv, requests: Sequence[Request], after_step=None, **options) -> Engine:
    """Runs to the end, poisoned, and with the invariants checked, at every step; ``after_step`` may abort somebody."""
    engine = Engine(model(family), scheduler, kv, clock=VirtualClock(), **options)
    for request in requests:
        engine.submit(request)
    while True:
        poison(engine)
        report = engine.step()
        if report is None:
            break
        check_invariants(engine, report, fcfs=False)
        if after_step is not None:
            after_step(engine)
    check_drained(engine)
    return engine


@cache
def greedy(family: str, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    """What transformers says, with no code of ours."""
    return tuple(model(family).generate(prompt, new)[0])


def expected(family: str, request: Request, index: int) -> tuple[int, ...]:
    """The tokens of one of its answers: of ``generate``; if they are drawn, of a solo run with that answer's seed."""
    params = request.params
    if params.temperature == 0:
        return greedy(family, tuple(request.prompt), params.max_tokens)
    return solo(replace(request, params=replace(params, n=1, seed=params.seed + index)), model(family))


def check_tokens(family: str, engine: Engine, requests: Sequence[Request], cut: Sequence[str] = ()) -> None:
    """Every answer of every request; those in ``cut`` were aborted, and have a beginning of their tokens."""
    for request in requests:
        result = engine.results[request.request_id]
        answers = result.samples or (result,)
        assert len(answers) == request.params.n
        for index, answer in enumerate(answers):
            tokens = expected(family, request, index)
            if request.request_id in cut:
                assert answer.finish_reason == "abort" and len(answer.tokens) < len(tokens)
                tokens = tokens[: len(answer.tokens)]
            assert answer.tokens == tokens, answer.request_id


def happened(engine: Engine) -> dict[str, int]:
    """What the policies have done in a run, in tokens, rows or times."""
    steps, timelines = engine.trace.steps, engine.trace.timelines
    reasons = [reason for step in steps for _, reason in step.waiting]
    return {
        "hits": sum(known.num_cached for known in timelines if known.group is None),
        "found again": sum(known.num_recached for known in timelines),
        "copied": sum(step.copied_rows for step in steps),
        "forked": sum(len(step.forked) for step in steps),
        "swapped out": sum(step.swapped_out for step in steps),
        "swapped in": sum(step.swapped_in for step in steps),
        "recomputed": sum(step.recomputed for step in steps),
        "answers swapped out": sum("#" in p.request_id and p.swapped for step in steps for p in step.preempted),
        "displaced": sum(reason.startswith("preempted") and "outranks it" in reason for reason in reasons),
        "cut": sum(m.emitted is None for step in steps for m in step.members),
    }


# ---------------------------------------------------------------- one policy at a time


def crowd() -> list[Request]:
    """Six unrelated requests that outgrow 14 blocks of 4."""
    sizes = [(1, 20), (11, 14), (20, 12), (5, 18), (17, 9), (4, 16)]
    return [ask(f"r{i}", text(i, size), new, i // 2) for i, (size, new) in enumerate(sizes)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("family", SOME)
def test_swapped_requests_go_on_where_they_were(family, scheduler):
    """Fault: K/V comes back to other rows than the request's, or without some layer, or not at all."""
    engine = run(family, SCHEDULERS[scheduler](preemption=Swap()), PagedKVCache(14, 4), crowd())
    check_tokens(family, engine, crowd())
    done = happened(engine)
    assert done["swapped out"] == done["swapped in"] > 0 and done["recomputed"] == 0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("family", SOME)
def test_recomputed_requests_go_on_where_they_were_and_find_their_own_blocks(family, scheduler):
    """Fault: a preempted request adopts blocks that have been overwritten, or counts tokens of them twice."""
    engine = run(family, SCHEDULERS[scheduler](), PrefixCachedKVCache(14, 4), crowd())
    check_tokens(family, engine, crowd())
    done = happened(engine)
    assert done["found again"] > 0 and done["recomputed"] > 0 and done["swapped out"] == 0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("family", SOME)
def test_a_prefix_that_is_found_is_as_good_as_one_that_is_computed(family, scheduler):
    """Fault: blocks of another text, position or salt are found, or not all of a prompt's K/V is there afterwards."""
    shared = text(0, 13)
    first = ask("first", shared + text(1, 4), 6)
    requests = [
        first,
        ask("beside", shared + text(1, 4), 5, 1),  # chunked, the first has computed 7 tokens by then
        ask("longer", shared + text(2, 9), 9, 4),
        ask("equal", shared + text(1, 4), 9, 5),
        ask("whole blocks", (shared + text(2, 9))[:16], 5, 6),  # all full: the last block is computed all the same
        ask("shifted", text(3, 4) + shared, 5, 7),  # the same blocks, at other positions
        ask("skipping", shared[:4] + shared[8:] + text(3, 4), 5, 7),
        ask("salted", shared + text(1, 4), 5, 8, salt="other"),
        ask("continued", shared + text(1, 4) + list(expected(family, first, 0)), 4, 20),
    ]
    engine = run(family, SCHEDULERS[scheduler](), PrefixCachedKVCache(50, 4), requests)
    check_tokens(family, engine, requests)
    beside = 16 if scheduler == "whole" else 4
    hits = {"first": 0, "beside": beside, "longer": 12, "equal": 16, "whole blocks": 12, "shifted": 0, "skipping": 4}
    hits |= {"salted": 0, "continued": 20}
    assert {name: timeline(engine, name).num_cached for name in hits} == hits


@pytest.mark.parametrize("admission", [{}, {"admission": ReserveMaximum()}], ids=["by need", "maximum"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("family", SOME)
def test_answers_that_share_a_prompt_are_those_of_the_prompt_alone(family, scheduler, admission):
    """Fault: an answer writes into a block that others still read, or its copy lacks a layer."""
    requests = [
        ask("greedy", text(1, 10), 7, n=3),
        ask("drawn", text(2, 14), 8, 1, n=3, seed=5, **DRAWN),
        ask("ends apart", text(3, 7), 12, 9, n=3, seed=9, min_tokens=2, stop_token_ids=range(0, VOCAB, 6), **DRAWN),
        ask("full blocks", text(4, 8), 6, 12, n=2),
    ]
    engine = run(family, SCHEDULERS[scheduler](**admission), PagedKVCache(44, 4), requests)
    check_tokens(family, engine, requests)
    done = happened(engine)
    # Of 10 = 4 + 4 + 2, 14 and 7 tokens the last 2, 2 and 3 rows, for two answers each; of 8 tokens nothing.
    assert done["forked"] == 7 and done["copied"] == 2 * (2 + 2 + 3)
    drawn = {sample.tokens for sample in engine.results["drawn"].samples}
    assert len(drawn) == 3, "three seeds were meant to give three answers"


@pytest.mark.parametrize("family", SOME)
def test_a_request_that_is_aborted_on_the_host_harms_nobody(family):
    """Fault: its rows stay on the host, or the others go on in rows that it still counts as its own."""
    aborted: list[str] = []

    def abort_once(engine: Engine) -> None:
        if engine.kv.host and not aborted:
            aborted.append(next(iter(engine.kv.host)).request_id)
            engine.abort(aborted[0])

    parts = (SCHEDULERS["whole"](preemption=Swap()), PagedKVCache(14, 4))
    engine = run(family, *parts, crowd(), abort_once)
    check_tokens(family, engine, crowd(), cut=aborted)
    done = happened(engine)
    assert aborted and 0 < done["swapped in"] < done["swapped out"]


# ---------------------------------------------------------------- everything at once

SHARED = text(100, 13)
HOST = 34


def everything() -> list[Request]:
    """Three clients, four urgencies, a shared prefix, several answers, answers that end when they end."""
    return [
        ask("long", SHARED + text(1, 5), 22, 0, priority=3, client="x"),
        ask("three", SHARED + text(2, 2), 9, 0, priority=3, client="y", n=3),
        ask("other", text(3, 9), 24, 1, priority=2, client="x"),
        ask("drawn", SHARED + text(4, 4), 10, 2, priority=1, client="z", n=3, seed=3, **DRAWN),
        ask("urgent", text(5, 10), 6, 6, client="z"),
        ask("ends", SHARED + text(6, 1), 12, 8, priority=2, seed=8, stop_token_ids=range(0, VOCAB, 9), **DRAWN),
        ask("urgent too", SHARED + text(7, 9), 7, 13, client="y"),
        ask("again", SHARED + text(1, 5), 8, 20, priority=1, client="y"),
        ask("late", SHARED + text(8, 3), 9, 24, priority=2, client="z", n=3),
    ]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("family", ALL)
def test_everything_at_once_changes_no_token(family, scheduler):
    """Fault: two policies that are right alone are wrong together, such as a swapped answer whose blocks are shared,
    a prefix that is evicted while its finder is planned, or a displaced request that is found again by its tokens."""
    policy = Swap(victim=lowest_priority, displaces=by_priority, host_tokens=HOST)
    parts = (SCHEDULERS[scheduler](preemption=policy), PrefixCachedKVCache(17, 4))
    engine = run(family, *parts, everything(), order=Fair())
    check_tokens(family, engine, everything())
    done = happened(engine)
    never = {name for name, count in done.items() if not count}
    assert never <= ({"cut"} if scheduler == "whole" else set()), f"this run was meant to have: {never}"
    assert max(step.kv.host for step in engine.trace.steps) <= HOST


# ---------------------------------------------------------------- the rows themselves

DTYPES = ["float64", "float32", "bfloat16", "float16"]
CPU = torch.device("cpu")
COPIES = {
    "apart": ([1, 2], [7, 5]),
    "up": ([3, 4, 5], [4, 5, 6]),  # a source is a target: what was there before is what counts
    "down": ([4, 5, 6], [3, 4, 5]),
    "exchanged": ([2, 9], [9, 2]),
    "one to many": ([3, 3, 3], [0, 4, 8]),
    "none": ([], []),
}


def filled_store(dtype: str) -> KVStore:
    """Ten rows of three layers that are unlike each other, every number different from its neighbours."""
    kind = getattr(torch, dtype)
    layers = [Layer(2, 3, 4, kind, None), Layer(1, 5, 5, torch.float32, 7), Layer(4, 2, 1, kind, None)]
    store = KVStore(layers, 10, CPU)
    for number, table in enumerate(tables(store)):
        table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(number)))
    return store


def tables(store: KVStore) -> list[torch.Tensor]:
    return [*store.keys, *store.values]


def contents(store: KVStore) -> list[torch.Tensor]:
    return [table.clone() for table in tables(store)]


def rows_of(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copied_in_every_layer_and_nothing_else_changes(dtype, copied):
    """Fault: values or a layer are left out, a row is read after it was overwritten, the dtype changes."""
    source, target = map(rows_of, COPIES[copied])
    store = filled_store(dtype)
    wanted = contents(store)
    for table in wanted:
        table[target] = table[source]
    store.copy_rows(source, target)
    for table, want in zip(tables(store), wanted, strict=True):
        assert table.dtype is want.dtype and torch.equal(table, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_swapped_out_comes_back_to_other_rows(dtype):
    """Fault: the host holds a view of the rows, mixes two requests up, or brings rows back in another order."""
    store = filled_store(dtype)
    before = contents(store)
    store.swap_out("a", rows_of([7, 2, 9]))
    store.swap_out("b", rows_of([0, 7]))
    for table in tables(store):
        table.fill_(float("nan"))
    store.swap_in("a", rows_of([1, 8, 3]))
    store.swap_in("b", rows_of([9, 0]))
    untouched = [2, 4, 5, 6, 7, 10]  # the last one is the scratch row
    for table, old in zip(tables(store), before, strict=True):
        assert table.dtype is old.dtype
        assert torch.equal(table[[1, 8, 3, 9, 0]], old[[7, 2, 9, 0, 7]])
        assert table[untouched].isnan().all()


@pytest.mark.parametrize("end", ["swap_in", "swap_drop"])
def test_the_host_forgets_what_came_back_or_is_not_wanted_any_more(end):
    """Fault: host memory leaks, or one request's end takes another's rows away."""
    store = filled_store("float32")
    before = contents(store)
    store.swap_out("a", rows_of([1, 2]))
    store.swap_out("b", rows_of([3]))
    if end == "swap_in":
        store.swap_in("a", rows_of([1, 2]))
    else:
        store.swap_drop("a")
    with pytest.raises(KeyError):
        store.swap_in("a", rows_of([1, 2]))
    store.swap_in("b", rows_of([3]))
    with pytest.raises(KeyError):
        store.swap_drop("b")
    assert all(torch.equal(*pair) for pair in zip(tables(store), before, strict=True))


def test_a_swap_leaves_the_rows_as_they_are_until_somebody_takes_them():
    """Fault: swapping out empties the rows, which another request may share."""
    store = filled_store("float32")
    before = contents(store)
    store.swap_out("a", rows_of([1, 2]))
    assert all(torch.equal(*pair) for pair in zip(tables(store), before, strict=True))
