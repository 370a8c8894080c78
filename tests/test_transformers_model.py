"""The executor against transformers' own forward pass: the same logits, whatever was batched, chunked, paged or padded.

The reference is a second model with the same weights, given each request's tokens alone and whole. In float64 nothing
but the last digits may differ.
"""

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONTEXT, FAMILIES, VOCAB, tiny_model
from transformers import AutoModelForCausalLM

from minibatch.clock import RealClock
from minibatch.kv_cache import ContiguousKVCache
from minibatch.models import UnsupportedModel, packing
from minibatch.models.attention import KVStore, Layer, Step, attend_batched, attend_each
from minibatch.models.packing import Span, alike, visible
from minibatch.models.transformers_model import TransformersModel, check_dtype
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Chunk, Padding, Plan
from minibatch.request import Request, RequestState, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-12


def new_request(prompt, name="r", **params):
    return RequestState(
        request=Request(prompt, SamplingParams(**params)),
        request_id=name,
        label=name,
        prompt=prompt,
        arrival_time=0.0,
        max_new_tokens=64,
        stop_token_ids=frozenset(),
        seed=0,
        timeline=None,
    )


def shuffled_paged_cache():
    """Blocks of 4, handed out in no order. The first and the last are nobody's ever: row 0 and row -1 stay poisoned."""
    kv = PagedKVCache(num_blocks=64, block_size=4)
    held = [new_request([1]) for _ in range(64)]
    for request in held:
        kv.reserve(request, 4)
    for index in 1 + np.random.default_rng(3).permutation(62):
        kv.release(held[index])
    return kv


class Driver:
    """An engine by hand: its requests generate tokens that are set beforehand, so that every logit is known."""

    def __init__(self, executor, reference, prompt_lengths, kv=None):
        rng = np.random.default_rng(1)
        self.executor, self.kv = executor, kv or shuffled_paged_cache()
        self.store = executor.allocate(self.kv.num_rows)
        self.texts = [rng.integers(VOCAB, size=length + 24).tolist() for length in prompt_lengths]
        self.requests = [new_request(t[:n]) for t, n in zip(self.texts, prompt_lengths, strict=True)]
        with torch.inference_mode():
            self.expected = [reference(input_ids=torch.tensor([text])).logits[0] for text in self.texts]
        self.error = 0.0

    def step(self, counts, padding=()):
        """Computes ``counts[i]`` more tokens of request i, in the order of ``counts``; compares all logits."""
        chunks = []
        for i, count in counts.items():
            request = self.requests[i]
            chunks.append(Chunk(request, request.num_computed, request.num_computed + count))
            self.kv.reserve(request, chunks[-1].stop)
        self.poison()
        logits = self.executor.forward(Plan(chunks=tuple(chunks), padding=tuple(padding)), self.kv, self.store)
        sampled = [i for i, chunk in zip(counts, chunks, strict=True) if chunk.samples]
        assert logits.shape == (len(sampled), VOCAB)
        for row, i in zip(logits, sampled, strict=True):
            difference = (row - self.expected[i][self.requests[i].num_tokens - 1]).abs().max().item()
            assert np.isfinite(difference)
            self.error = max(self.error, difference)
        for i, chunk in zip(counts, chunks, strict=True):
            request = self.requests[i]
            request.num_computed = chunk.stop
            if chunk.stop == request.num_tokens:
                request.generated.append(self.texts[i][request.num_tokens])
                request.num_tokens += 1
        assert all(torch.isfinite(table[-1]).all() for table in self.store.keys + self.store.values)

    def poison(self):
        """NaN in every row that is not the K/V of a live request's token, the reserved ones included."""
        kept = [self.store.scratch_row]
        for request in self.requests:
            kept += self.kv.rows(request, 0, request.num_computed).tolist()
        for table in self.store.keys + self.store.values:
            owned = table[kept].clone()
            table.fill_(float("nan"))
            table[kept] = owned


