"""The shape of a decoder-only transformer: the few numbers that say how many weights and K/V bytes there are.

Time and memory of an iteration follow from these alone (see :mod:`minibatch.cost_model`); no weights are needed. A
layer is attention (query, key, value and output projection) and one MLP (two matrices, or three if it is gated); before
the layers comes the table of token embeddings, with OPT and GPT-2 a table of positions too; after them the head, which
maps to the vocabulary and may be the embedding table again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minibatch.checks import check_int

# What different families call the width of their MLP. A family that names none has four times the hidden size.
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
# Attention of another kind than "each query reads keys and values of all heads, from all positions or the last few".
OTHER_ATTENTION = (
    "kv_lora_rank",
    "num_kv_shared_layers",
    "attention_chunk_size",
    "mamba_d_state",
    "is_encoder_decoder",
)


@dataclass(frozen=True)
class ModelShape:
    """Raises ValueError for sizes that are no positive integers, or K/V heads that do not divide the query heads.

    ``gated``              whether the MLP has a third matrix, as SwiGLU has
    ``tied``               whether the head is the embedding table, so that its weights exist once
    ``max_model_len``      positions that the model supports; None if unlimited
    ``sliding_window``     every layer's queries see the last so many positions, their own included; None: all
    ``learned_positions``  rows of a table of position embeddings; 0 if positions are computed (rotary)
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated: bool = True
    tied: bool = False
    max_model_len: int | None = None
    sliding_window: int | None = None
    learned_positions: int = 0

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        )
        for size in sizes:
            check_int(f"{self.name}: {size}", getattr(self, size), 1)
        for limit in ("max_model_len", "sliding_window"):
            if getattr(self, limit) is not None:
                check_int(f"{self.name}: {limit}", getattr(self, limit), 1)
        check_int(f"{self.name}: learned_positions", self.learned_positions, 0)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.name}: {self.num_kv_heads} K/V heads do not divide {self.num_heads} query heads")

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer: all that a token is multiplied with there."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Weights of the head, which maps a position that is sampled from to the vocabulary."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices and tables. Vectors (norms, biases) are left out: less than 0.1 % of a real model."""
        tables = self.head_parameters * (1 if self.tied else 2) + self.learned_positions * self.hidden_size
        return self.num_layers * self.layer_parameters + tables

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that a cached token takes: K and V of every K/V head, in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes of K and V of one token over all layers; 2 bytes a value are fp16 and bf16."""
        return self.kv_values_per_token * bytes_per_value

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """The shape of the causal language model that a transformers configuration describes.

        A configuration gives sizes, and does not say what is built of them. So the model is built, without memory for
        its weights, and its matrices have to be as many as the shape counts. Raises ValueError for a model that a shape
        cannot express: a mixture of experts, layers of several kinds, attention with latent or shared K/V, a projection
        around the embeddings, no causal language model at all.
        """
        config = config.get_text_config()
        name = getattr(config, "name_or_path", "") or config.model_type
        try:
            _refuse_other_kinds(config)
            matrices, positions = _built(config)
            sizes = {"name": name, "learned_positions": positions, **_sizes(config)}
        except Exception as error:  # a ValueError of ours, or whatever transformers finds wrong
            raise ValueError(f"{name}: no plain causal language model: {error}") from error
        shapes = [cls(gated=gated, **sizes) for gated in (False, True)]
        for shape in shapes:
            if shape.num_parameters == matrices:
                return shape
        counts = " or ".join(f"{shape.num_parameters:,}" for shape in shapes)
        raise ValueError(
            f"{name}: its matrices have {matrices:,} weights, where a plain decoder of its sizes has {counts}"
        )


def _refuse_other_kinds(config: Any) -> None:
    """What could have the right number of weights, and yet compute something else."""
    for key, value in config.to_dict().items():
        if value and ("expert" in key or key in OTHER_ATTENTION):
            raise ValueError(f"{key} is {value!r}")


def _window(config: Any) -> int | None:
    """The sliding window that all layers share."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    # what each layer is; GPT-Neo has its own word for it
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ())
    if kinds == {"full_attention"} or kinds == {"global"}:
        return None
    if kinds - {"sliding_attention"}:
        raise ValueError(f"its layers are of the kinds {', '.join(sorted(kinds))}")
    return window


def _sizes(config: Any) -> dict[str, Any]:
    from minibatch.models.supported import context_limit  # here, because it needs torch

    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon-7B, StarCoder
    widths = [width for key in MLP_WIDTHS if (width := getattr(config, key, None)) is not None]
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "intermediate_size": widths[0] if widths else 4 * hidden,
        "vocab_size": config.vocab_size,
        "tied": bool(config.tie_word_embeddings),
        "max_model_len": context_limit(config),
        "sliding_window": _window(config),
    }


def _built(config: Any) -> tuple[int, int]:
    """Weights of all matrices of the model, and rows of its position table."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes without storage: 70 billion weights take no memory
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    if any("cross" in name or "encoder_attn" in name for name, _ in model.named_modules()):
        raise ValueError("it attends to the output of an encoder")
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    positions = sum(table.num_embeddings for table in tables if table is not model.get_input_embeddings())
    return sum(weight.numel() for weight in model.parameters() if weight.ndim > 1), positions


# Sizes as in the models' published config.json.
MODELS = {
    "opt-13b": ModelShape(
        "OPT-13B",
        40,
        5120,
        40,
        40,
        128,
        20480,
        50272,
        gated=False,
        tied=True,
        max_model_len=2048,
        learned_positions=2050,
    ),
    "llama-2-7b": ModelShape("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, max_model_len=4096),
    "llama-2-70b": ModelShape("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000, max_model_len=4096),
    "llama-3-8b": ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, max_model_len=8192),
    "llama-3-70b": ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, max_model_len=8192),
    # version 0.1; later ones have no window
    "mistral-7b": ModelShape(
        "Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000, max_model_len=32768, sliding_window=4096
    ),
    "qwen3-0.6b": ModelShape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, tied=True, max_model_len=40960),
    "qwen3-8b": ModelShape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, max_model_len=40960),
    "smollm2-135m": ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, tied=True, max_model_len=8192),
}
