"""The forward pass of a Llama-like model, written out: what transformers computes, in half of the operations.

With few rows an iteration is bound by reading the weights once. What comes on top is the price of each small operation:
transformers' Llama has 79 in a layer (as PyTorch's profiler counts them), and Python around them. Here it is 38:

* q, k and v are one product; heads of q and k are rotated together;
* a sum or product that follows a matrix product is taken along by it (:mod:`minibatch.models.prepacked`).

The embedding and the angles of the rotation come from the model's own modules. Attention is that of ``Step.attend``, so
nothing changes in who sees whom and where K/V are. Read :mod:`minibatch.models.transformers_model` first: this
module computes the same, is used only if asked for, and only after its logits for a short prompt agreed with those of
the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from minibatch.models.prepacked import Linear

# The families whose layer is exactly the one below. Others (parallel blocks, scaled residuals, experts) are not.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def fits(model: PreTrainedModel) -> bool:
    """Whether the model's layers are of the shape that is written out here, with plain matrices (no adapters), and
    nobody has hooked into its parts."""
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return (
        not hooked
        and type(model).__name__ in FAMILIES
        and all(
            isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation)
            and all(type(x) is nn.Linear for x in _matrices(layer))
            for layer in model.model.layers
        )
    )


def _matrices(layer: nn.Module) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


class FusedDecoder:
    """``decoder(step)``: logits ``[rows, vocab_size]`` in the model's dtype, of the tokens that ``step`` names."""

    def __init__(self, model: PreTrainedModel, windows: Sequence[int | None]) -> None:
        """``windows``: of each layer, how many keys a query sees; None: all."""
        self._embed, self._norm = model.model.embed_tokens, _norm(model.model.norm)
        self._rotary = model.model.rotary_emb
        self._layers = [_Layer(layer, window) for layer, window in zip(model.model.layers, windows, strict=True)]
        self._head = Linear(model.lm_head)

    def __call__(self, step: Any) -> Tensor:
        hidden = self._embed(step.input_ids)[0]
        cos, sin = (angles[0, :, None] for angles in self._rotary(hidden, step.position_ids))  # [T, 1, head_dim]
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # the sign of the half that changes places
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, step)
        return self._head(self._norm(hidden.index_select(0, step.logit_index)))


class _Layer:
    def __init__(self, layer: nn.Module, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._before_attention, self._before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._qkv = Linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = Linear(attention.o_proj)
        self._gate, self._up, self._down = Linear(mlp.gate_proj), Linear(mlp.up_proj), Linear(mlp.down_proj)
        self._head_dim, self._scale = attention.head_dim, attention.scaling
        self._heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self._window = window
        self._norms = _norm(getattr(attention, "q_norm", None)), _norm(getattr(attention, "k_norm", None))

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: Any) -> Tensor:
        """``hidden`` ``[T, hidden_size]``"""
        heads = self._qkv(self._before_attention(hidden)).view(len(hidden), -1, self._head_dim)
        query_key, value = heads.split([self._heads + self._kv_heads, self._kv_heads], dim=1)
        query_key = self._normed(query_key)
        half = self._head_dim // 2
        swapped = torch.cat((query_key[..., half:], query_key[..., :half]), dim=-1)
        query, key = (query_key * cos).addcmul_(swapped, sin).split([self._heads, self._kv_heads], dim=1)
        attended = step.attend(query, key, value, self._window, self._scale).flatten(1)
        hidden = self._out.plus(attended, hidden)
        x = self._before_mlp(hidden)
        return self._down.plus(self._up.times(x, self._gate.silu(x)), hidden)

    def _normed(self, query_key: Tensor) -> Tensor:
        """Queries and keys as they are, or (Qwen3) each head normed."""
        query_norm, key_norm = self._norms
        if query_norm is None:
            return query_key
        query, key = query_key.split([self._heads, self._kv_heads], dim=1)
        return torch.cat((query_norm(query), key_norm(key)), dim=1)


def _norm(module: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    """RMSNorm as one operation. In float64 the module itself: it rounds to float32 on the way, and so must we."""
    if module is None or module.weight.dtype is torch.float64:
        return module
    return partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=module.variance_epsilon)
