"""Decodes replayed from recordings: the same tokens, whatever is padded, and whichever recording is replayed.

There is no GPU here. In place of a CUDA graph stands a recording of PyTorch's operations, with the tensors that they
read and wrote and the numbers that they were given. As a graph does, it repeats them on the same memory, and runs no
Python: a tensor that was made elsewhere, or a number that has changed since, is noticed.
"""

import gc

import pytest
import torch
import varlen_emulation
from tiny_models import VOCAB, WINDOW, tiny_model
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
from minibatch.models import decode_graphs, varlen
from minibatch.models.decode_graphs import LARGEST, DecodeGraphs, StaticStep, bucket
from minibatch.models.varlen import attend_varlen
from minibatch.policies import Swap
from minibatch.prefix_cache import PrefixCachedKVCache

pytestmark = pytest.mark.usefixtures("one_thread")


class RecordedGraph(TorchDispatchMode):
    """Stands in for CudaGraph."""

    def __init__(self, function, device, pool):
        super().__init__()
        self.operations, self.num_replays, self.pool = [], 0, pool or object()
        self.tensors_given, self.memory = set(), {}
        function()  # warming up
        with self:
            function()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in func.__name__, "a capture cannot wait for a number"
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        self.tensors_given.update(place for place in map(memory, tensors(args)) if place not in self.memory)
        self.memory |= {memory(x): x for x in tensors(out) if memory(x) not in self.tensors_given}
        return out

    def replay(self):
        self.num_replays += 1
        for tensor in self.memory.values():  # of the graph's own nothing is left from last time
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        for func, args, kwargs, recorded in self.operations:
            for old, new in zip(tensors(recorded), tensors(func(*args, **kwargs)), strict=True):
                if memory(old) != memory(new):  # neither a view nor written in place
                    old.copy_(new)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(varlen, "kernel", lambda: varlen_emulation.varlen_attn)
    monkeypatch.setattr(decode_graphs, "CudaGraph", RecordedGraph)


class Replaying(TransformersModel):
    """Replays decodes."""

    graphs = None  # not while the model is looked at

    def __init__(self, model):
        super().__init__(model, attend=attend_varlen)
        if model.dtype is torch.float64:  # where the usual way to compute experts waits to see who goes to which
            model.set_experts_implementation("batched_mm")
        self.graphs = DecodeGraphs(self.compute, self.layers, self.device)

    def compute(self, step):
        return self.model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.logit_index,
            minibatch_step=step,
        ).logits[0]

    def forward(self, plan, kv, store):
        logits = self.graphs and self.graphs.run(plan, kv, store)
        return super().forward(plan, kv, store) if logits is None else logits

    def replays(self, store):
        return {size: step.graph.num_replays for size, step in self.graphs.steps.get(store, {}).items()}


