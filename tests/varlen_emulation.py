"""PyTorch's ``varlen_attn`` for a machine without a GPU: the same arguments, the same result, one segment at a time.

It refuses what FlashAttention refuses, with one exception: float64 stands in for 16 bits, so that equal means equal.
It is an operator of its own, as the real one is, so that a dispatch mode sees one operation and not what is inside,
which looks at the numbers of ``cu_seq_q`` as no kernel's caller may.
"""

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,  # [T_q, heads, dim]
    key: Tensor,  # [T_k or more, kv_heads, dim]
    value: Tensor,
    cu_seq_q: Tensor,  # int32 [n + 1]
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> Tensor:
    assert num_splits == 1, "or the order of sums depends on who else is in the batch"
    assert type(max_q) is type(max_k) is int
    assert enable_gqa or query.shape[1] == key.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    return _segments(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, *window_size)


@torch.library.custom_op("minibatch_tests::varlen_attn", mutates_args=())
def _segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
) -> Tensor:
    _check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    out = torch.full_like(query, float("nan"))
    group = query.shape[1] // key.shape[1]
    firsts, starts = cu_seq_q.tolist(), cu_seq_k.tolist()
    for i in range(len(firsts) - 1):
        q, k, v = query[firsts[i] : firsts[i + 1]], key[starts[i] : starts[i + 1]], value[starts[i] : starts[i + 1]]
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        distance = (
            torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q))[:, None]
        )  # aligned at the bottom right
        hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k).mul(scale).masked_fill(hidden, float("-inf"))
        out[firsts[i] : firsts[i + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


@_segments.register_fake
def _(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, left, right):
    return torch.empty_like(query)


def _check(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int
) -> None:
    heads, dim = query.shape[1:]
    assert query.dtype == key.dtype == value.dtype, "one dtype"
    assert query.dtype in (torch.float16, torch.bfloat16, torch.float64), "16 bits, for which float64 stands in"
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32, "cumulative lengths are int32"
    assert len({x.device for x in (query, key, value, cu_seq_q, cu_seq_k)}) == 1, "one device"
    assert cu_seq_q.shape == cu_seq_k.shape == (len(cu_seq_q),), "as many key segments as query segments"
    assert cu_seq_q.is_contiguous() and cu_seq_k.is_contiguous()
    assert key.shape == value.shape == (len(key), key.shape[1], dim), "keys and values of the queries' size"
    assert heads % key.shape[1] == 0, "query heads share key heads evenly"
    assert dim % 8 == 0 and dim <= 256, "sizes that there are kernels for"
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "the last dimension is contiguous"
    assert key.isfinite().all() and value.isfinite().all(), "not even behind the last segment: 0 times NaN is NaN"
    queries, keys = cu_seq_q.diff(), cu_seq_k.diff()
    assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] <= len(key)
    assert queries.min() >= 1 and (queries <= keys).all(), "a query has its own key at least"
    assert queries.max() <= max_q and keys.max() <= max_k, "what is called the maximum is none"
