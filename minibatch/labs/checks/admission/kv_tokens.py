"""admission.1: how many tokens of K/V fit beside the weights."""

from __future__ import annotations

from functools import partial
from numbers import Integral
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.cost_model import CostModel
from minibatch.gpus import GPU, GPUS
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.strips import EMPTY, GONE, RIGHT, Cell, strips
from minibatch.model_shapes import MODELS, ModelShape

# 28 weights: 16 of attention and 8 of the MLP in its one layer, 4 of the embeddings; 4 numbers of K/V a token.
TINY = ModelShape("tiny", 1, 2, 2, 2, 1, 2, 2, gated=False, tied=True)
SENSELESS = "Input that makes no sense is refused with a ValueError: no memory at all, a share outside (0, 1]."
WEIGHTS = "Of the memory the weights are taken first; the rest is for K/V."
WHOLE = "The share is one of the whole memory, weights included; not a share of what the weights leave."
TOGETHER = "GPUs that work together put their memory together."
SUMS = "weight_bytes and kv_bytes_per_token are those of all GPUs together, and so has to be the memory."
SIZES = "Larger numbers take more memory, of the weights and of K/V."
ROUNDED = "A token of which only a part fits does not fit: round down."
ONE_LESS = "{left:g} bytes are left and a token takes {token}: exactly {want} fit whole, not one more and not one less."
ENOUGH = "One token that just fits is enough."
BY_HAND = (  # memory of a GPU in bytes, share, GPUs, bytes a number
    (200, 1.0, 1, 2, WEIGHTS),
    (192, 0.75, 1, 2, WHOLE),
    (100, 1.0, 2, 2, TOGETHER),
    (96, 0.75, 2, 2, SUMS),
    (208, 1.0, 1, 4, SIZES),
    (207, 1.0, 1, 2, ROUNDED),
    (64, 1.0, 1, 2, ENOUGH),
    (40, 1.0, 1, 2, ""),
    (63, 1.0, 1, 2, ""),
    (0, 0.875, 1, 2, SENSELESS),
    (200, 1.5, 1, 2, SENSELESS),
)


def check(part: type[CostModel]) -> None:
    for memory, share, gpus, size, idea in BY_HAND:
        _tokens(part, memory, share, gpus, size, idea)
    _is_whole(part)
    idea = "What the weights leave of the share of all GPUs' memory is for K/V."
    for_all(
        lambda memory, eighths, gpus, size: _tokens(part, memory, eighths / 8, gpus, size, idea),
        memory=st.integers(1, 400),
        eighths=st.integers(1, 8),
        gpus=st.sampled_from([1, 2]),
        size=st.sampled_from([1, 2, 4]),
    )
    llama = part(MODELS["llama-2-7b"], GPUS["a100-40"])
    case = "Llama-2-7B in fp16, 2 bytes for each of 6,738,149,376 weights and 524,288 a token, on an A100 with 40 GiB"
    idea = "0.9 * 40 GiB, less the weights, over the bytes of a token; what is left over is less than a token."
    expect(llama.kv_tokens(), 48_024, case=case, idea=idea, what="tokens")


def _model(part: type[CostModel], memory: int, gpus: int = 1, size: int = 2) -> CostModel:
    return part(TINY, GPU("gpu", 1.0, 1.0, float(memory), 1.0, 1.0), gpus, size)


def _case(memory: int, share: float, gpus: int, size: int) -> str:
    have = f"{gpus} GPUs of {memory} bytes each" if gpus > 1 else f"a GPU of {memory} bytes"
    return f"{have}, share {share:g}; the weights take {28 * size} bytes, a token of K/V {4 * size}"


def _tokens(part: type[CostModel], memory: int, share: float, gpus: int, size: int, idea: str) -> None:
    left = int(share * 8) * memory * gpus - 8 * 28 * size  # in eighths of a byte, so that nothing is rounded
    want: Any = left // (8 * 4 * size)
    if want < 1 or share > 1:
        want = "ValueError"
        idea = idea if idea == SENSELESS else "Where not one token fits, no number is right: raise ValueError."
    try:
        got: Any = _model(part, memory, gpus, size).kv_tokens(share)
    except ValueError:
        got = "ValueError"
    if want != "ValueError":
        idea = _misread(memory, share, gpus, size, want, got) or idea
    drawn = partial(_memory_drawn, memory * gpus, share, size, want, got)
    expect(got, want, case=_case(memory, share, gpus, size), idea=idea, what="tokens", picture=drawn)


def _misread(memory: int, share: float, gpus: int, size: int, want: int, got: Any) -> str:
    """The idea that is missed, as far as the number tells; the empty string if it may be any."""
    weights, token, whole = 28 * size, 4 * size, memory * gpus
    left = share * whole - weights
    read = (  # what somebody who has missed an idea divides by the bytes of a token
        (WEIGHTS, share * whole),
        (WHOLE, share * (whole - weights)),
        (TOGETHER if share == 1 else SUMS, share * memory - weights),
        (SUMS, share * memory - weights / gpus),
        (SUMS, share * whole - weights * gpus),
        (SIZES, share * whole - 28 * 2),
    )
    for idea, kv in read:
        if got in (kv // token, kv / token) and kv != left:
            return idea
    if got in (left // 8, (share * whole - 28 * 2) // 8) and size != 2:
        return SIZES
    if isinstance(got, (int, float)) and want < got < want + 2:
        return ROUNDED if left % token else ONE_LESS.format(left=left, token=token, want=want)
    if got == want - 1 and want > 1:
        return ONE_LESS.format(left=left, token=token, want=want)
    if got == "ValueError":
        return f"{want} tokens fit: there is no error to raise." if want > 1 else ENOUGH
    return f"{share:g} of all memory less the weights leaves {left:g} bytes, and a token takes {token}."


def _memory_drawn(memory: int, share: float, size: int, want: Any, got: Any) -> Figure:
    """The memory of all GPUs; below it weights and K/V, as they should be, and with the answer that was given."""
    cut = int(share * memory)
    rows = {"all memory": [Cell(f"{share:g} of it", EMPTY, cut), Cell("", EMPTY, max(memory - cut, 0))]}
    for name, tokens in (("expected", want), ("happened", got)):
        width = tokens * 4 * size if isinstance(tokens, (int, float)) else 0
        kv = Cell(f"{tokens} tokens" if width else tokens, RIGHT if width else EMPTY, max(width, 50))
        rows[name] = [Cell("weights", GONE, 28 * size), kv]
    return strips(rows, "a byte of memory has the same width everywhere")


def _is_whole(part: type[CostModel]) -> None:
    tokens = _model(part, 200).kv_tokens(1.0)
    kind = "an int" if isinstance(tokens, Integral) else f"a {type(tokens).__name__}"
    idea = "A number of tokens is an int; // of two floats is a float, though a whole one."
    expect(kind, "an int", case=_case(200, 1.0, 1, 2), idea=idea, what="kind of result")
