"""Attention in one ragged call, by an emulation of FlashAttention: the same as one request after the other."""

import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import varlen_emulation
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, VOCAB, WINDOW, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
from minibatch.models import UnsupportedModel, varlen
from minibatch.models.attention import KVStore, Layer, Step, attend_batched, attend_each
from minibatch.models.packing import Span, ragged
from minibatch.models.varlen import attend_for, attend_varlen, kernel
from minibatch.plan import Chunk, Padding, Plan
from minibatch.request import RequestState

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-12
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(varlen, "kernel", lambda: varlen_emulation.varlen_attn)


def new_request(num_tokens):
    prompt = [(7 * i + num_tokens) % VOCAB for i in range(num_tokens)]
    facts = {"arrival_time": 0.0, "max_new_tokens": 9, "stop_token_ids": frozenset(), "seed": 0, "timeline": None}
    return RequestState(request=Request(prompt), request_id="r", label="r", prompt=prompt, **facts)


def mixed_plan(kv, chunks, padding=0):
    """Chunks ``(start, stop)`` of as many requests, which have rows."""
    planned = [Chunk(new_request(stop), start, stop) for start, stop in chunks]
    for request, _, stop in planned:
        kv.reserve(request, stop)
    pads = (Padding(planned[0].request, padding, dead=False),) if padding else ()
    return Plan(chunks=tuple(planned), padding=pads)


# --- the index arithmetic ---


def test_spans_stand_behind_one_another():
    rows = np.arange(20)
    spans = [Span(0, 1, rows[:3]), Span(1, 1, rows[3:4]), Span(2, 4, rows[4:10])]
    every = ragged(spans, window=None)
    assert every.rows.tolist() == list(range(10))
    assert every.query_starts.tolist() == [0, 1, 2, 6]
    assert every.key_starts.tolist() == [0, 3, 4, 10]
    assert every.query_starts.dtype == every.key_starts.dtype == np.int32
    assert every[3:] == (4, 6)


def test_keys_before_every_window_are_not_gathered():
    rows = np.arange(20)
    near = ragged([Span(0, 1, rows[:3]), Span(1, 4, rows[4:10])], window=2)
    assert near.rows.tolist() == [1, 2, *range(5, 10)]  # the first of the four queries is row 6: it sees 5 and 6
    assert near.key_starts.tolist() == [0, 2, 7]
    assert near[3:] == (4, 5)


# --- the same result ---


def noise(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


CHUNKS = st.tuples(st.integers(0, 12), st.one_of(st.just(1), st.integers(1, 9))).map(lambda c: (c[0], c[0] + c[1]))


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(CHUNKS, min_size=1, max_size=6),
    padding=st.integers(0, 3),
    window=st.one_of(st.none(), st.integers(1, 12)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    scale=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 99),
)
def test_one_call_is_one_request_after_another(chunks, padding, window, heads, scale, seed):
    kv = PagedKVCache(num_blocks=60, block_size=4)
    kv.reserve(new_request(1), 1)  # row 0 is somebody else's
    plan = mixed_plan(kv, chunks, padding)
    cached = np.concatenate([kv.rows(chunk.request, 0, chunk.start) for chunk in plan.chunks])
    answers = []
    for attend in (attend_varlen, attend_each):
        store = KVStore([Layer(heads[1], 8, 8, torch.float64, window)], kv.num_rows, CPU)
        for i, table in enumerate((*store.keys, *store.values)):
            table[:-1] = float("nan")  # only what is cached, and the scratch row, may be read
            table[cached] = noise(seed + i, len(cached), heads[1], 8)
        step = Step(plan, kv, store, CPU, attend)
        qkv = (noise(seed + 9 + i, plan.num_tokens, count, 8) for i, count in enumerate((heads[0], heads[1], heads[1])))
        answers.append(step.attend(*qkv, window, scale))
    assert (answers[0] - answers[1]).abs().max() < EXACT


STORY = [  # chunks of four requests, and padding: prompts together and in pieces, decodes beside them, then alone
    ({0: 11, 1: 3}, 0),
    ({2: 6, 0: 1, 1: 1, 3: 1}, 4),
    ({1: 1, 2: 4, 0: 1}, 1),
    ({2: 7, 3: 1, 1: 1}, 0),
    ({3: 1, 1: 1, 0: 1, 2: 1}, 2),
]


