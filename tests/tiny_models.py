"""Tiny random language models of the families that matter: float64, seeded, built in a few milliseconds.

Their weights are drawn wide, so that attention is sharp and every token that is read wrongly shows in the logits.
Vocabulary 100, context 128; sliding windows are 5 tokens, so that short prompts cross them. No end of sequence unless
one is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 100
WINDOW = 5
CONTEXT = 128
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LOCAL_AND_GLOBAL = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# name -> configuration class, and what differs from _SIZES
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),  # biases of q, k and v
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {**_LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 5}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gpt2": ("GPT2Config", {}),  # learned positions, no grouped heads
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}),
    # global layers that hold a window they are told not to use
    "exaone4": ("Exaone4Config", {**_LOCAL_AND_GLOBAL, "sliding_window_pattern": 2}),
    # a window that the layer holds and never passes on
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, **_LOCAL_AND_GLOBAL, "num_experts": 4, "use_sliding_window": True, "max_window_layers": 3},
    ),
}


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float64, eos_token_id: int | None = None, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """One of ``FAMILIES``, in eval mode; ``config`` overrides its configuration. Equal arguments, equal model."""
    kind, differences = FAMILIES[family]
    fields = {**_SIZES, "eos_token_id": eos_token_id, "bos_token_id": None, "pad_token_id": None}
    built = getattr(transformers, kind)(**{**fields, **differences, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(built, dtype=dtype).eval()
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # the default knows no float64
    return model
