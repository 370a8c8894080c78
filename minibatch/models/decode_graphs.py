"""Decode iterations as CUDA graphs: a whole forward pass recorded once, then started as one operation.

A decode iteration of a small model is hundreds of kernels of a few microseconds each, and the host needs about as long
to launch one. So the GPU waits for Python. A CUDA graph records the launches, and *replays* all of them at once. What
is recorded are addresses and sizes: inputs have to lie where they lay, and be as many. vLLM and SGLang therefore
capture decodes by batch size and pad an iteration to the next size up; so does this module. Iterations with longer
chunks have enough work for each launch, and run as usual.

Padding is what it is in a static batch: dead rows that write the scratch row, and attend to it alone. What graphs cost:
some forward passes when a size first comes, and memory for what a forward pass needs in between (all share one pool).

This has been tested by emulation only, with recorded operations in place of ``CudaGraph``; it has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from torch import Tensor

from minibatch.kv_cache import KVCache
from minibatch.models.attention import KVStore, Layer, Step
from minibatch.models.packing import Packed, Span, pack, ragged
from minibatch.models.varlen import attend_varlen
from minibatch.plan import Padding, Plan

LARGEST = 256  # requests; with more of them the kernels are long enough
WARM_UPS = 3  # libraries choose kernels and allocate when first called, which must not happen during a capture


class DecodeGraphs:
    """``compute(step)`` is the forward pass: logits ``[rows, vocab_size]``, attention by ``step.attend``.

    For models that attend by ``attend_varlen``, with these ``layers``.
    """

    def __init__(self, compute: Callable[[Step], Tensor], layers: Sequence[Layer], device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._windows = {layer.window for layer in layers}
        self.steps: WeakKeyDictionary[KVStore, dict[tuple[int, int], StaticStep]] = WeakKeyDictionary()
        self._logits: Tensor | None = None  # [LARGEST, vocab_size]: one for all graphs
        self._pool: Any = None

    @torch.inference_mode()
    def run(self, plan: Plan, kv: KVCache, store: KVStore) -> Tensor | None:
        """Logits ``[chunks, vocab_size]`` in the order of the plan; None if it does more than decode."""
        num_chunks = len(plan.chunks)
        ones = all(c.stop - c.start == c.num_logits == 1 for c in plan.chunks)
        if plan.padding or not ones or not 0 < num_chunks <= LARGEST:
            return None
        batch, most_keys = size = bucket(num_chunks, sum(chunk.stop for chunk in plan.chunks))
        steps = self.steps.setdefault(store, {})
        if size not in steps:
            steps[size] = StaticStep(store, batch, most_keys, self._windows, self._device)
        step = steps[size]
        dead = Padding(plan.chunks[0].request, 1, dead=True)
        step.load(pack(Plan(plan.chunks, (dead,) * (batch - num_chunks)), kv, store.scratch_row))
        if step.graph is None:
            step.graph = CudaGraph(partial(self._forward, step), self._device, self._pool)
            self._pool = step.graph.pool
        step.graph.replay()
        return self._logits[:num_chunks].clone()  # the next replay writes there

    def _forward(self, step: StaticStep) -> None:
        step.begin()
        logits = self._compute(step)
        if self._logits is None:
            self._logits = logits.new_empty(LARGEST, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)


def bucket(requests: int, keys: int) -> tuple[int, int]:
    """The batch, 1, 2, 4, 8 or a multiple of 8, and room for its keys, one a dead row included: a power of two.

    Keys grow with every iteration. In powers of two few graphs serve an answer, and at most half of a gather is wasted.
    """
    batch = 1 << (requests - 1).bit_length() if requests <= 8 else -(-requests // 8) * 8
    return batch, max(1024, 1 << (keys + batch - requests - 1).bit_length())


class StaticStep(Step):
    """A Step of ``batch`` decodes whose tensors stay where they are; ``load`` puts other numbers into them."""

    def __init__(
        self, store: KVStore, batch: int, most_keys: int, windows: set[int | None], device: torch.device
    ) -> None:
        # A graph dies with its store, so it must not be what keeps it alive.
        self.store, self.device, self._attend = proxy(store), device, attend_varlen
        self.num_tokens = self.num_logits = batch
        self.graph: CudaGraph | None = None
        self._most_keys = {window: min(most_keys, batch * (window or most_keys)) for window in windows}
        sizes = [batch] * 4 + [size for most in self._most_keys.values() for size in (most, batch + 1)]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)  # all in one: one upload
        tokens, positions, self.slots, self.logit_index, *self._ragged = self._numbers.split(sizes)
        self.input_ids, self.position_ids = tokens[None], positions[None]
        self._query_starts = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def load(self, packed: Packed) -> None:
        """``packed`` has as many tokens as the batch, padding included."""
        scratch = np.array([self.store.scratch_row])
        spans = packed.spans + [Span(i, 1, scratch) for i in range(packed.num_tokens, self.num_tokens)]
        arrays = [packed.tokens, packed.positions, packed.slots, packed.logits]
        for window, most in self._most_keys.items():
            now = ragged(spans, window)
            arrays += [now.rows, scratch.repeat(most - len(now.rows)), now.key_starts]
        self._numbers.copy_(self.tensor(np.concatenate(arrays)))

    def begin(self) -> None:
        """The part of the graph before the model."""
        self.num_layers_done = 0
        self._prepared = {
            window: (rows, self._query_starts, key_starts.int(), 1, most)
            for (window, most), rows, key_starts in zip(
                self._most_keys.items(), self._ragged[::2], self._ragged[1::2], strict=True
            )
        }


class CudaGraph:
    """The operations of ``function``, recorded. They read and write the same memory each time."""

    def __init__(self, function: Callable[[], None], device: torch.device, pool: Any) -> None:
        with torch.cuda.device(device):
            side = torch.cuda.Stream()  # warming up beside the default stream, as PyTorch's notes on graphs demand
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                function()
        self.pool = self._graph.pool()
        self.replay = self._graph.replay