def story(executor):
    """All logits of the story, one tensor an iteration. Its texts are known beforehand."""
    kv = PagedKVCache(num_blocks=40, block_size=4)
    store = executor.allocate(kv.num_rows)
    requests = [new_request(40 + i) for i in range(4)]
    for plan, padding in STORY:
        chunks = [Chunk(requests[i], requests[i].num_computed, requests[i].num_computed + n) for i, n in plan.items()]
        pads = (Padding(requests[0], padding, dead=True),) if padding else ()
        for request, _, stop in chunks:
            request.num_tokens = stop  # so that its last token has logits
            kv.reserve(request, stop)
        yield executor.forward(Plan(chunks=tuple(chunks), padding=pads), kv, store)
        for request, _, stop in chunks:
            request.num_computed = stop


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_all_families_are_those_of_the_readable_loop(family):
    ours, readable = (TransformersModel(tiny_model(family), attend=attend) for attend in (attend_varlen, attend_each))
    for logits, expected in zip(story(ours), story(readable), strict=True):
        assert len(logits) and (logits - expected).abs().max() < EXACT


PARTS = {
    "static": lambda: (StaticBatching(3), ContiguousKVCache(3, 40)),
    "paged": lambda: (ContinuousBatching(5), PagedKVCache(13, 4)),
    "chunked": lambda: (ChunkedPrefill(6, 5), PagedKVCache(13, 4)),
}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_whole_runs_say_the_same(family, parts):
    answers = []
    for attend in (attend_varlen, attend_batched):
        engine = Engine(TransformersModel(tiny_model(family), attend=attend), *PARTS[parts](), clock=VirtualClock())
        sizes = [(1, 12), (11, 9), (20, 8), (WINDOW, 10), (17, 1), (4, 14)]
        requests = [
            Request([(3 * i + size) % VOCAB for i in range(size)], SamplingParams(max_tokens=new), f"r{size}")
            for size, new in sizes
        ]
        answers.append([result.tokens for result in engine.run(requests)])
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [new for _, new in sizes]


# --- nobody waits for the device ---


class Uploads(TorchDispatchMode):
    """Counts copies from the host, and finds the one thing that waits and is not noticed on the meta device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith("index_put") and args[2].dim():  # a number is filled in without looking
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), "has to count what is true"
        out = func(*args, **(kwargs or {}))
        kinds = {x.device.type for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)}
        self.count += kinds == {"cpu", "meta"}
        return out


def on_the_meta_device(family):
    """A model whose tensors have shapes and no numbers, as a GPU's have none yet for a host that does not wait."""
    executor = TransformersModel(tiny_model(family, dtype=torch.bfloat16))
    executor.model.to("meta")
    executor.device = torch.device("meta")
    return executor


FORWARDS = [("llama", attend_varlen, 3), ("gemma3", attend_varlen, 6), ("qwen3_moe", attend_varlen, 3)]
FORWARDS += [("llama", attend_batched, 3), ("gemma3", attend_batched, 5), ("qwen3_moe", attend_batched, 3)]


@pytest.mark.parametrize("family, attend, uploads", FORWARDS)
def test_the_forward_pass_never_waits_for_the_device(monkeypatch, family, attend, uploads):
    """What a kind of layers needs is uploaded when the first of them asks: rows and lengths; or rows for each group,
    and a mask where lengths differ."""
    monkeypatch.setattr(varlen, "kernel", kernel)  # the real one knows what shape it would return
    executor, kv = on_the_meta_device(family), PagedKVCache(num_blocks=40, block_size=4)
    plan = mixed_plan(kv, [(8, 9), (6, 7), (0, 5)], padding=2)
    executor.attend = attend
    with Uploads() as seen:
        logits = executor.forward(plan, kv, executor.allocate(kv.num_rows))
    assert logits.shape == (3, VOCAB) and logits.is_meta
    assert seen.count == uploads + 4  # tokens, positions, slots, places of the logits


