"""Is this a model that can be run over a cache of ours? Refuses what would be wrong without a sound.

The replacement of attention computes softmax(scale * q k) v over keys up to the query's own, in a window if there is
one. That is right for most decoder-only models. It is wrong, and nothing would crash, for models that do more than this
in attention (sinks, caps, biases, masks of their own), that never call the replacement, or that remember earlier tokens
in something else than K/V. Three looks, from cheap to dear: the configuration, the class, and what reaches attention
when one token goes through the model.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minibatch.models import UnsupportedModel
from minibatch.models.attention import IMPLEMENTATION, Layer


def check_config(config: Any, model_name: str) -> None:
    """Refuses what the configuration alone gives away."""
    text = config.get_text_config()
    reasons = {
        "it is an encoder-decoder": config.is_encoder_decoder,
        "multi-head latent attention (MLA) caches something else than K/V heads": getattr(text, "kv_lora_rank", None),
        "it caps attention scores": getattr(text, "attn_logit_softcapping", None),
        "its attention looks both ways": getattr(text, "use_bidirectional_attention", None),
    }
    _refuse_if(model_name, reasons)


def check_class(model: PreTrainedModel) -> None:
    """Refuses what the model's class gives away."""
    name = type(model).__name__
    arguments = inspect.signature(model.forward).parameters
    missing = {"position_ids", "logits_to_keep"} - set(arguments)
    passes_on = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    has_head = model.can_generate() and model.get_output_embeddings() is not None
    reasons = {
        "it is not a causal language model with a head": not has_head,
        "its layers keep a state (state space, recurrence), not only K/V": getattr(model, "_is_stateful", False),
        "its attention cannot be replaced (_supports_attention_backend)": not model._supports_attention_backend,
        f"its forward does not take {', '.join(sorted(missing))}": missing,
        "its forward passes no keywords on to attention": not passes_on,
    }
    _refuse_if(name, reasons)


def _refuse_if(model_name: str, reasons: dict[str, Any]) -> None:
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModel(f"{model_name} cannot run here: {reason}")


@torch.inference_mode()
def inspect_layers(model: PreTrainedModel) -> list[Layer]:
    """Puts our attention in place, sends one token through, and returns what each layer caches. Refuses misfits."""
    model.set_attn_implementation(IMPLEMENTATION)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    seen = _Inspection()
    try:
        model(input_ids=token, position_ids=token, use_cache=False, minibatch_step=seen)
        _check_layers(model.config.get_text_config(), seen.layers)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot run here: {error}") from None
    return seen.layers


class _Inspection:
    """Stands in for a Step: attention that writes down what it is given."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
        self.layers.append(Layer(key.shape[1], key.shape[2], value.shape[2], key.dtype, window))
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _check_layers(config: Any, layers: list[Layer]) -> None:
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedModel(
            f"{len(layers)} of its {config.num_hidden_layers} layers go through attention; what others keep of earlier "
            "tokens (a state, a convolution) has no place in a KV cache"
        )
    limit = context_limit(config) or math.inf
    for index, layer in enumerate(layers):
        window = _configured_window(config, index)
        if layer.window != window and min(layer.window or math.inf, window or math.inf) < limit:
            raise UnsupportedModel(f"layer {index} should have a window of {window}, attention was told {layer.window}")


def _configured_window(config: Any, layer: int) -> int | None:
    """The sliding window that the configuration gives a layer."""
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window if getattr(config, "use_sliding_window", True) else None
    if kinds[layer] not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(f"layer {layer} is of a kind that is not known here, {kinds[layer]}")
    return window if kinds[layer] == "sliding_attention" else None


def context_limit(config: Any) -> int | None:
    """Positions that the model supports.

    With longrope, one request beyond the original context would switch the rotation of *all* requests in the step,
    and of keys that are cached already (transformers itself has that flaw in generation); so the limit is there.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for all layers, or one a kind
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    limits.append(getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)
