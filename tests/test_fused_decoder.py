"""The fast path against the readable one: the same logits and tokens, exactly in float64, else within rounding."""

import pytest
import torch
import torch.nn.functional as F
from test_transformers_model import EXACT, PROMPTS, Driver, whole_story
from tiny_models import FAMILIES, tiny_model
from torch import nn

from minibatch import ChunkedPrefill, Engine, PagedKVCache, Request, SamplingParams, compare
from minibatch.models import fused_decoder, prepacked
from minibatch.models.prepacked import Linear
from minibatch.models.transformers_model import TransformersModel

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, as many K/V heads": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
packs = prepacked._pack(torch.zeros(32, 32)) is not None  # some builds and processors have no such operations


def both(name, dtype=torch.float64):
    family, config = VARIANTS[name]
    return TransformersModel(tiny_model(family, dtype=dtype, **config), fast=True), tiny_model(
        family, dtype=dtype, **config
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_models_own_forward_pass(name):
    """Faults: a bias or a window ignored, heads mixed up when q, k and v are one product, a wrong half rotated."""
    executor, reference = both(name)
    assert executor.fused is not None
    assert whole_story(Driver(executor, reference, PROMPTS)) < EXACT


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
def test_prepacked_weights_change_no_more_than_rounding(name, dtype, tolerance):
    executor, reference = both(name, dtype)
    assert (executor.fused._head._packed is not None) == packs
    assert whole_story(Driver(executor, reference, PROMPTS)) < tolerance


def test_without_the_packed_operations_plain_ones_do(monkeypatch):
    """Fault: on a processor or a build that lacks them, the fast path cannot be used at all."""

    def missing(*_):
        raise NotImplementedError

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    executor, reference = both("llama, biases", torch.float32)
    assert executor.fused._head._packed is None
    assert whole_story(Driver(executor, reference, PROMPTS)) < 1e-4


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "mistral", "qwen2", "qwen3"}))
def test_other_families_run_as_always(family):
    """Fault: a model of another shape is computed as if it were a Llama."""
    executor = TransformersModel(tiny_model(family), fast=True)
    assert executor.fused is None
    assert whole_story(Driver(executor, tiny_model(family), PROMPTS)) < EXACT


def test_another_activation_or_an_adapter_is_not_fused():
    """Faults: SiLU where the model has another function; a matrix with something added to it, which would be lost."""
    assert fused_decoder.fits(tiny_model("llama"))
    assert not fused_decoder.fits(tiny_model("llama", hidden_act="gelu"))

    class Adapted(nn.Linear):
        pass

    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = Adapted(32, 48, bias=False, dtype=torch.float64)
    assert not fused_decoder.fits(model)
    model = tiny_model("llama")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not fused_decoder.fits(model)


@pytest.mark.parametrize("missing", ["q_proj", "k_proj", "v_proj"])
def test_only_some_of_the_joined_matrices_may_have_a_bias(missing):
    """Fault: the biases of all are taken to be there, or not to be there, if that of the first is."""

    def model():
        made = tiny_model("llama", attention_bias=True)
        for layer in made.model.layers:
            for bias in (layer.self_attn.q_proj.bias, layer.self_attn.k_proj.bias, layer.self_attn.v_proj.bias):
                bias.data.uniform_(1, 2, generator=torch.Generator().manual_seed(3))
            getattr(layer.self_attn, missing).bias = None
        return made

    executor = TransformersModel(model(), fast=True)
    assert executor.fused is not None
    assert whole_story(Driver(executor, model(), PROMPTS)) < EXACT


def test_a_fast_path_that_is_wrong_is_not_used():
    """Fault: a model that looks like a Llama and computes something else gets wrong tokens."""

    def odd():
        model = tiny_model("llama")
        model.model.layers[0].mlp.forward = lambda x: 2 * x  # what somebody patched in
        return model

    with pytest.warns(UserWarning, match="the fast path is not used: LlamaForCausalLM .* is off its own logits"):
        executor = TransformersModel(odd(), fast=True)
    assert executor.fused is None
    assert whole_story(Driver(executor, odd(), PROMPTS)) < EXACT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_model_itself_is_as_it_was(dtype):
    """Fault: joining the weights of q, k and v leaves the model's own matrices changed, or stores them twice."""
    executor, reference = both("qwen2", dtype)
    tokens, logits = executor.generate([1, 2, 3], 8)
    expected = TransformersModel(reference).generate([1, 2, 3], 8)
    assert tokens == expected[0] and torch.equal(logits, expected[1])
    attention, qkv = executor.model.model.layers[0].self_attn, executor.fused._layers[0]._qkv
    if qkv._packed is None:
        assert attention.k_proj.weight.untyped_storage().data_ptr() == qkv.weight.untyped_storage().data_ptr()
    else:
        assert not hasattr(qkv, "weight")


def test_tokens_of_a_whole_run_are_the_same():
    """With chunks, decodes, preemption; the readable path is the reference."""
    requests = [Request(range(i + 1, 3 * i + 4), SamplingParams(max_tokens=12)) for i in range(6)]
    tokens = []
    for fast in (False, True):
        executor = TransformersModel(tiny_model("qwen3"), fast=fast)
        engine = Engine(executor, ChunkedPrefill(token_budget=8, max_num_seqs=4), PagedKVCache(10, block_size=4))
        tokens.append([result.tokens for result in engine.run(requests)])
        assert any(step.preempted for step in engine.trace.steps)
    assert tokens[0] == tokens[1]


# ------------------------------------------------------------------------------------ a matrix and what follows


def matrix(inputs, outputs, bias, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return linear


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 0), (torch.float32, 1e-4), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
@torch.inference_mode()
def test_a_product_takes_along_what_follows(rows, bias, dtype, tolerance):
    """Faults: an operand is overwritten, a bias is added twice, a layout holds for one number of rows."""
    plain = matrix(48, 32, bias, dtype)
    linear, x, other = Linear(plain), torch.randn(rows, 48).to(dtype), torch.randn(rows, 32).to(dtype)
    before = x.clone(), other.clone()
    product = F.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    for got, expected in (
        (linear(x), product),
        (linear.silu(x), F.silu(product)),
        (linear.times(x, other), product * other.double()),
        (linear.plus(x, other), product + other.double()),
    ):
        assert got.dtype is dtype and got.shape == (rows, 32)
        assert (got.double() - expected).abs().max() <= tolerance + 1e-12
    assert torch.equal(x, before[0]) and torch.equal(other, before[1])


@torch.inference_mode()
def test_several_matrices_are_one_and_their_results_lie_side_by_side():
    parts = [matrix(16, outputs, True, torch.float64, seed=outputs) for outputs in (8, 4, 4)]
    x = torch.randn(5, 16, dtype=torch.float64)
    apart = torch.cat([part(x) for part in parts], dim=1)
    assert (Linear(*parts)(x) - apart).abs().max() < EXACT
    assert torch.equal(torch.cat([part(x) for part in parts], dim=1), apart)


def test_a_comparison_says_that_it_ran_on_the_fast_path():
    """Fault: a saved run cannot be told from one of the unmodified model."""
    for fast in (True, False):
        executor = TransformersModel(tiny_model("llama", dtype=torch.float32), fast=fast)
        meta = compare._meta(executor, compare.Setup(), rate=1.0, kv_tokens=64)
        assert meta.get("forward") == ("fast path" if fast else None)
