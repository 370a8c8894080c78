"""How long one iteration takes on a GPU that we do not have, from first principles.

An iteration reads every weight once, however many tokens it computes; that is why batching pays. Beside it each request
reads its own K/V, which no batch shares; that is why batching stops paying. So

    linear         weights of the layers / bandwidth,   against 2 operations a weight and token / peak
    head           the same for the head, only of positions that are sampled from
    attention      K/V read and written / bandwidth,    against 4 operations a query, cached key and head dimension
    communication  two all-reduces a layer, if the model is split over GPUs (Megatron-LM, section 3)
    swap           K/V to and from host memory
    overhead       scheduling, launching, sampling: so much an iteration, and so much a position that is sampled from

where "against" is a smooth maximum (see :mod:`minibatch.gpus`). What a roofline leaves out is left out here: that the
efficiency of a kernel depends on the shape of its work. Communication and swaps overlap with nothing. Attention is one
term: in an iteration that mixes them, the arithmetic of a prompt hides the reading of the decodes, which needs a kernel
made for it (a few percent in favour of mixed and chunked).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from minibatch.checks import check_float, check_int
from minibatch.gpus import GPU, Efficiency, smooth_max
from minibatch.model_shapes import ModelShape
from minibatch.plan import Plan
from minibatch.request import RequestState
from minibatch.trace import StepReport, Trace

REDUCE_LATENCY = 10e-6  # seconds of an all-reduce of nothing: the order of NCCL's for up to 8 GPUs of one machine
# Seconds an iteration, of an engine that has been worked on. One that has not can take ten times as much: the profiles
# of splitwise-sim give Llama-2-70B on 8 A100 45 ms for one request, where reading the weights takes 8.5.
OVERHEAD = 2e-3


class Counts(NamedTuple):
    """An iteration as the cost model sees it. Numbers of one iteration, or arrays of many.

    ``tokens``      through the linear layers, padding included
    ``logits``      positions through the head
    ``kv_read``     tokens whose K/V are read: the context of every chunk, once
    ``kv_written``  tokens whose K/V are written
    ``attended``    pairs of a query and a key that it sees
    ``swapped``     tokens whose K/V go to host memory or come back
    """

    tokens: float
    logits: float
    kv_read: float
    kv_written: float
    attended: float
    swapped: float = 0

    @classmethod
    def of(cls, plan: Plan, window: int | None = None) -> Counts:
        """Of a plan: the same before the engine applies it and at ``clock.advance(plan)``, after the forward.

        (Then a request that was preempted and not swapped has lost its ``num_computed``, one that a prefix cache serves
        has gained some, and the prompt may have been scored.)
        """
        tokens = logits = kv_read = doubled = 0
        for request, start, stop in plan.chunks:  # as short as it can be: a simulation spends its time here
            length = stop - start
            tokens += length
            kv_read += stop
            doubled += length * (start + stop + 1)  # the query at position i sees i + 1 keys
            if stop == request.num_tokens:
                logits += 1
            if start < request.num_prompt and request.params.prompt_logprobs is not None:
                logits += _scored(request, start, stop)
        unread = unseen = 0
        if window is not None:
            unread, unseen = _beyond([chunk[1:] for chunk in plan.chunks if chunk[2] > window], window)
        written = tokens
        for _, num_tokens, dead in plan.padding:  # pads see only themselves: no attention
            tokens += num_tokens
            logits += num_tokens if dead else 0
        swapped = sum(p.request.num_computed for p in plan.preemptions if p.swap)
        # what a waiting request has computed was swapped out; with a prefix hit there was nothing
        swapped += sum(a.request.num_computed for a in plan.admissions if not a.cached)
        return cls(tokens, logits, kv_read - unread, written, doubled // 2 - unseen, swapped)

    @classmethod
    def of_step(cls, step: StepReport, window: int | None = None) -> Counts:
        """Of an iteration in a trace, which does not say which prompts were scored (``prompt_logprobs``)."""
        spans = [(member.start, member.stop) for member in step.members]
        unread, unseen = _beyond(spans, window) if window else (0, 0)
        return cls(
            tokens=step.num_tokens,
            logits=sum(m.emitted is not None for m in step.members) + sum(p.num_tokens for p in step.padding if p.dead),
            kv_read=sum(stop for _, stop in spans) - unread,
            kv_written=sum(stop - start for start, stop in spans),
            attended=sum((stop - start) * (start + stop + 1) for start, stop in spans) // 2 - unseen,
            swapped=step.swapped_out + step.swapped_in,
        )


class Parts(NamedTuple):
    """Seconds of one iteration (or arrays, of many), by cause; they add up to it."""

    linear: float
    head: float
    attention: float
    communication: float
    swap: float
    overhead: float


class _Rates(NamedTuple):
    """Seconds: of reading all weights once, of computing a token, of moving the K/V of a token, ..."""

    linear_read: float
    linear_token: float
    head_read: float
    head_logit: float
    kv_token: float
    pair: float
    reduce_latency: float
    reduce_token: float
    swap_token: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of an iteration: ``cost(plan)``, so that it can be the duration of a virtual clock.

    ``tensor_parallel``  GPUs that share every layer: each has its part of weights, K/V and arithmetic
    ``bytes_per_value``  of weights and K/V: 2 for fp16 and bf16
    ``efficiency``       None: the GPU's
    ``overhead``         seconds that an iteration takes beside the work on the GPU
    ``row_overhead``     the same, for each position that is sampled from (a CPU also multiplies few rows badly)

    Raises ValueError for numbers out of range, or K/V heads that cannot be shared out equally.
    """

    model: ModelShape
    gpu: GPU
    tensor_parallel: int = 1
    bytes_per_value: int = 2
    efficiency: Efficiency | None = None
    overhead: float = OVERHEAD
    row_overhead: float = 0.0

    def __post_init__(self) -> None:
        check_int("tensor_parallel", self.tensor_parallel, 1)
        check_int("bytes_per_value", self.bytes_per_value, 1)
        check_float("overhead", self.overhead, 0.0, math.inf)
        check_float("row_overhead", self.row_overhead, 0.0, math.inf)
        if self.model.num_kv_heads % self.tensor_parallel:
            raise ValueError(
                f"{self.tensor_parallel} GPUs cannot share the {self.model.num_kv_heads} K/V heads of {self.model.name}"
            )
        if self.efficiency is None:
            object.__setattr__(self, "efficiency", self.gpu.efficiency)

    def __call__(self, plan: Plan) -> float:
        return self.seconds(Counts.of(plan, self.model.sliding_window))

    def seconds(self, counts: Counts) -> float:
        """Of an iteration with these counts, or an array, of many."""
        return sum(self.parts(counts))

    def parts(self, counts: Counts) -> Parts:
        """The same, by cause."""
        tokens, logits, kv_read, kv_written, attended, swapped = counts
        rates, sharpness = self._rates, self.efficiency.sharpness
        return Parts(
            linear=smooth_max(rates.linear_read, rates.linear_token * tokens, sharpness),
            head=smooth_max(rates.head_read * (logits > 0), rates.head_logit * logits, sharpness),
            attention=smooth_max(rates.kv_token * (kv_read + kv_written), rates.pair * attended, sharpness),
            communication=rates.reduce_latency + rates.reduce_token * tokens,
            swap=rates.swap_token * swapped,
            overhead=self.overhead + self.row_overhead * logits,
        )

    @cached_property
    def _rates(self) -> _Rates:
        model, gpu, parallel, size = self.model, self.gpu, self.tensor_parallel, self.bytes_per_value
        bandwidth = gpu.bandwidth * self.efficiency.bandwidth * parallel
        flops = gpu.flops * self.efficiency.compute * parallel
        layers = model.num_layers * model.layer_parameters
        # All-reduces: after attention and after the MLP. In a ring each GPU sends 2 (n - 1) / n of the message. Links
        # are taken to reach the same share of their peak as memory does.
        reduces = 2 * model.num_layers if parallel > 1 else 0
        link = gpu.link if parallel <= gpu.linked else gpu.host_link
        message = 2 * (parallel - 1) / parallel * model.hidden_size * size
        return _Rates(
            linear_read=layers * size / bandwidth,
            linear_token=2 * layers / flops,
            head_read=model.head_parameters * size / bandwidth,
            head_logit=2 * model.head_parameters / flops,
            kv_token=self.kv_bytes_per_token / bandwidth,
            pair=4 * model.num_layers * model.num_heads * model.head_dim / flops,
            reduce_latency=reduces * REDUCE_LATENCY,
            reduce_token=reduces * message / (link * self.efficiency.bandwidth),
            swap_token=self.kv_bytes_per_token / (gpu.host_link * self.efficiency.bandwidth * parallel),
        )

    @property
    def name(self) -> str:
        gpus = self.gpu.name if self.tensor_parallel == 1 else f"{self.tensor_parallel} x {self.gpu.name}"
        return f"{self.model.name} on {gpus}"

    @property
    def max_model_len(self) -> int | None:
        return self.model.max_model_len

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one token, over all layers and all GPUs."""
        return self.model.kv_bytes_per_token(self.bytes_per_value)

    @property
    def weight_bytes(self) -> int:
        """Over all GPUs."""
        return self.model.num_parameters * self.bytes_per_value

    def kv_tokens(self, share: float = 0.9) -> int:
        """Tokens whose K/V fit beside the weights, in ``share`` of the memory; the rest is for activations.

        Raises ValueError if not one does.
        """
        check_float("share", share, 0.0, 1.0, above=True)
        if not self.gpu.memory:
            raise ValueError(f"{self.name}: how much memory there is, is not known; give the KV cache in tokens")
        memory = share * self.gpu.memory * self.tensor_parallel
        tokens = math.floor((memory - self.weight_bytes) / self.kv_bytes_per_token)
        if tokens < 1:
            needed, there = self.weight_bytes / 1e9, memory / 1e9
            raise ValueError(
                f"{self.name}: the weights take {needed:.1f} GB of {there:.1f} GB ({share:g} of the memory)"
            )
        return tokens

    def save(self, path: str | Path) -> None:
        """Writes all its numbers as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Reads what ``save`` wrote; raises ValueError for anything else, OSError if it cannot be read."""
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            efficiency = Efficiency(**value.pop("efficiency"))
            gpu = value.pop("gpu")
            gpu = GPU(**{**gpu, "efficiency": Efficiency(**gpu["efficiency"])})
            return cls(ModelShape(**value.pop("model")), gpu, efficiency=efficiency, **value)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a cost model: {error}") from error

    @classmethod
    def fit(cls, trace: Trace, model: ModelShape, gpu: GPU | None = None) -> CostModel:
        """One that is calibrated on the iterations of a trace: see :func:`minibatch.calibration.fit`."""
        from minibatch import calibration

        return calibration.fit(trace, model, gpu)


def _scored(request: RequestState, start: int, stop: int) -> int:
    """Positions of a prompt that go through the head only for ``prompt_logprobs``; a recomputation scores nothing."""
    if request.high_water >= request.num_prompt - 1:
        return 0
    return stop - start - (stop == request.num_tokens)


def _beyond(spans: Iterable[tuple[int, int]], window: int) -> tuple[int, int]:
    """What a sliding window spares: cached tokens that no query of the chunk sees, and pairs. The query at position i
    sees the last ``window`` of its i + 1 keys."""
    unread = doubled = 0
    for start, stop in spans:
        if stop > window:
            if start >= window:
                unread += start - window + 1  # the first query's window begins the farthest back
            first = max(start, window)
            doubled += (stop - first) * (first + 1 + stop - 2 * window)
    return unread, doubled // 2
