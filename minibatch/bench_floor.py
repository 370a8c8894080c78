"""How near a decode iteration comes to what memory allows: ``minibatch bench --floor`` (or ``--device cuda`` alone).

A decode iteration reads all weights once, and the K/V of every request. However good the kernels, that takes about
these bytes over the bandwidth of the memory: the floor. Bandwidth is measured here, by copying (reading alone may be
somewhat faster or slower). How far above the floor we are says what there is left to gain, and whether launching from
Python is what costs.

On a GPU the models are built from their configuration, with random weights: nothing is downloaded, and speed does not
depend on what the weights are. First they are checked: our tokens in float32 against transformers' ``generate``, each
request alone. Then come the times, beside those of transformers' continuous batching on the same model.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from minibatch import reference
from minibatch.bench import table
from minibatch.bench_engines import LENGTHS, in_pages
from minibatch.bench_worker import ContinuousBatching
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.engine import Engine
from minibatch.model_shapes import ModelShape
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.request import Request, SamplingParams

DECODES = 24  # iterations whose median is taken

# From the models' public configurations.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
        },
    ),
}


@dataclass(frozen=True)
class Sizes:
    """``batches`` are timed at ``context`` tokens each; ``requests`` are served beside transformers, ``rounds`` times;
    ``copied``: bytes of the copy that measures the bandwidth."""

    batches: tuple[int, ...]
    context: int
    requests: int
    rounds: int
    copied: int


SIZES = {
    "cpu": Sizes((1, 8, 32), 128, 16, 3, 2**27),
    "cuda": Sizes((1, 16, 64, 256), 1024, 64, 3, 2**30),
}


@dataclass(frozen=True)
class Iteration:
    """A decode iteration of ``batch`` requests; milliseconds. ``graphs``: replayed as a CUDA graph; None: not there."""

    batch: int
    floor: float
    measured: float
    graphs: float | None


@dataclass(frozen=True)
class Floor:
    """``bandwidth`` in bytes a second; ``verdicts`` on our tokens, and whether all of them hold; ``ours`` and
    ``theirs``: useful tokens/s of every round, theirs of transformers' continuous batching."""

    model: str
    dtype: str
    device: str
    bandwidth: float
    weight_bytes: int
    context: int
    iterations: tuple[Iteration, ...]
    verdicts: dict[str, str]
    holds: bool
    ours: tuple[float, ...]
    theirs: tuple[float, ...]


Build = Callable[[str], Any]  # dtype -> PreTrainedModel on its device


