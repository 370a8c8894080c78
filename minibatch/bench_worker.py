"""One engine in a process of its own, for ``minibatch bench``: jobs on stdin, answers on stdout, as lines of JSON.

A process of its own, because peak memory is that of a process, and because another engine may need another Python. The
parent gives all of them the same environment and lets one at a time work. The first line says which engine and model;
every further line is a job: prompts as token ids, and how many tokens each request generates, greedily, whatever they
are. Imports happen where an engine needs them: this file also runs by its path, under a Python that has no
``minibatch``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Answers = list[list[int]]

PAGE = 256  # tokens: transformers' continuous batching allocates its cache in these, by default


class Generate:
    """transformers' ``generate`` on one padded batch, which ends with its longest answer."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def load(cls, model: str, dtype: str, device: str) -> Any:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
        return cls(loaded.to(device))

    def run(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], kv_tokens: int) -> Answers:
        import torch
        from transformers import GenerationConfig

        longest, most = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings = GenerationConfig(do_sample=False, max_new_tokens=most, pad_token_id=0)  # without an end of sequence
        self.model.generation_config = settings
        out = self.model.generate(ids.to(self.model.device), attention_mask=mask.to(self.model.device))
        return [row[longest : longest + n] for row, n in zip(out.tolist(), lengths, strict=True)]


class ContinuousBatching(Generate):
    """transformers' continuous batching."""

    def run(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], kv_tokens: int) -> Answers:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(num_blocks=kv_tokens // PAGE, max_batch_tokens=512)
        answers: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=config, block=True, timeout=5
        ) as manager:
            started = time.perf_counter()  # not the making of its cache
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(list(prompt), f"r{i}", max_new_tokens=length)
            while len(answers) < len(prompts):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    answers[output.request_id] = list(output.generated_tokens)
                elif output is None and not manager.is_running():
                    raise RuntimeError(f"it stopped after {len(answers)} of {len(prompts)} requests")
            self.seconds = time.perf_counter() - started
        return [answers[f"r{i}"] for i in range(len(prompts))]


class Minibatch:
    """This engine: the configuration ``static`` or ``chunked``; ``fast`` or with the model's own forward pass."""

    def __init__(self, model: str, dtype: str, device: str, configuration: str = "chunked", fast: bool = True) -> None:
        from minibatch.model_shapes import ModelShape
        from minibatch.models.transformers_model import TransformersModel

        self.model = TransformersModel(model, dtype=dtype, device=device, fast=fast)
        self.shape = None
        with contextlib.suppress(ValueError):  # of a mixture of experts, say, the work is not counted
            self.shape = ModelShape.from_config(self.model.model.config)
        self.configuration = configuration

    def run(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], kv_tokens: int) -> Answers:
        from minibatch import Engine, Request, SamplingParams
        from minibatch.configurations import Knobs

        longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
        scheduler, kv = Knobs(max_num_seqs=len(prompts)).configuration(self.configuration, kv_tokens, longest)
        engine = Engine(self.model, scheduler, kv)
        requests = [
            Request(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        watched = {"plan": engine, "reserve": engine, "pack": self.model, "forward": self.model}
        watched |= {"sample": engine, "commit": engine}
        self.phases = {name: _watch(owner, name) for name, owner in watched.items()}
        started = time.perf_counter()
        try:
            results = engine.run(requests)
        finally:
            for name, owner in watched.items():
                delattr(owner, METHODS[name])
        self.steps, self.total = engine.trace.steps, time.perf_counter() - started
        return [list(result.tokens) for result in results]

    def facts(self) -> dict[str, Any]:
        """Of the last job: seconds by phase; of each iteration whether it only decodes, its rows, its work and
        the seconds of its forward."""
        iterations = [
            (all(m.stop - m.start == 1 for m in step.members), step.counts.num_rows, *self._work(step), seconds)
            for step, seconds in zip(self.steps, self.phases["forward"], strict=True)
        ]
        phases = {name: sum(seconds) for name, seconds in self.phases.items()}
        return {"phases": phases, "total": self.total, "iterations": iterations}

    def _work(self, step: Any) -> tuple[int, int]:
        """Bytes that an iteration has to move (all weights once, the K/V of every context), and operations."""
        from minibatch.cost_model import Counts

        shape = self.shape
        if shape is None:
            return 0, 0
        counts, size = (
            Counts.of_step(step, shape.sliding_window),
            self.model.kv_bytes_per_token // shape.kv_values_per_token,
        )
        layers = shape.num_layers * shape.layer_parameters
        kv = (counts.kv_read + counts.kv_written) * self.model.kv_bytes_per_token
        attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * counts.attended
        linear = layers * counts.tokens + shape.head_parameters * counts.logits
        return (layers + shape.head_parameters) * size + kv, 2 * linear + attention


class Vllm:
    """vLLM, without compilation, in this very process."""

    def __init__(self, model: str, dtype: str, device: str, longest: int, requests: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else its memory is that of other processes
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        vllm = importlib.import_module("vllm")
        self.params = vllm.SamplingParams
        settings = {"enforce_eager": True, "max_num_seqs": requests, "enable_prefix_caching": False}
        self.llm = vllm.LLM(model, dtype=dtype, max_model_len=longest, **settings)

    def run(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], kv_tokens: int) -> Answers:
        params = [self.params(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


ENGINES: dict[str, Callable[..., Any]] = {
    "generate": Generate.load,
    "continuous batching": ContinuousBatching.load,
    "minibatch": Minibatch,
    "vllm": Vllm,
}


METHODS = {name: f"_{name}" for name in ("plan", "reserve", "pack", "sample", "commit")} | {"forward": "_compute"}


def _watch(owner: Any, phase: str) -> list[float]:
    """From now on the seconds of every call of the method that does this phase are appended to the list."""
    method, seconds = getattr(owner, METHODS[phase]), []

    def watched(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            seconds.append(time.perf_counter() - started)

    setattr(owner, METHODS[phase], watched)
    return seconds


def _forget_peak() -> None:
    """From now on the peak is that of what follows; where that cannot be had (not Linux), loading stays in it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """Bytes: the most that the process has had in memory, since the peak was forgotten; NaN on Windows."""
    with contextlib.suppress(OSError):
        return next(1024 * int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith("VmHWM"))
    try:
        import resource
    except ImportError:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _do(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    gc.collect()  # an engine is a circle of references: without this the cache of the last one is still there
    started, cpu = time.perf_counter(), time.process_time()
    answers = engine.run(job["prompts"], job["lengths"], job["kv_tokens"])
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    facts = engine.facts() if hasattr(engine, "facts") else {}
    seconds = getattr(engine, "seconds", seconds)
    return {"answers": answers, "seconds": seconds, "cpu": cpu, "peak_memory": peak_memory(), **facts}


def main() -> None:
    """Serves until stdin ends. Whatever the engine prints goes to stderr: stdout is for answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    setup = json.loads(sys.stdin.readline())
    engine = ENGINES[setup.pop("engine")](**setup)
    _forget_peak()
    fast = getattr(getattr(engine, "model", None), "fused", None) is not None
    say({"threads": _threads(), "fast": fast})
    for line in sys.stdin:
        say(_do(engine, json.loads(line)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
