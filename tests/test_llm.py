"""The face that users of vLLM know, on the toy model: text in, text out, errors that harm nobody else."""

from __future__ import annotations

import pytest

from minibatch import LLM, ContiguousKVCache, SamplingParams, StaticBatching, ToyModel
from minibatch.request import InvalidPrompt, RequestRefused


@pytest.fixture
def llm():
    return LLM(ToyModel())


def test_generate_takes_one_or_many_texts_or_ids_and_keeps_their_order(llm):
    params = SamplingParams(max_tokens=5)
    (one,) = llm.generate("hello", params, use_tqdm=False)
    (ids,) = llm.generate(list(b"hello"), params, use_tqdm=False)
    many = llm.generate(["other", "hello", list(b"hello")], params, use_tqdm=False)
    assert one.prompt == "hello" and one.prompt_token_ids == tuple(b"hello") and ids.prompt is None
    assert len(one.outputs[0].token_ids) == 5 and one.outputs[0].finish_reason == "length"
    assert one.outputs == ids.outputs == many[1].outputs == many[2].outputs != many[0].outputs
    assert llm.generate([], params, use_tqdm=False) == []


def test_params_are_one_for_all_or_one_each(llm):
    lengths = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], lengths, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) == 16, "vLLM's default"
    with pytest.raises(ValueError, match="2 prompts but 3"):
        llm.generate(["a", "b"], lengths, use_tqdm=False)


def test_a_prompt_that_cannot_run_warns_and_harms_nobody(llm):
    with pytest.warns(UserWarning, match="empty"):
        bad, good = llm.generate(["", "hello"], use_tqdm=False)
    assert bad.error.startswith("InvalidPrompt") and bad.outputs[0].finish_reason == "rejected"
    assert bad.outputs[0].token_ids == () and good.error is None
    assert good.outputs == llm.generate("hello", use_tqdm=False)[0].outputs


def test_stream_joins_to_the_text_of_generate(llm):
    params = SamplingParams(max_tokens=40)
    deltas = list(llm.stream("hello", params))
    (whole,) = llm.generate("hello", params, use_tqdm=False)
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [delta.finish_reason for delta in deltas] == [None] * 39 + ["length"]
    with pytest.raises(RequestRefused, match="empty"):
        llm.stream("", params)


def test_chat_uses_the_template_of_the_tokenizer(llm):
    class Chatty(type(llm.tokenizer)):
        chat_template = "a template"

        def apply_chat_template(self, conversation, tokenize, add_generation_prompt):
            return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"

        def encode(self, text, add_special_tokens=True):
            return super().encode(text)

    conversation = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidPrompt, match="no chat template"):
        llm.chat(conversation)
    llm.model.tokenizer = Chatty()
    (one,) = llm.chat(conversation, use_tqdm=False)
    two = llm.chat([conversation, conversation], use_tqdm=False)
    assert one.prompt_token_ids == tuple(b"<user>hi<assistant>") and one.outputs == two[0].outputs == two[1].outputs
    assert "".join(delta.text for delta in llm.stream(conversation)) == one.outputs[0].text


def test_text_needs_a_tokenizer():
    llm = LLM(ToyModel(vocab_size=50))
    with pytest.warns(UserWarning, match="prompt"):
        text, nothing, ids = llm.generate(["hello", None, [1, 2, 3]], use_tqdm=False)
    assert text.error.startswith("InvalidPrompt") and nothing.error.startswith("InvalidPrompt")
    assert len(ids.outputs[0].token_ids) == 16


def test_scheduler_and_cache_can_be_chosen_and_do_not_change_the_answer(llm):
    other = LLM(ToyModel(), scheduler=StaticBatching(2), kv_cache=ContiguousKVCache(2, 64))
    prompts = ["a", "bb", "ccc"]
    ours, theirs = (model.generate(prompts, use_tqdm=False) for model in (llm, other))
    assert [output.outputs for output in ours] == [output.outputs for output in theirs]
    assert "StaticBatching" in other.engine.trace.meta["scheduler"]


def test_logprobs_come_with_every_token_and_the_prompt(llm):
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    samples = output.outputs[0].logprobs
    assert [sample.token for sample in samples] == list(output.outputs[0].token_ids)
    assert all(sample.logprob == max(sample.top.values()) and len(sample.top) == 2 for sample in samples)
    assert output.prompt_logprobs[0] is None
    assert [sample.token for sample in output.prompt_logprobs[1:]] == list(b"ello")