def make_requests(sizes):
    return [
        Request([(3 * i + size) % VOCAB for i in range(size)], SamplingParams(max_tokens=new), f"r{i}", float(i // 2))
        for i, (size, new) in enumerate(sizes)
    ]


def poison(engine):
    """NaN in every row that nobody may read any more."""
    kept = [engine.kv.rows(r, 0, 0 if r.is_finished else r.num_computed).tolist() for r in engine.active]
    if isinstance(engine.kv, PrefixCachedKVCache):
        size = engine.kv.unit_size
        kept += [range(known.block * size, (known.block + 1) * size) for known in engine.kv.pool.known()]
    free = sorted(set(range(engine.kv.num_rows)).difference(*kept))
    for table in (*engine.store.keys, *engine.store.values):
        table[free] = float("nan")


def answers(engine, requests):
    poison(engine)
    results = engine.run(requests, lambda report: poison(engine))
    return [result.tokens for result in results]


SIZES = [(1, 12), (11, 9), (20, 8), (WINDOW, 10), (17, 1), (4, 14), (17, 6)]
PARTS = {
    "static": lambda: (StaticBatching(3), ContiguousKVCache(3, 40)),
    "preempted": lambda: (ContinuousBatching(5), PagedKVCache(13, 4)),
    "swapped": lambda: (ContinuousBatching(5, preemption=Swap()), PagedKVCache(13, 4)),
    "prefix cache": lambda: (ContinuousBatching(4), PrefixCachedKVCache(20, 4)),
    "chunked": lambda: (ChunkedPrefill(6, 5), PagedKVCache(20, 4)),
}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_whole_runs_say_the_same(family, parts):
    replaying, plain = Replaying(tiny_model(family)), TransformersModel(tiny_model(family))
    engines = [Engine(model, *PARTS[parts](), clock=VirtualClock()) for model in (replaying, plain)]
    requests = make_requests(SIZES)
    assert answers(engines[0], requests) == answers(engines[1], requests)
    replays = replaying.replays(engines[0].store)
    steps = engines[0].trace.steps
    decodes = [
        s for s in steps if not s.padding and all(m.stop - m.start == 1 and m.emitted is not None for m in s.members)
    ]
    assert 5 < sum(replays.values()) == len(decodes) < len(steps)
    assert len(replays) > 1 or parts == "static"
    if parts in ("preempted", "swapped"):
        assert sum(t.num_preemptions for t in engines[0].trace.timelines), "the pool was meant to be too small"


def differences(model, parts):
    """Of the logits of each replay and of a usual forward pass, in a run of such an engine."""
    replaying, found = Replaying(model), []

    def both(*arguments):
        replayed = replaying.graphs.run(*arguments)
        computed = TransformersModel.forward(replaying, *arguments)  # writes the same K/V once more
        if replayed is not None:
            found.append((replayed - computed).abs().max().item())
        return computed

    replaying.forward = both
    Engine(replaying, *PARTS[parts](), clock=VirtualClock()).run(make_requests(SIZES))
    assert len(found) > 5
    return found


@pytest.mark.parametrize("family", ["mistral", "gpt2", "exaone4", "qwen3_moe"])
def test_logits_of_other_families_are_the_same(family):
    assert max(differences(tiny_model(family), "preempted")) < 1e-12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_real_graphs_on_a_gpu(monkeypatch, family):
    monkeypatch.undo()
    assert max(differences(tiny_model(family, dtype=torch.bfloat16).cuda(), "preempted")) < 0.5


def test_batches_cross_sizes_and_so_do_their_keys():
    """Eleven requests end one by one, and have more than 1,024 keys at first."""
    sizes = [(100 - i, 2 + i) for i in range(11)]
    requests = [Request(r.prompt, r.params, r.request_id, 0.0) for r in make_requests(sizes)]
    replaying, plain = Replaying(tiny_model("gemma3")), TransformersModel(tiny_model("gemma3"))
    engines = [
        Engine(model, ContinuousBatching(11), PagedKVCache(300, 4), clock=VirtualClock())
        for model in (replaying, plain)
    ]
    assert answers(engines[0], requests) == answers(engines[1], requests)
    assert replaying.replays(engines[0].store) == {(16, 2048): 1, (16, 1024): 2, (8, 1024): 4, (4, 1024): 2} | {
        (2, 1024): 1,
        (1, 1024): 1,
    }


def test_two_engines_on_one_model_have_graphs_of_their_own_which_end_with_them():
    replaying, plain = Replaying(tiny_model("llama")), TransformersModel(tiny_model("llama"))
    parts = [lambda: (ContinuousBatching(3), PagedKVCache(40, 4)), lambda: (ContinuousBatching(3), PagedKVCache(30, 8))]
    requests = [make_requests(SIZES[:3]), make_requests(SIZES[3:])]
    expected = [Engine(plain, *p(), clock=VirtualClock()).run(r) for p, r in zip(parts, requests, strict=True)]
    engines = [Engine(replaying, *p(), clock=VirtualClock()) for p in parts]
    for engine, its in zip(engines, requests, strict=True):
        for request in its:
            engine.submit(request)
    while [engine for engine in engines if engine.step()]:  # in turns
        pass
    for engine, results in zip(engines, expected, strict=True):
        assert [engine.results[r.request_id].tokens for r in results] == [r.tokens for r in results]
        assert replaying.replays(engine.store)
    graphs = [step.graph for steps in replaying.graphs.steps.values() for step in steps.values()]
    assert len({graph.pool for graph in graphs}) == 1, "they share their memory"
    assert len(replaying.graphs.steps) == 2
    del engine, engines[0]
    gc.collect()
    assert len(replaying.graphs.steps) == 1


def test_logits_are_not_overwritten_by_the_next_replay():
    replaying, seen = Replaying(tiny_model("llama")), []
    forward = replaying.forward

    def keeping(*arguments):
        logits = forward(*arguments)
        seen.append((logits, logits.clone()))
        return logits

    replaying.forward = keeping
    Engine(replaying, ContinuousBatching(2), PagedKVCache(40, 4), clock=VirtualClock()).run(make_requests(SIZES[:2]))
    assert all(torch.equal(logits, copied) for logits, copied in seen)


def test_sizes():
    batches = [bucket(requests, 1)[0] for requests in (1, 2, 3, 4, 5, 8, 9, 16, 17, LARGEST)]
    assert batches == [1, 2, 4, 4, 8, 8, 16, 16, 24, LARGEST]
    assert [bucket(4, keys)[1] for keys in (4, 1024, 1025, 2048, 2049)] == [1024, 1024, 2048, 2048, 4096]
    assert bucket(3, 1024) == (4, 2048), "the dead row has a key, too"


def test_more_than_the_largest_batch_is_computed_as_usual(monkeypatch):
    monkeypatch.setattr(decode_graphs, "LARGEST", 2)
    replaying = Replaying(tiny_model("llama"))
    engine = Engine(replaying, ContinuousBatching(3), PagedKVCache(40, 4), clock=VirtualClock())
    engine.run([Request([5], SamplingParams(max_tokens=new), f"r{new}", 0.0) for new in (2, 4, 6)])
    assert replaying.replays(engine.store) == {(2, 1024): 2, (1, 1024): 2}


def test_a_piece_of_a_prompt_is_no_decode_though_it_is_one_token():
    replaying = Replaying(tiny_model("llama"))
    engine = Engine(replaying, ChunkedPrefill(1, 1), PagedKVCache(40, 4), clock=VirtualClock())
    engine.run([Request([5, 6, 7, 8], SamplingParams(max_tokens=3), "r", 0.0)])
    assert len(engine.trace.steps) == 6
    assert replaying.replays(engine.store) == {(1, 1024): 3}


def test_a_window_bounds_what_is_gathered():
    store = TransformersModel(tiny_model("gemma3")).allocate(8)
    step = StaticStep(store, 4, 1024, {None, WINDOW}, torch.device("cpu"))
    step.begin()
    gathered = {window: len(step.prepared(window, list)[0]) for window in (None, WINDOW)}
    assert gathered == {None: 1024, WINDOW: 4 * WINDOW}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_what_is_captured_neither_waits_nor_uploads(family):
    """Tensors on the meta device have no numbers to wait for; copies from the host would be seen below."""
    model = Replaying(tiny_model(family, dtype=torch.bfloat16))
    model.model.to("meta")
    model.device = torch.device("meta")
    store = model.allocate(8)
    step = StaticStep(store, 4, 1024, {layer.window for layer in model.layers}, model.device)
    with Devices() as seen, torch.inference_mode():
        step.begin()
        assert model.compute(step).shape == (4, VOCAB)
    assert seen.operations and seen.devices == {"meta"}


class Devices(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.devices = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        self.devices.update(x.device.type for x in tensors((args, kwargs, out)))
        return out
