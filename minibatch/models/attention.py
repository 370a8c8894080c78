"""Attention over rows of a K/V store: what makes a stock Hugging Face model run on an engine's cache.

The tokens of all requests stand in one sequence ``[1, T]`` (see ``packing.py``), and attention alone must keep the
requests apart. Transformers lets a function of ours stand in for attention (``AttentionInterface``). For each layer it

1. scatters the new keys and values to the rows that the KV cache gave these tokens,
2. gathers the rows of each request, wherever they lie (PagedAttention's block table, by now a list of rows),
3. attends, each query to the keys of its own request up to its own position.

Read :func:`attend_each` first: one request after another, nothing clever. :func:`attend_batched` computes the same with
few large operations, and is what runs on a CPU; on a GPU one call does (``varlen.py``). Tensors are ``[tokens, heads,
head_dim]`` unless a shape is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from minibatch.kv_cache import KVCache
from minibatch.models import UnsupportedModel
from minibatch.models.packing import Span, alike, pack, reachable, visible
from minibatch.plan import Plan

ALIGNMENT = 64  # bytes: a table begins where a line of a cache does
IMPLEMENTATION = "minibatch"  # the name under which transformers knows the function at the end of this file


class Layer(NamedTuple):
    """What one attention layer caches of a token: keys ``[kv_heads, key_dim]``, values ``[kv_heads, value_dim]``."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None  # a query sees this many keys, itself included; None: all