def random_weights(name: str, device: str, dtype: str) -> Any:
    """One of ``SHAPES``, built on the device."""
    import torch
    import transformers

    kind, fields = SHAPES[name]
    config = getattr(transformers, kind)(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def loaded(location: str, device: str, dtype: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(location, dtype=dtype).eval().to(device)


def run(name: str, build: Build, device: str, dtype: str, sizes: Sizes | None = None, progress: bool = True) -> Floor:
    """Checks, then times. ``build(dtype)`` makes the model, anew for each dtype."""
    from minibatch.models.transformers_model import TransformersModel
    from minibatch.models.varlen import attend_varlen

    sizes = sizes or SIZES["cpu" if device == "cpu" else "cuda"]
    with tqdm(total=len(sizes.batches) + sizes.rounds + 1, desc=f"{name}: checking", disable=not progress) as bar:
        verdicts = {"float32": check(TransformersModel(build("float32"), fast=True))}
        model, graphed = TransformersModel(build(dtype), fast=True), None
        if dtype not in verdicts:
            verdicts[dtype] = check(model)
        if model.attend is attend_varlen:
            graphed = TransformersModel(model.model, fast=True, cuda_graphs=True)
            verdicts["CUDA graphs"] = check(graphed)
        bar.update()
        bar.set_description(f"{name}: timing")
        bandwidth = copy_bandwidth(device, sizes.copied)
        shape = ModelShape.from_config(model.model.config)
        weights = (shape.num_layers * shape.layer_parameters + shape.head_parameters) * model.model.dtype.itemsize
        iterations = []
        for batch in sizes.batches:
            kv_bytes = batch * (sizes.context + DECODES / 2) * model.kv_bytes_per_token
            times = [None if m is None else 1e3 * decode_seconds(m, batch, sizes.context) for m in (model, graphed)]
            iterations.append(Iteration(batch, 1e3 * (weights + kv_bytes) / bandwidth, *times))
            bar.update()
        rates = []
        for _ in range(sizes.rounds):
            rates.append(serve(graphed or model, sizes.requests, sizes.context))
            bar.update()
    ours, theirs = zip(*rates, strict=True)
    return Floor(
        model=name,
        dtype=dtype,
        device=device,
        bandwidth=bandwidth,
        weight_bytes=weights,
        context=sizes.context,
        iterations=tuple(iterations),
        verdicts={name: str(verdict) for name, verdict in verdicts.items()},
        holds=all(verdict.holds for verdict in verdicts.values()),
        ours=ours,
        theirs=theirs,
    )


def check(model: Any, requests: int = 8) -> reference.Verdict:
    """Our tokens, together and in chunks, against each request alone by transformers."""
    jobs = make_requests(model.vocab_size, requests, 40, [12] * requests, seed=1)
    watched = reference.Watched(model)
    engine = Engine(
        watched, ChunkedPrefill(token_budget=64, max_num_seqs=requests), PagedKVCache(num_blocks=64 * requests)
    )
    results = engine.run(jobs)
    solos = {job.request_id: reference.solo(model, job) for job in jobs}
    return reference.judge(watched, jobs, results, solos)


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes a second, read and written together, of a large copy: the best of ten."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(_seconds(lambda: target.copy_(source), device) for _ in range(10))


def _seconds(what: Callable[[], Any], device: str) -> float:
    import torch

    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    started = time.perf_counter()
    what()
    wait()
    return time.perf_counter() - started


def decode_seconds(model: Any, batch: int, context: int) -> float:
    """Median time from the start of one decode iteration to the start of the next, all of it included."""
    jobs = make_requests(model.vocab_size, batch, context, [DECODES + 2] * batch)
    blocks = batch * -(-(context + DECODES + 2) // 16)
    engine = Engine(model, ChunkedPrefill(token_budget=8192, max_num_seqs=batch), PagedKVCache(num_blocks=blocks))
    engine.run(jobs)
    decodes = [s for s in engine.trace.steps if len(s.members) == batch and all(m.decode for m in s.members)]
    return statistics.median(b.start - a.start for a, b in itertools.pairwise(decodes))


def serve(model: Any, requests: int, context: int) -> tuple[float, float]:
    """Useful tokens a second on answers of different lengths: ours, and transformers' continuous batching."""
    from minibatch.models.transformers_model import stock_attention

    rng = random.Random(0)
    lengths = [rng.choice(LENGTHS) for _ in range(requests)]
    jobs = make_requests(model.vocab_size, requests, context, lengths)
    kv_tokens = in_pages([context + length for length in lengths])
    engine = Engine(model, ChunkedPrefill(token_budget=512, max_num_seqs=requests), PagedKVCache(kv_tokens // 16))
    started = time.perf_counter()
    engine.run(jobs)
    ours = time.perf_counter() - started
    with stock_attention(model.model):
        other = ContinuousBatching(model.model)
        other.run([job.prompt for job in jobs], lengths, kv_tokens)
    return sum(lengths) / ours, sum(lengths) / other.seconds


def make_requests(vocab: int, number: int, length: int, answers: Sequence[int], seed: int = 0) -> list[Request]:
    """Prompts of random tokens."""
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(vocab) for _ in range(length)],
            SamplingParams(max_tokens=answer, ignore_eos=True),
            request_id=f"r{i}",
        )
        for i, answer in zip(range(number), answers, strict=True)
    ]


def measure(names: Sequence[str], device: str, dtype: str, progress: bool = True) -> list[Floor]:
    """``SHAPES`` with random weights."""
    return [run(name, partial(random_weights, name, device), device, dtype, progress=progress) for name in names]


# ------------------------------------------------------------------------------------------------------------- in words


def describe(found: Sequence[Floor]) -> str:
    return "\n\n".join(map(_describe, found))


def _describe(floor: Floor) -> str:
    rows = [
        [
            str(i.batch),
            f"{i.floor:.2f}",
            f"{i.measured:.2f}",
            f"{i.measured / i.floor:.2f}",
            *(["-", "-"] if i.graphs is None else [f"{i.graphs:.2f}", f"{i.graphs / i.floor:.2f}"]),
        ]
        for i in floor.iterations
    ]
    ratios = [ours / theirs for ours, theirs in zip(floor.ours, floor.theirs, strict=True)]
    ours, theirs = statistics.median(floor.ours), statistics.median(floor.theirs)
    weights, bandwidth = f"weights of {floor.weight_bytes / 1e9:.2f} GB", f"{floor.bandwidth / 1e9:.0f} GB/s"
    return "\n".join(
        [
            f"floor       {floor.model}, {floor.dtype}, {floor.device}: {weights}; a copy reads and writes {bandwidth}",
            "            tokens against solo generation:",
            *(f"            {name}: {verdict}" for name, verdict in floor.verdicts.items()),
            f"            ms of a decode iteration at contexts of {floor.context} tokens; floor: bytes of weights and",
            "            K/V over that bandwidth (reading alone may be somewhat faster or slower than copying)",
            "",
            table(("batch", "floor", "measured", "x floor", "CUDA graph", "x floor "), rows),
            "",
            f"answers of {', '.join(map(str, LENGTHS))} tokens: {ours:.0f} tokens/s; transformers' continuous batching "
            f"{theirs:.0f}",
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        ]
    )
