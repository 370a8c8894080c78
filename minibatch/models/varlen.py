"""Attention on a GPU: all requests, chunks and decodes together, in one call a layer.

A GPU is fast at few large operations, and each operation costs some microseconds to launch. ``attend_batched`` makes
several a group of decodes and several a chunk. FlashAttention (Dao, 2023) takes *ragged* batches: the queries of all
requests behind one another, their keys likewise, and where each request begins. So nothing is padded, there are no
masks in memory, and whether an iteration is mixed makes no difference. PyTorch has it as ``varlen_attn``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minibatch.models import UnsupportedModel
from minibatch.models.attention import Attend, Layer, Step, attend_batched
from minibatch.models.packing import ragged


def attend_for(device: torch.device, layers: Sequence[Layer]) -> Attend:
    """The fastest way for these layers there. FlashAttention wants a GPU, 16-bit numbers, and keys and values of the
    same size, a multiple of 8 up to 256."""
    fits = all(x.dtype.itemsize == 2 and x.key_dim == x.value_dim <= 256 and x.key_dim % 8 == 0 for x in layers)
    return attend_varlen if device.type == "cuda" and fits else attend_batched


def attend_varlen(step: Step, layer: int, query: Tensor, out: Tensor, window: int | None, scale: float | None) -> None:
    """Gathers the rows of all requests, and attends once. Raises UnsupportedModel if PyTorch is too old.

    The gathered K/V go to fresh memory: on a GPU PyTorch keeps what was freed at hand, and a buffer that grows could
    not be part of a recorded graph (``decode_graphs.py``).
    """
    rows, *lengths = step.prepared(window, lambda: _uploaded(step, window))
    keys, values = (table[layer].index_select(0, rows) for table in (step.store.keys, step.store.values))
    out[: step.num_tokens] = kernel()(
        query[: step.num_tokens],
        keys,
        values,
        *lengths,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # keys before and after the query's own, which we count
        enable_gqa=True,
        num_splits=1,  # keys in one piece, whoever else is in the batch: so that nobody's sums depend on the others
    )


def _uploaded(step: Step, window: int | None) -> tuple[Any, ...]:
    rows, query_starts, key_starts, *most = ragged(step.spans, window)
    return step.tensor(rows), *(step.tensor(x, torch.int32) for x in (query_starts, key_starts)), *most


@cache
def kernel() -> Callable[..., Tensor]:
    """PyTorch's ``varlen_attn``, looked for only when it is needed: the rest runs with older versions."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen_attn = None
    if varlen_attn is None or "num_splits" not in inspect.signature(varlen_attn).parameters:
        raise UnsupportedModel(
            f"16-bit attention on a GPU needs torch >= 2.11 (varlen_attn with num_splits), here is {torch.__version__}"
            "; attend=attend_batched does without it"
        )
    return varlen_attn