def whole_story(driver):
    """Prompts together, prompts in chunks, decodes beside chunks, padding of both kinds; all windows are crossed."""
    dead = new_request([1])
    driver.step({0: 11, 1: 3})
    driver.step({2: 6, 0: 1, 1: 1, 3: 1}, [Padding(dead, 4, dead=False)])
    driver.step({1: 1, 2: 4, 0: 1}, [Padding(dead, 1, dead=True), Padding(dead, 1, dead=True)])
    driver.step({2: 7, 3: 1, 1: 1})
    driver.step(dict.fromkeys((3, 1, 0, 2), 1))
    driver.step(dict.fromkeys(range(4), 1), [Padding(dead, 1, dead=True)])
    for _ in range(4):
        driver.step({2: 1, 1: 1, 0: 1})
    return driver.error


PROMPTS = [11, 3, 17, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_plain_forward_pass(family):
    executor = TransformersModel(tiny_model(family))
    assert whole_story(Driver(executor, tiny_model(family), PROMPTS)) < EXACT


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_readable_loop_gives_the_same(family):
    executor = TransformersModel(tiny_model(family), attend=attend_each)
    assert whole_story(Driver(executor, tiny_model(family), PROMPTS)) < EXACT


def test_a_contiguous_cache_gives_the_same():
    executor = TransformersModel(tiny_model("gemma3"))
    kv = ContiguousKVCache(num_slots=4, slot_size=48)
    assert whole_story(Driver(executor, tiny_model("gemma3"), PROMPTS, kv)) < EXACT


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 0.5), ("float16", 0.1)])
def test_other_dtypes_differ_by_rounding_only(dtype, tolerance):
    executor = TransformersModel(tiny_model("llama", dtype=getattr(torch, dtype)), dtype=dtype)
    driver = Driver(executor, tiny_model("llama", dtype=getattr(torch, dtype)), PROMPTS)
    assert whole_story(driver) < tolerance
    assert driver.store.keys[0].dtype is getattr(torch, dtype)
    plan = Plan(chunks=(Chunk(driver.requests[3], 3, 4),))
    assert executor.forward(plan, driver.kv, driver.store).dtype is torch.float32


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_decodes_of_all_lengths_attend_together_as_they_do_alone(family, monkeypatch):
    prompts = [1, 2, 5, 64, 65, 66, 100]  # one token to a hundred
    monkeypatch.setattr(packing, "WASTE", 100)  # three groups
    errors = []
    for attend in (attend_batched, attend_each):
        driver = Driver(TransformersModel(tiny_model(family), attend=attend), tiny_model(family), prompts)
        driver.kv = PagedKVCache(num_blocks=160, block_size=4)
        driver.store = driver.executor.allocate(driver.kv.num_rows)
        driver.step(dict(enumerate(prompts)))
        for _ in range(3):
            driver.step(dict.fromkeys((4, 0, 6, 2, 5, 1, 3), 1))
        errors.append(driver.error)
    assert max(errors) < EXACT