WAITING = {
    "a number": lambda x: x[0].item(),
    "a decision": lambda x: bool((x > 0).any()),
    "a list": lambda x: x.tolist(),
    "a copy to the host": lambda x: x.to("cpu", non_blocking=True),
    "places": lambda x: x.nonzero(),
    "a selection": lambda x: x[x > 0],
    "another selection": lambda x: x.masked_select(x > 0),
    "a comparison": lambda x: torch.equal(x, x),
    "different numbers": lambda x: x.unique(),
    "repetitions": lambda x: x.repeat_interleave(x.long()),
    "an assignment to a selection": lambda x: x.__setitem__(x > 0, x),
}


@pytest.mark.parametrize("what", WAITING)
def test_what_would_wait_is_noticed(what):
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)), Uploads():
        WAITING[what](torch.zeros(3, device="meta"))


def test_on_a_cpu_nothing_is_copied_and_a_gpu_fetches_from_pinned_memory(monkeypatch):
    kv = PagedKVCache(num_blocks=4, block_size=4)
    step = Step(mixed_plan(kv, [(0, 3)]), kv, KVStore([], kv.num_rows, CPU), CPU, attend_each)
    rows = np.arange(5)
    assert step.tensor(rows).data_ptr() == rows.ctypes.data
    pinned = SimpleNamespace(to=lambda device, non_blocking: (device.type, non_blocking))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned)
    step.device = torch.device("cuda")
    assert step.tensor(rows) == ("cuda", True)


# --- which, and whether there is one ---


def test_a_gpu_and_sixteen_bits_are_needed():
    def layer(dtype=torch.bfloat16, key_dim=64, value_dim=64):
        return Layer(2, key_dim, value_dim, dtype, None)

    gpu = torch.device("cuda")
    assert attend_for(gpu, [layer(), layer(torch.float16)]) is attend_varlen
    assert attend_for(CPU, [layer()]) is attend_batched
    for other in (
        layer(torch.float32),
        layer(torch.float64),
        layer(key_dim=60),
        layer(value_dim=32),
        layer(key_dim=512),
    ):
        assert attend_for(gpu, [layer(), other]) is attend_batched


def test_older_versions_of_torch_are_refused_by_number(monkeypatch):
    for module in (None, SimpleNamespace(varlen_attn=lambda query, key, value: query)):
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        with pytest.raises(UnsupportedModel, match=rf"needs torch >= 2\.11 .*, here is {torch.__version__[:4]}"):
            kernel.__wrapped__()


def test_the_emulation_takes_the_arguments_of_the_real_call():
    real, emulated = (inspect.signature(f).parameters for f in (kernel(), varlen_emulation.varlen_attn))
    assert [(p.name, p.kind, p.default) for p in emulated.values()] == [
        (p.name, p.kind, p.default) for p in real.values() if p.name in emulated
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"num_splits": None},
        {"max_k": 2},
        {"cu_seq_k": torch.tensor([0, 3])},  # int64
        {"cu_seq_q": torch.tensor([0, 1, 2], dtype=torch.int32)},
        {"key": torch.zeros(3, 3, 8, dtype=torch.float64)},
        {"value": torch.zeros(3, 2, 16, dtype=torch.float64)},
        {"query": torch.zeros(2, 4, 8)},
    ],
)
def test_the_emulation_refuses_what_the_real_call_would(changed):
    lengths = {"cu_seq_q": [0, 2], "cu_seq_k": [0, 3]}
    arguments = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in lengths.items()}
    arguments |= {"query": torch.zeros(2, 4, 8, dtype=torch.float64), "max_q": 2, "max_k": 3}
    arguments |= {name: torch.zeros(3, 2, 8, dtype=torch.float64) for name in ("key", "value")}
    arguments |= {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
    varlen_emulation.varlen_attn(**arguments)
    with pytest.raises(AssertionError):
        varlen_emulation.varlen_attn(**arguments | changed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_real_call_on_a_gpu(monkeypatch, family):
    monkeypatch.setattr(varlen, "kernel", kernel)
    model = tiny_model(family, dtype=torch.bfloat16).cuda()
    ours = TransformersModel(model, attend=attend_varlen)
    reference = TransformersModel(tiny_model(family, dtype=torch.bfloat16).float(), attend=attend_each)
    for logits, expected in zip(story(ours), story(reference), strict=True):
        assert (logits.cpu() - expected).abs().max() < 0.5
