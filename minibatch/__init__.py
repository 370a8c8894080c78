"""minibatch: how LLM serving batches requests, as a small engine that people read, run, break and complete."""

from typing import Any

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache
from minibatch.llm import LLM
from minibatch.models.simulated_model import SimulatedModel
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import Request, SamplingParams
from minibatch.static_batching import StaticBatching
from minibatch.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ChunkedPrefill",
    "ContiguousKVCache",
    "ContinuousBatching",
    "CostModel",
    "Engine",
    "PagedKVCache",
    "PrefixCachedKVCache",
    "Request",
    "SamplingParams",
    "SimulatedModel",
    "StaticBatching",
    "ToyModel",
    "Trace",
    "TransformersModel",
]


def __getattr__(name: str) -> Any:
    """Imports torch and transformers, which takes seconds, only for who asks for them."""
    if name == "TransformersModel":
        from minibatch.models.transformers_model import TransformersModel

        return TransformersModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