def test_decodes_of_similar_length_share_an_operation_and_chunks_have_their_own():
    executor = TransformersModel(tiny_model("llama"))
    kv = PagedKVCache(num_blocks=100, block_size=16)
    plan = []
    for context in (700, 10, 12, 690, 64, 65):
        request = new_request([1] * context)
        kv.reserve(request, context)
        plan.append(Chunk(request, context - (3 if context == 12 else 1), context))
    step = Step(Plan(chunks=tuple(plan)), kv, executor.allocate(kv.num_rows), executor.device, attend_batched)
    parts = [(part.batch, len(part.rows) // part.batch) for part in step.parts(None, 2, torch.float64)]
    assert parts == [(3, 65), (2, 700), (1, 12)]
    assert step.input_ids.shape == (1, 8)
    windowed = [(part.batch, len(part.rows) // part.batch) for part in step.parts(16, 2, torch.float64)]
    assert windowed == [(5, 16), (1, 12)]  # within a window all contexts are alike


def test_a_group_of_decodes_ends_where_its_padding_would_be_too_much():
    """512 rows of padding are still one group, 513 are two; a chunk stands alone, whatever its context."""

    def grouped(decodes, chunks=()):
        spans = [Span(i, 1, np.arange(n)) for i, n in enumerate(decodes)] + [Span(99, 3, np.arange(n)) for n in chunks]
        return [[len(span.rows) for span in group] for group in alike(spans)]

    assert grouped([10, 10 + 512]) == [[10, 522]]
    assert grouped([10, 10 + 513]) == [[10], [523]]
    assert grouped([100, 100, 356]) == [[100, 100, 356]]  # twice 256
    assert grouped([100, 100, 357, 358]) == [[100, 100], [357, 358]]
    assert grouped([5], [6, 6]) == [[5], [6], [6]]
    assert grouped([], [6]) == [[6]] and grouped([]) == []


def test_the_mask_is_aligned_at_the_bottom_right():
    two_of_four = visible(np.array([4]), queries=2, window=None)[0]
    assert two_of_four.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    windowed = visible(np.array([4, 2]), queries=1, window=2)
    assert windowed.tolist() == [[[0, 0, 1, 1]], [[1, 1, 0, 0]]]


# --- what a plan pays for ---


class Counter:
    """Tokens that went through a layer."""

    def __init__(self, module):
        self.tokens = []
        module.register_forward_hook(lambda _, given, result: self.tokens.append(result.shape[1]))


def test_logits_are_made_for_sampled_rows_and_dead_rows_only():
    model = tiny_model("llama")
    executor = TransformersModel(model)
    linear, head = Counter(model.model.layers[0].mlp), Counter(model.lm_head)
    driver = Driver(executor, tiny_model("llama"), PROMPTS)
    dead = new_request([1])
    driver.step({2: 10, 0: 11, 1: 2}, [Padding(dead, 5, dead=False)])  # only 0 reaches the end of its prompt
    driver.step({0: 1}, [Padding(dead, 1, dead=True), Padding(dead, 1, dead=True)])
    driver.step({2: 3})
    assert linear.tokens == [28, 3, 3]
    assert head.tokens == [1, 3, 0]
    assert driver.error < EXACT


def test_a_scored_prompt_gets_logits_at_every_position():
    executor, reference = TransformersModel(tiny_model("llama")), tiny_model("llama")
    kv = shuffled_paged_cache()
    store = executor.allocate(kv.num_rows)
    scored, other = new_request(list(range(9)), prompt_logprobs=0), new_request([5, 6, 7])
    for request in (scored, other):
        kv.reserve(request, 9)
    logits = executor.forward(Plan(chunks=(Chunk(scored, 0, 9), Chunk(other, 0, 3))), kv, store)
    expected = [reference(input_ids=torch.tensor([x.prompt])).logits[0] for x in (scored, other)]
    assert (logits - torch.cat([expected[0], expected[1][-1:]])).abs().max() < EXACT


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_layers_of_any_sizes_share_one_piece_of_memory(num_rows):
    """Faults: a table that begins in the middle of a number, or overlaps with its neighbour."""
    layers = [
        Layer(1, 1, 2, torch.bfloat16, None),
        Layer(1, 3, 5, torch.float32, None),
        Layer(2, 1, 1, torch.float64, 3),
    ]
    store = KVStore(layers, num_rows, torch.device("cpu"))
    tables = [table for pair in zip(store.keys, store.values, strict=True) for table in pair]
    for number, table in enumerate(tables):
        table.fill_(number)
    assert [table.dtype for table in store.keys] == [layer.dtype for layer in layers]
    assert [tuple(table.shape) for table in store.values] == [(num_rows + 1, x.kv_heads, x.value_dim) for x in layers]
    assert all((table == number).all() and table.data_ptr() % 8 == 0 for number, table in enumerate(tables))


def test_two_stores_of_one_model_do_not_mix():
    executor = TransformersModel(tiny_model("qwen3"))
    drivers = [Driver(executor, tiny_model("qwen3"), lengths) for lengths in ([4, 9], [7, 2])]
    drivers[0].step({0: 4, 1: 9})
    drivers[1].step({0: 7, 1: 2})
    for driver in drivers * 3:
        driver.step({1: 1, 0: 1})
    assert max(driver.error for driver in drivers) < EXACT


# --- facts ---


def test_facts_come_from_the_configuration():
    model = TransformersModel(tiny_model("gemma3", eos_token_id=7))
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (VOCAB, CONTEXT, {7})
    assert model.kv_bytes_per_token == 3 * 2 * 2 * 8 * 8  # layers, K and V, heads, dim, bytes
    assert (model.dtype, str(model.device), model.tokenizer) == ("float64", "cpu", None)
    assert isinstance(model.clock(), RealClock)
    store = model.allocate(10)
    assert [tuple(table.shape) for table in store.keys + store.values] == [(11, 2, 8)] * 6
    assert TransformersModel(tiny_model("llama")).eos_token_ids == frozenset()


def test_generation_settings_know_more_ends_than_the_configuration():
    model = tiny_model("llama", eos_token_id=7)
    model.generation_config.eos_token_id = [7, 9]
    assert TransformersModel(model).eos_token_ids == {7, 9}


def test_longrope_ends_at_the_original_context():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny_model("llama", rope_parameters={**rope, **factors})
    assert TransformersModel(model).max_model_len == 32


def test_generate_is_the_stock_model_and_leaves_ours_in_place():
    executor = TransformersModel(tiny_model("gemma3"))
    prompt = [3, 1, 4, 1, 5, 9]
    tokens, logits = executor.generate(prompt, 12)
    plain = tiny_model("gemma3")(input_ids=torch.tensor([prompt + tokens])).logits[0]
    assert len(tokens) == 12
    assert (logits - plain[len(prompt) - 1 : -1]).abs().max() < 1e-5  # generate rounds them to float32
    assert tokens == logits.argmax(-1).tolist()
    assert whole_story(Driver(executor, tiny_model("gemma3"), PROMPTS)) < EXACT
    ending = TransformersModel(tiny_model("gemma3", eos_token_id=tokens[3]))
    assert ending.generate(prompt, 12)[0] == tokens[: tokens.index(tokens[3]) + 1]


# --- loading ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    assert check_dtype(dtype) is getattr(torch, dtype)
    assert check_dtype(getattr(torch, dtype)) is getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["int8", "fp16", torch.int8, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, float64"):
        TransformersModel(tiny_model("llama"), dtype=dtype)


def test_a_built_model_is_not_converted_behind_its_owners_back():
    with pytest.raises(ValueError, match=r"the model is torch\.float64, not torch\.float32"):
        TransformersModel(tiny_model("llama"), dtype="float32")


def test_a_local_directory_is_loaded_as_the_dtype_that_was_asked_for(tmp_path):
    tiny_model("llama", dtype=torch.float32, eos_token_id=7).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has no tokenizer, prompts must be token ids"):
        assert TransformersModel(tmp_path).dtype == "float32"
    executor = TransformersModel(str(tmp_path), tokenizer="given", dtype="float64")
    assert (executor.dtype, executor.tokenizer, executor.eos_token_ids) == ("float64", "given", {7})
    assert executor.source == f"path:{tmp_path}"
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert whole_story(Driver(executor, reference, PROMPTS)) < EXACT


# --- what would be wrong without a sound is refused ---

TINY = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
TINY |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def build(model_class, **config):
    model_class = getattr(transformers, model_class)
    return model_class(model_class.config_class(**{**TINY, **config})).eval()


MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MLA |= {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
REFUSED = {
    "attention sinks": ("GptOssForCausalLM", LOCAL, "GptOssAttention: attention sinks (s_aux)"),
    "soft-capping": ("Gemma2ForCausalLM", {}, "caps attention scores"),
    "latent attention": ("DeepseekV3ForCausalLM", MLA, "MLA"),
    "encoder and decoder": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0},
        "encoder-decoder",
    ),
    "state space": ("MambaForCausalLM", {"state_size": 4}, "its layers keep a state"),
    "convolutions between attention": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"]},
        "1 of its 2 layers go through attention",
    ),
    "attention of its own": ("BloomForCausalLM", {}, "its attention cannot be replaced"),
    "no head": ("LlamaModel", {}, "not a causal language model with a head"),
    "another head": ("LlamaForSequenceClassification", {}, "not a causal language model with a head"),
    "looks both ways": ("BertLMHeadModel", {"is_decoder": False}, "attention that is not causal"),
    "looks both ways by option": ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "looks both ways"),
    "chunked attention": (
        "Llama4ForCausalLM",
        {**LOCAL, "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"]},
        "layer 0 is of a kind that is not known here, chunked_attention",
    ),
    "a window in the mask only": (
        "PhimoeForCausalLM",
        {**LOCAL, "sliding_window": 4},
        "layer 0 should have a window of 4, attention was told None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused_by_name(case):
    model_class, config, reason = REFUSED[case]
    with pytest.raises(UnsupportedModel) as refusal:
        TransformersModel(build(model_class, **config))
    assert str(refusal.value).startswith(f"{model_class} cannot run here: ")
    assert reason in str(refusal.value)


def test_a_refused_model_is_left_as_it_was():
    model = build("PhimoeForCausalLM", **REFUSED["a window in the mask only"][1])
    before = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    with pytest.raises(UnsupportedModel):
        TransformersModel(model)
    assert torch.equal(model(input_ids=torch.tensor([[1, 2, 3]])).logits, before)


def test_a_directory_with_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path):
    transformers.T5Config(**TINY, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration cannot run here: it is an encoder-decoder"):
        TransformersModel(str(tmp_path))
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="vit is not a causal language model"):
        TransformersModel(str(tmp_path))


def test_a_model_that_mixes_tokens_outside_attention_is_found_out():
    """No list of known models has this one: it adds half of the previous token's embedding to each token."""

    def shift(_, given, hidden):
        return hidden + 0.5 * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]

    model = tiny_model("llama")
    model.model.embed_tokens.register_forward_hook(shift)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM over our KV cache is off its own logits by"):
        TransformersModel(model)


def attention_arguments(**changed):
    """One call of the registered function as a layer makes it."""
    layer = torch.nn.Module()
    qkv = [torch.zeros(1, heads, 3, 8) for heads in (4, 2, 2)]
    step = type("Step", (), {"attend": lambda self, q, k, v, window, scale: q})()
    transformers.AttentionInterface()["minibatch"](
        layer, *qkv, **{"attention_mask": None, "minibatch_step": step} | changed
    )


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"softcap": 30.0}, "soft-capping"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "bias that depends on the distance"),
        ({"dropout": 0.1}, "dropout; put the model in eval mode"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1)}, "mask of its own"),
        ({"alibi": torch.zeros(1)}, "unknown argument of attention, alibi"),
        ({"minibatch_step": None}, "without a step"),
    ],
)
def test_attention_refuses_what_it_would_ignore(changed, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        attention_arguments(**changed)


def test_attention_takes_what_changes_nothing():
    attention_arguments(softcap=None, s_aux=None, position_ids=torch.zeros(1), output_attentions=False, scaling=0.5)


def test_train_mode_and_plain_calls_are_noticed_later_too():
    model = tiny_model("llama", attention_dropout=0.5)
    driver = Driver(TransformersModel(model), tiny_model("llama"), PROMPTS)
    model.train()
    with pytest.raises(UnsupportedModel, match="eval mode"):
        driver.step({0: 11})
    model.eval()
    with pytest.raises(UnsupportedModel, match="without a step"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_a_layer_that_is_skipped_is_noticed():
    model = tiny_model("llama")
    driver = Driver(TransformersModel(model), tiny_model("llama"), PROMPTS)
    driver.step({0: 11})
    model.config.num_hidden_layers = 1  # transformers' forward goes by it
    with pytest.raises(UnsupportedModel, match="reached attention 1 times, not 2"):
        driver.step({0: 1})
