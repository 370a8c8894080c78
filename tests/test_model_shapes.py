"""Model shapes: against published sizes, against models that transformers builds, and what they refuse to describe."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from minibatch import TransformersModel
from minibatch.model_shapes import MODELS, ModelShape
from minibatch.models.supported import inspect_layers

PUBLISHED = {  # parameters, as in the papers and model cards
    "opt-13b": 12.85e9,
    "llama-2-7b": 6.74e9,
    "llama-2-70b": 68.98e9,
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.55e9,
    "mistral-7b": 7.24e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-8b": 8.19e9,
    "smollm2-135m": 134.5e6,
}

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FALCON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}  # these know no grouped heads
OPT = {key: value for key, value in PLAIN.items() if key != "intermediate_size"} | {
    "ffn_dim": 88,
    "word_embed_proj_dim": 32,
}
SMALL = {  # what is unlike Llama: K/V heads, MLP, tables, windows
    "LlamaConfig": LLAMA,
    "LlamaConfig, tied": {**LLAMA, "tie_word_embeddings": True},
    "MistralConfig": {**LLAMA, "sliding_window": 5, "head_dim": 16},
    "Qwen2Config": LLAMA,
    "Qwen3Config": {**LLAMA, "head_dim": 24},
    "Phi3Config": {**LLAMA, "sliding_window": 7},
    "GemmaConfig": {**LLAMA, "head_dim": 16},
    "SmolLM3Config": LLAMA,
    "GPT2Config": GPT2,
    "GPT2Config, narrow": {**GPT2, "n_inner": 48},
    "OPTConfig": OPT,
    "GPTNeoXConfig": PLAIN,
    "GPTJConfig": {**GPT2, "rotary_dim": 4},
    "Starcoder2Config": LLAMA,
    "GPTBigCodeConfig": GPT2,
    "FalconConfig": FALCON,
    "FalconConfig, grouped": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
}
OURS = ["LlamaConfig", "MistralConfig", "Qwen3Config", "Phi3Config", "GemmaConfig", "GPT2Config", "OPTConfig"]
REFUSED = {  # and a word of the reason
    "MixtralConfig": ({**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, "expert"),
    "Qwen3MoeConfig": ({**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}, "expert"),
    "DeepseekV3Config": ({}, "expert|kv_lora_rank"),
    "Gemma3TextConfig": ({**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}, "full_attention"),
    "GPTNeoConfig": ({"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "local"),
    "OPTConfig": ({**OPT, "word_embed_proj_dim": 16}, "weights"),
    "MambaConfig": ({"hidden_size": 32, "num_hidden_layers": 2}, "num_attention_heads"),
    "T5Config": ({}, "is_encoder_decoder"),
    "TrOCRConfig": ({}, "encoder"),
    "ViTConfig": ({}, "no plain causal language model"),
}


def config(name, fields):
    return getattr(transformers, name.split(",")[0])(**fields)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name):
    """Fault: a projection forgotten, tied weights counted twice, OPT's position table or ungated MLP missed."""
    assert MODELS[name].num_parameters == pytest.approx(PUBLISHED[name], rel=0.005)


def test_kv_bytes():
    """Fault: K without V, query heads for K/V heads. OPT-13B: vLLM, SOSP 2023, section 1 (800 KB a token)."""
    assert MODELS["opt-13b"].kv_bytes_per_token() == 819_200
    assert MODELS["llama-2-7b"].kv_bytes_per_token() == 32 * 16 * 1024  # 16 KB a layer
    assert MODELS["llama-2-7b"].kv_bytes_per_token(4) == 32 * 32 * 1024
    assert MODELS["llama-3-8b"].kv_bytes_per_token() == 32 * 4 * 1024  # 8 K/V heads of 32


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_of_a_model_that_transformers_builds(name):
    """Fault: a configuration read wrongly, whose family calls things by other names. The matrices are counted."""
    built = config(name, SMALL[name])
    model = AutoModelForCausalLM.from_config(built)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    shape = ModelShape.from_config(built)
    assert shape.num_parameters == matrices
    blocks = [weight for name, weight in model.named_parameters() if ".0." in name and weight.ndim > 1]
    assert shape.layer_parameters == sum(weight.numel() for weight in blocks)
    assert shape.head_parameters == model.get_output_embeddings().weight.numel()
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", OURS)
def test_kv_as_in_the_executor(name, one_thread):
    """Fault: K/V bytes, window or context limit other than those of the model that is run."""
    built = config(name, SMALL[name])
    model = AutoModelForCausalLM.from_config(built, dtype=torch.float32).eval()
    shape, windows = ModelShape.from_config(built), {layer.window for layer in inspect_layers(model)}
    executor = TransformersModel(model)
    assert shape.kv_bytes_per_token(4) == executor.kv_bytes_per_token
    assert shape.max_model_len == executor.max_model_len
    assert windows == {shape.sliding_window}


def test_biases_and_norms_are_few():
    """Fault: a whole table left out with the vectors."""
    sizes = {"hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, "num_attention_heads": 8}
    model = AutoModelForCausalLM.from_config(config("OPTConfig", {**OPT, **sizes}))
    count = sum(weight.numel() for weight in model.parameters())
    assert ModelShape.from_config(model.config).num_parameters == pytest.approx(count, rel=0.005)


def test_published_sizes_agree_with_configurations():
    """Fault: a size in the table that is not the model's. Built without memory: 70 billion weights take none."""
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    configs = {
        "llama-2-7b": transformers.LlamaConfig(max_position_embeddings=4096),
        "llama-2-70b": transformers.LlamaConfig(**big, num_key_value_heads=8, max_position_embeddings=4096),
        "mistral-7b": transformers.MistralConfig(max_position_embeddings=32768, sliding_window=4096),
        "opt-13b": transformers.OPTConfig(
            hidden_size=5120, word_embed_proj_dim=5120, ffn_dim=20480, num_hidden_layers=40, num_attention_heads=40
        ),
    }
    for name, built in configs.items():
        assert replace(ModelShape.from_config(built), name=MODELS[name].name) == MODELS[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_shape_cannot_express_is_refused(name):
    """Fault: a mixture of experts that is priced as if every token used all of it, and the like."""
    fields, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        ModelShape.from_config(config(name, fields))


def test_the_configuration_is_left_alone():
    """Fault: building the model for counting changes the user's configuration."""
    built = config("MistralConfig", SMALL["MistralConfig"])
    before = built.to_dict()
    ModelShape.from_config(built)
    assert built.to_dict() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 0), ("head_dim", 1.5), ("vocab_size", True), ("sliding_window", 0), ("learned_positions", -1)],
)
def test_bad_sizes(field, value):
    """Fault: a wrong size is found later, as a wrong time."""
    with pytest.raises(ValueError, match=f"Mistral-7B: {field} .*{value}"):
        replace(MODELS["mistral-7b"], **{field: value})


def test_heads_that_do_not_divide():
    """Fault: groups of unequal size are taken for a model."""
    with pytest.raises(ValueError, match="5 K/V heads do not divide 32"):
        replace(MODELS["llama-2-7b"], num_kv_heads=5)
