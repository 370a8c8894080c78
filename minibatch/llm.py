"""The offline face, as users of vLLM know it: ``LLM(model).generate(prompts, SamplingParams(...))`` and ``.chat(...)``.

Nothing but text around an :class:`~minibatch.engine.Engine`: prompts are tokenised, submitted together, run to their
end and handed back in order. The engine is there to look at: ``llm.engine``, ``llm.engine.trace``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from tqdm.auto import tqdm

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.engine import Engine
from minibatch.kv_cache import KVCache
from minibatch.models import Model
from minibatch.models.pretrained import DEFAULT_MODEL
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Scheduler
from minibatch.policies.queueing import Order
from minibatch.request import InvalidPrompt, Request, Result, SamplingParams
from minibatch.streaming import Stream
from minibatch.trace import Timeline

Prompt = str | Sequence[int]
Conversation = list[dict[str, str]]
MOST_KV_TOKENS = 131_072  # a cache with more rows than this is of no use to the small batches that run here


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. ``logprobs``: one ``sampling.Sample`` a token, if asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: tuple[Any, ...] | None


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. A refused one has ``error``, and an empty answer with finish reason ``rejected``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: tuple[Any, ...] | None
    timeline: Timeline | None
    error: str | None
    finished: bool = True


class LLM:
    """``model`` is a name, a Hub id, a local path, or an executor such as ``ToyModel()``.

    ``scheduler``, ``kv_cache``        default: chunked prefill on a paged cache
    ``order``                          who is next, default: first come, first served
    ``kv_cache_memory_bytes``          size of the default cache, which never has more than ``MOST_KV_TOKENS`` tokens
    ``dtype``, ``device``, ``fast``    of a model that is loaded by name
    """

    def __init__(
        self,
        model: str | Model = DEFAULT_MODEL,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        fast: bool = False,
        scheduler: Scheduler | None = None,
        kv_cache: KVCache | None = None,
        order: Order | None = None,
        kv_cache_memory_bytes: int = 512 * 2**20,
        max_model_len: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.model = load_model(model, dtype, device, fast) if isinstance(model, str) else model
        if kv_cache is None:
            num_tokens = min(kv_cache_memory_bytes // self.model.kv_bytes_per_token, MOST_KV_TOKENS)
            kv_cache = PagedKVCache(num_blocks=max(num_tokens // 16, 1), block_size=16)
        scheduler = scheduler or ChunkedPrefill(token_budget=512, max_num_seqs=32)
        self.engine = Engine(self.model, scheduler, kv_cache, order=order, max_model_len=max_model_len, seed=seed)

    @property
    def tokenizer(self) -> Any:
        if self.model.tokenizer is None:
            raise InvalidPrompt(f"{self.model.name} has no tokenizer: give prompts as token ids")
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers prompts (text or token ids, one or many) with the same or one each of ``sampling_params``.

        A prompt that cannot run does not keep the others from running: it warns, and comes back as ``rejected``.
        """
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = sampling_params or SamplingParams()
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling params")
        return self._run(prompts, params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one or many conversations (``[{"role": "user", "content": "..."}]``) in the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [chat_prompt(self.tokenizer, conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None = None) -> Stream:
        """Answers one prompt or conversation token by token; raises a RequestRefused if it cannot run."""
        if prompt and isinstance(prompt[0], dict):
            prompt = chat_prompt(self.tokenizer, prompt)
        return self.engine.stream(Request(self._encode(prompt), sampling_params or SamplingParams()))

    def _run(self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        requests = [Request(self._encode(p), s) for p, s in zip(prompts, params, strict=True)]
        with tqdm(total=len(requests), desc="requests", disable=not use_tqdm) as bar:
            results = self.engine.run(requests, on_step=lambda report: bar.update(len(report.finished)))
        return [_output(p, r, res) for p, r, res in zip(prompts, requests, results, strict=True)]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a text; what is no text, or cannot be encoded, is left for the engine to refuse."""
        encodes = isinstance(prompt, str) and self.model.tokenizer is not None
        return self.model.tokenizer.encode(prompt) if encodes else prompt


def chat_prompt(tokenizer: Any, conversation: Conversation) -> list[int]:
    """Token ids of a conversation in the model's own chat template, ready for the assistant's turn."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidPrompt("this model has no chat template: give its prompts as plain text")
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def load_model(name: str, dtype: str = "float32", device: str = "cpu", fast: bool = False) -> Model:
    """``toy``, or anything that :class:`~minibatch.models.transformers_model.TransformersModel` takes."""
    if name == "toy":
        if (dtype, device, fast) != ("float32", "cpu", False):
            raise ValueError(
                f"the toy model has neither dtype nor device nor a fast path, got {dtype}, {device}, fast={fast}"
            )
        from minibatch.models.toy_model import ToyModel

        return ToyModel(eos_token_id=0, max_model_len=8192)
    from minibatch.models.transformers_model import TransformersModel  # imports torch and transformers: seconds

    return TransformersModel(name, dtype=dtype, device=device, fast=fast)


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def _output(prompt: Prompt, request: Request, result: Result) -> RequestOutput:
    if result.error is not None:
        warnings.warn(f"request {result.request_id}: {result.error}", stacklevel=4)
    answers = [
        CompletionOutput(index, r.text, r.tokens, r.finish_reason, r.stop_reason, r.logprobs)
        for index, r in enumerate(result.samples or (result,))
    ]
    return RequestOutput(
        request_id=result.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=() if result.finish_reason == "rejected" else tuple(request.prompt),
        outputs=answers,
        prompt_logprobs=result.prompt_logprobs,
        timeline=result.timeline,
        error=result.error,
    )
