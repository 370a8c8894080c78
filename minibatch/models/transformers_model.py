"""Runs a plan on a Hugging Face causal language model, unmodified: the executor that computes real tokens.

The chunks of all requests, and the padding, are packed into one sequence ``[1, T]`` whose positions restart with each
chunk. Embeddings, matrix products and norms do not care who is whose neighbour; attention does, and it is replaced by
the function in :mod:`minibatch.models.attention`, which reads and writes the rows of the engine's KV cache.

A model that does something the replacement does not know of would run, and be wrong without a sound. So a model is
looked at before it is accepted (:mod:`minibatch.models.supported`), and then tried: a prompt computed in pieces over
our cache must give the logits of the model's own forward pass.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minibatch.clock import RealClock
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.models import UnsupportedModel, fused_decoder, pretrained
from minibatch.models.attention import IMPLEMENTATION, Attend, KVStore, Step
from minibatch.models.decode_graphs import DecodeGraphs
from minibatch.models.fused_decoder import FusedDecoder
from minibatch.models.supported import check_class, check_config, context_limit, inspect_layers
from minibatch.models.varlen import attend_for, attend_varlen
from minibatch.plan import Chunk, Plan
from minibatch.request import Request, RequestState

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class TransformersModel:
    """``model`` is a short name (``"smollm2-135m"``), a Hub id, the path of a directory, or a built PreTrainedModel.

    ``dtype``, ``device``  what to load it as; None: float32 on the CPU. A built model keeps its dtype
    ``attend``             how attention is computed: ``attend_each``, slow and readable, ``attend_batched`` or
                           ``attend_varlen``; None: the fastest one that there is for this model on this device
    ``fast``               compute Llama-like models by our own forward pass (``fused_decoder.py``), if it gives the
                           same logits as the model's; other models run as always
    ``cuda_graphs``        on a GPU: decode iterations are recorded and replayed (``decode_graphs.py``)
    ``source``             where the weights came from, for captions

    A built model is taken over: afterwards it computes with this class only, and ``fast`` keeps the weights of this
    moment. Several engines may share one
    TransformersModel, each with its own store. Raises UnsupportedModel, ModelUnavailable, ValueError for a dtype.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        attend: Attend | None = None,
        fast: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        wanted = None if dtype is None else check_dtype(dtype)
        if isinstance(model, PreTrainedModel):
            self.name, self.source = model.config.name_or_path or type(model).__name__, "built by the caller"
            if wanted not in (None, model.dtype):
                raise ValueError(f"the model is {model.dtype}, not {wanted}: load it as that, or leave dtype out")
            check_dtype(model.dtype)
        else:
            self.name = str(model)
            device = check_device(device or "cpu")
            model, tokenizer, self.source = _load(self.name, tokenizer, wanted or torch.float32)
        check_config(model.config, type(model).__name__)
        check_class(model)
        self.model = model.eval() if device is None else model.eval().to(device)
        if model.dtype is torch.float64:  # PyTorch multiplies by the experts of a mixture in groups, but not in float64
            model.set_experts_implementation("eager")
        self.device, self.dtype = model.device, str(model.dtype).removeprefix("torch.")
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_model_len = context_limit(config)
        self.eos_token_ids = _eos_token_ids(model)
        before = model.config._attn_implementation
        try:
            self.layers = inspect_layers(model)
            self.attend = attend or attend_for(self.device, self.layers)
            self.fused = self.graphs = None
            self._check_against_own_forward()
            if fast and fused_decoder.fits(model):
                self._fuse()
        except UnsupportedModel:
            model.set_attn_implementation(before)
            raise
        if cuda_graphs:
            if self.attend is not attend_varlen:
                raise ValueError(f"CUDA graphs need a GPU and a 16-bit dtype, got {self.device} and {self.dtype}")
            self.graphs = DecodeGraphs(self._compute, self.layers, self.device)
        self.simulated = False
        self.kv_bytes_per_token = sum(x.kv_heads * (x.key_dim + x.value_dim) * x.dtype.itemsize for x in self.layers)

    def _fuse(self) -> None:
        try:
            self.fused = FusedDecoder(self.model, [layer.window for layer in self.layers])
            self._check_against_own_forward()
        except UnsupportedModel as error:
            self.fused = None
            warnings.warn(f"the fast path is not used: {error}", stacklevel=4)

    def clock(self) -> RealClock:
        return RealClock()

    def allocate(self, num_rows: int) -> KVStore:
        return KVStore(self.layers, num_rows, self.device)

    @torch.inference_mode()
    def forward(self, plan: Plan, kv: KVCache, store: KVStore) -> Tensor:
        """Logits ``[rows, vocab_size]`` on the model's device, float32 at least."""
        if self.graphs is not None and (logits := self.graphs.run(plan, kv, store)) is not None:
            return logits
        step = self._pack(plan, kv, store)
        logits = self._compute(step)
        if step.num_layers_done != len(self.layers):
            raise UnsupportedModel(
                f"{type(self.model).__name__} reached attention {step.num_layers_done} times, not {len(self.layers)}"
            )
        return logits[: step.num_logits]

    def _pack(self, plan: Plan, kv: KVCache, store: KVStore) -> Step:
        return Step(plan, kv, store, self.device, self.attend)

    def _compute(self, step: Step) -> Tensor:
        """Logits of the tokens that the step names, by the model's own forward pass or by ours."""
        if self.fused is not None:
            return _at_least_float32(self.fused(step))
        output = self.model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,  # left out, the model would count through the packed sequence
            use_cache=False,
            logits_to_keep=step.logit_index,
            minibatch_step=step,
        )
        return _at_least_float32(output.logits[0])

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], Tensor]:
        """The same model without any of our code: alone, greedy, transformers' own loop, attention and cache.

        Returns the generated tokens and the logits ``[tokens, vocab_size]`` that each was chosen from (transformers
        rounds these to float32, whatever the model's dtype).
        """
        input_ids = torch.tensor([list(prompt)], device=self.device)
        with stock_attention(self.model), _plain_generation(self.model):
            output = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                eos_token_id=sorted(self.eos_token_ids) or None,
                pad_token_id=0,  # of no effect on a single sequence; left out, transformers warns
                return_dict_in_generate=True,
                output_logits=True,
                max_new_tokens=max_tokens,
            )
        return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)

    def _check_against_own_forward(self) -> None:
        """A prompt in three pieces over a cache of ours must give the logits of the model's own forward pass.

        This finds what no list of known cases can: state beside the K/V, masks or biases that never reach attention.
        It is short, so sliding windows are left to ``inspect_layers``, and it is coarse: half of the dtype's digits
        must agree, or half of float32's, because routers of experts often compute in float32 whatever the dtype.
        """
        prompt = [(7 * i + 3) % self.vocab_size for i in range(8)]
        with stock_attention(self.model), torch.inference_mode():
            input_ids = torch.tensor([prompt], device=self.device)
            expected = self.model(input_ids=input_ids, use_cache=False).logits[0, -1]
        kv, store = ContiguousKVCache(num_slots=1, slot_size=len(prompt)), self.allocate(len(prompt))
        request = RequestState(
            request=Request(prompt),
            request_id="check",
            label="check",
            prompt=prompt,
            arrival_time=0.0,
            max_new_tokens=1,
            stop_token_ids=frozenset(),
            seed=0,
            timeline=None,  # nothing here looks at the clock
        )
        kv.reserve(request, len(prompt))
        for start, stop in ((0, 5), (5, 7), (7, 8)):
            logits = self.forward(Plan(chunks=(Chunk(request, start, stop),)), kv, store)
            request.num_computed = stop
        error = (logits[0] - expected).abs().max().item()
        eps = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps)
        tolerance = eps**0.5 * expected.abs().max().item()
        if not error <= tolerance:  # so written that NaN fails
            raise UnsupportedModel(
                f"{type(self.model).__name__} over our KV cache is off its own logits by {error:.3g} (allowed: "
                f"{tolerance:.3g}): it does something with other tokens that does not go through attention's arguments"
            )


