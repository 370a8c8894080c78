"""Scheduling may change when a token is made, never which: real architectures against transformers' own ``generate``.

In float64, so that equal means equal. The reference shares no code with ours: stock attention, stock cache, each
request alone. The pool is so small that requests are preempted, the budget so small that prompts are cut, prompts and
answers are longer than the sliding windows, and one request is aborted in the middle.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import check_drained, check_invariants
from tiny_models import VOCAB, WINDOW, tiny_model

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    StaticBatching,
    TransformersModel,
)
from minibatch.clock import VirtualClock

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["llama", "qwen3", "gemma3", "mistral", "gpt2", "mixtral", "qwen3_moe"]
EOS = 7
PARTS = {
    "static": lambda: (StaticBatching(3), ContiguousKVCache(3, 40)),
    "static on blocks": lambda: (StaticBatching(3, max_wait=2.0), PagedKVCache(13, 4)),
    "continuous": lambda: (ContinuousBatching(3), ContiguousKVCache(3, 40)),
    "prefill first": lambda: (ContinuousBatching(4, phase_order="prefill-first"), ContiguousKVCache(4, 40)),
    "paged": lambda: (ContinuousBatching(5), PagedKVCache(13, 4)),
    "paged, prefills first": lambda: (ContinuousBatching(5, first="prefill"), PagedKVCache(26, 2)),
    "chunked": lambda: (ChunkedPrefill(6, 5), PagedKVCache(13, 4)),
    "chunked, capped": lambda: (ChunkedPrefill(9, 5, max_chunk=4), PagedKVCache(13, 4)),
    "chunked in slots": lambda: (ChunkedPrefill(5, 3), ContiguousKVCache(3, 40)),
}


@cache
def model(family: str) -> TransformersModel:
    return TransformersModel(tiny_model(family, eos_token_id=EOS))


@cache
def requests() -> tuple[Request, ...]:
    """Seven, of 1 to 4 windows; the third is the one that is aborted."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 20), (11, 14), (20, 12), (WINDOW, 18), (WINDOW + 1, 9), (17, 1), (4, 22)]
    prompts = [torch.randint(8, VOCAB, (size,), generator=generator).tolist() for size, _ in sizes]
    return tuple(
        Request(prompt, SamplingParams(max_tokens=new), request_id=f"r{i}", arrival_time=float(i // 2))
        for i, (prompt, (_, new)) in enumerate(zip(prompts, sizes, strict=True))
    )


@cache
def reference(family: str, index: int) -> tuple[int, ...]:
    request = requests()[index]
    return tuple(model(family).generate(request.prompt, request.params.max_tokens)[0])


def poison(engine: Engine) -> None:
    """NaN in every row that nobody's token is in, the scratch row apart: what is read by mistake spreads."""
    mine = [engine.kv.rows(r, 0, 0 if r.is_finished else r.num_computed).tolist() for r in engine.active]
    free = sorted(set(range(engine.kv.num_rows)) - {row for rows in mine for row in rows})
    for tensor in [*engine.store.keys, *engine.store.values]:
        tensor[free] = float("nan")


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_generate(family, parts):
    scheduler, kv = PARTS[parts]()
    engine = Engine(model(family), scheduler, kv, clock=VirtualClock())
    for request in requests():
        engine.submit(request)
    while True:
        poison(engine)
        report = engine.step()
        if report is None:
            break
        check_invariants(engine, report)
        if any(member.request_id == "r2" and member.stop == 21 for member in report.members):
            engine.abort("r2")
    check_drained(engine)
    for index, request in enumerate(requests()):
        result, expected = engine.results[request.request_id], reference(family, index)
        end = "stop" if expected[-1] == EOS else "length"
        if request.request_id == "r2" and len(expected) > 3:
            expected, end = expected[:2], "abort"
        assert result.tokens == expected, request.request_id
        assert result.finish_reason == end
    if "block" not in parts and kv.grows:
        assert sum(t.num_preemptions for t in engine.trace.timelines) > 0, "the pool was meant to be too small"


def test_the_reference_ends_in_both_ways():
    """Else the end of a sequence is not tested: some answers end by themselves, some are cut."""
    ends = [reference(family, i)[-1] == EOS for family in FAMILIES for i in range(len(requests()))]
    assert True in ends and False in ends