class KVStore:
    """K and V of every layer, ``[rows + 1, kv_heads, head_dim]``; the last is the scratch row that padding writes."""

    def __init__(self, layers: list[Layer], num_rows: int, device: torch.device) -> None:
        shapes = [(num_rows + 1, x.kv_heads, dim) for x in layers for dim in (x.key_dim, x.value_dim)]
        dtypes = [x.dtype for x in layers for _ in range(2)]
        numbers = [math.prod(shape) for shape in shapes]
        sizes = [-(-n * dtype.itemsize // ALIGNMENT) * ALIGNMENT for n, dtype in zip(numbers, dtypes, strict=True)]
        # One piece of memory, which the system takes back as a whole when the store is gone, and which is not touched
        # before it is needed: only the scratch row is ever read before it has been written.
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
        parts = zip(memory, dtypes, numbers, shapes, strict=True)
        tables = [part.view(dtype)[:n].view(shape) for part, dtype, n, shape in parts]
        self.keys, self.values, self.scratch_row = tables[::2], tables[1::2], num_rows
        for table in tables:
            table[num_rows] = 0
        self._buffers: dict[tuple, Tensor] = {}
        self._host: dict[Hashable, list[Tensor]] = {}

    def copy_rows(self, source: np.ndarray, target: np.ndarray) -> None:
        self._scatter(target, self._gathered(source))

    def swap_out(self, key: Hashable, rows: np.ndarray) -> None:
        self._host[key] = [table.to("cpu", copy=False) for table in self._gathered(rows)]

    def swap_in(self, key: Hashable, rows: np.ndarray) -> None:
        self._scatter(rows, self._host.pop(key))

    def swap_drop(self, key: Hashable) -> None:
        del self._host[key]

    def _gathered(self, rows: np.ndarray) -> list[Tensor]:
        """Of every table (keys of all layers, then values) these rows, in memory of their own."""
        index = torch.as_tensor(rows, device=self.keys[0].device)
        return [table.index_select(0, index) for table in self._tables]

    def _scatter(self, rows: np.ndarray, contents: list[Tensor]) -> None:
        index = torch.as_tensor(rows, device=self.keys[0].device)
        for table, content in zip(self._tables, contents, strict=True):
            table.index_copy_(0, index, content.to(table.device))

    @property
    def _tables(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer].index_copy_(0, rows, keys)
        self.values[layer].index_copy_(0, rows, values)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of ``rows``, gathered into buffers that the next call overwrites.

        Fresh memory for every gather would cost more in page faults than the copy itself.
        """
        return self._gather("k", self.keys[layer], rows), self._gather("v", self.values[layer], rows)

    def _gather(self, name: str, table: Tensor, rows: Tensor) -> Tensor:
        kind = (name, table.shape[1:], table.dtype)
        if kind not in self._buffers or len(self._buffers[kind]) < len(rows):
            self._buffers[kind] = table.new_empty(len(rows) + len(rows) // 2, *table.shape[1:])
        return torch.index_select(table, 0, rows, out=self._buffers[kind][: len(rows)])


# --- one iteration, as tensors ---


@dataclass(frozen=True)
class Part:
    """Queries ``first:stop`` of the packed sequence: ``batch`` requests with as many queries each, attended at once.

    ``rows`` are ``batch`` times as many rows as the longest of them has keys. ``mask`` is added to the scores; None:
    either every query sees every key, or the part is ``square``: as many queries as keys, from the first token on.
    """

    first: int
    stop: int
    batch: int
    rows: Tensor
    mask: Tensor | None
    square: bool


class Step:
    """One iteration as the model sees it: the packed sequence as tensors. Goes through transformers as a keyword, down
    to the attention layers.

    All index arithmetic happens here, once, not once a layer. The padding attends to itself alone. Nothing here waits
    for the device: while it computes one layer, the next ones are already queued.
    """

    def __init__(self, plan: Plan, kv: KVCache, store: KVStore, device: torch.device, attend: Attend) -> None:
        self.store, self.device, self._attend = store, device, attend
        self.num_layers_done = 0
        packed = pack(plan, kv, store.scratch_row)
        self.spans, self.num_tokens, self.num_logits = packed.spans, packed.num_tokens, packed.num_logits
        self.input_ids, self.position_ids = self.tensor(packed.tokens)[None], self.tensor(packed.positions)[None]
        self.slots, self.logit_index = self.tensor(packed.slots), self.tensor(packed.logits)
        self._prepared: dict[Hashable, Any] = {}

    def tensor(self, array: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """The array on the device; on a CPU that is no copy. A GPU fetches it by itself, but only from pinned memory:
        for any other the host would have to wait."""
        host = torch.as_tensor(array, dtype=dtype)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
        """One layer, the next one: stores the new K/V, then reads. Returns ``[T, heads, value_dim]``."""
        layer, self.num_layers_done = self.num_layers_done, self.num_layers_done + 1
        self.store.write(layer, self.slots, key, value)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        self._attend(self, layer, query, out, window, scale)
        if self.num_tokens < len(out):  # padding: the softmax over one key is 1
            out[self.num_tokens :] = value[self.num_tokens :].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return out

    def prepared(self, kind: Hashable, make: Callable[[], Any]) -> Any:
        """What layers of one kind share, made when the first of them asks; a model has one or two kinds of layers."""
        if kind not in self._prepared:
            self._prepared[kind] = make()
        return self._prepared[kind]

    def parts(self, window: int | None, group: int, dtype: torch.dtype) -> list[Part]:
        kind = (window, group, dtype)
        return self.prepared(kind, lambda: [self._part(spans, *kind) for spans in alike(self._reachable(window))])

    def _reachable(self, window: int | None) -> list[Span]:
        return [span._replace(rows=reachable(span, window)) for span in self.spans]

    def _part(self, spans: list[Span], window: int | None, group: int, dtype: torch.dtype) -> Part:
        queries = spans[0].length
        keys = [span.rows for span in spans]
        lengths = np.array([len(rows) for rows in keys])
        # A shorter request is padded with a row of its own: that one is finite if the request is. Rows of others may
        # hold anything, and a masked weight of 0 times NaN is NaN.
        rows = np.empty((len(keys), lengths.max()), dtype=np.int64)
        for padded, own in zip(rows, keys, strict=True):
            padded[: len(own)], padded[len(own) :] = own, own[-1]
        square = queries > 1 and queries == lengths[0] and (window is None or queries <= window)
        mask = None if square else self._mask(visible(lengths, queries, window), group, dtype)
        return Part(spans[0].first, spans[-1].stop, len(spans), self.tensor(rows.ravel()), mask, square)

    def _mask(self, allowed: np.ndarray, group: int, dtype: torch.dtype) -> Tensor | None:
        """``[batch, queries, keys]`` as an additive mask for queries that are folded ``group`` times."""
        if allowed.all():
            return None
        hidden = self.tensor(~allowed, torch.bool)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        return mask[:, None] if mask.shape[1] == 1 else mask.repeat(1, group, 1)[:, None]


# --- two ways to attend: fill ``out[: step.num_tokens]``, ``[T, heads, value_dim]`` ---

Attend = Callable[[Step, int, Tensor, Tensor, "int | None", "float | None"], None]


def attend_each(step: Step, layer: int, query: Tensor, out: Tensor, window: int | None, scale: float | None) -> None:
    """One request after another: the definition of what attention over a paged cache is."""
    for span in step.spans:
        rows = step.tensor(span.rows)
        keys, values = step.store.keys[layer][rows], step.store.values[layer][rows]
        mask = step.tensor(visible(np.array([len(rows)]), span.length, window), torch.bool)
        q, k, v = (x.transpose(0, 1)[None] for x in (query[span.first : span.stop], keys, values))
        answer = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        out[span.first : span.stop] = answer[0].transpose(0, 1)


def attend_batched(step: Step, layer: int, query: Tensor, out: Tensor, window: int | None, scale: float | None) -> None:
    """All decodes of similar length in one operation, and no key or value repeated for the query heads that share it.

    With grouped-query attention ``group`` query heads read one K/V head. Folded into the query length, ``[batch,
    kv_heads, group * queries, head_dim]``, they are simply more queries, and every kernel can do that.
    """
    kv_heads = step.store.keys[layer].shape[1]
    heads, dim = query.shape[1:]
    group, value_dim = heads // kv_heads, out.shape[2]
    for part in step.parts(window, group, query.dtype):
        rows = step.store.read(layer, part.rows)
        keys, values = (x.view(part.batch, -1, kv_heads, x.shape[2]).transpose(1, 2) for x in rows)
        q, answer = query[part.first : part.stop], out[part.first : part.stop]
        if part.square:
            q = q.transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=True)
            answer.copy_(attended[0].transpose(0, 1))
            continue
        q = q.view(part.batch, -1, kv_heads, group, dim).permute(0, 2, 3, 1, 4)  # queries last but one
        folded = q.reshape(part.batch, kv_heads, -1, dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=part.mask, scale=scale)
        attended = attended.view(part.batch, kv_heads, group, -1, value_dim).permute(0, 3, 1, 2, 4)
        answer.view(attended.shape).copy_(attended)


# --- the function that transformers calls ---

HARMLESS = {"position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits"}
MEANING = {
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks",
    "softcap": "soft-capping of attention scores",
    "position_bias": "a bias that depends on the distance of two tokens",
    "indices": "sparse attention that selects its keys",
    "block_indices": "sparse attention that selects its keys",
}


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    minibatch_step: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Query, key and value come as ``[1, heads, T, dim]``, the result goes as ``[1, T, heads, dim]``.

    Raises UnsupportedModel for every argument that would change the result and is not taken into account here.
    """
    if minibatch_step is None:
        refuse(module, "called without a step; a model that a TransformersModel has taken over runs only through it")
    if attention_mask is not None:
        refuse(module, "a mask of its own")
    if dropout:
        refuse(module, "dropout; put the model in eval mode")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        refuse(module, "attention that is not causal")
    # None says that the layer has no window; not passing it says nothing, then the layer itself may have one.
    window = others.pop("sliding_window", getattr(module, "sliding_window", None)) or None
    for name, given in others.items():
        if given is not None and given is not False and name not in HARMLESS:
            refuse(module, MEANING.get(name, f"an unknown argument of attention, {name}"))
    packed = (x[0].transpose(0, 1) for x in (query, key, value))
    return minibatch_step.attend(*packed, window, scaling)[None], None


def refuse(module: torch.nn.Module, reason: str) -> None:
    raise UnsupportedModel(f"{type(module).__name__}: {reason}")


AttentionInterface.register(IMPLEMENTATION, paged_attention)