def check_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype. Raises ValueError for one that models do not compute in."""
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return found


def check_device(device: str | torch.device) -> torch.device:
    """The torch device. Raises ValueError for one that does not exist here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # what torch raises, depending on how it was built
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None


def _load(name: str, tokenizer: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, Any, str]:
    weights = pretrained.resolve(name)
    config = AutoConfig.from_pretrained(weights.location, **weights.options)
    check_config(config, (config.architectures or [type(config).__name__])[0])  # before gigabytes are read
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(f"{name} cannot run here: {config.model_type} is not a causal language model")
    model = AutoModelForCausalLM.from_pretrained(weights.location, dtype=dtype, **weights.options)
    return model, tokenizer or _load_tokenizer(weights), weights.source


def _load_tokenizer(weights: pretrained.Weights) -> Any:
    """None, and a warning, if there is none: token ids can still be run."""
    try:
        return AutoTokenizer.from_pretrained(weights.location, **weights.options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        warnings.warn(f"{weights.location} has no tokenizer, prompts must be token ids ({reason})", stacklevel=4)
        return None


@contextlib.contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model as transformers runs it, for a while."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # it has no such implementation
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


@contextlib.contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Without the model's own generation settings (sampling, penalties, banned repetitions), for a while."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """A chat model's generation settings know more ends (end of turn) than its configuration."""
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        given = model.config.get_text_config().eos_token_id
    return frozenset() if given is None else frozenset([given] if isinstance(given, int) else given)
