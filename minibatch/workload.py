"""The workload of the main job: real prompts, answers that end when they end, Poisson arrivals.

Output lengths are not drawn from a distribution: the model answers until it emits its end-of-sequence token, so similar
prompts diverge as they do in production. The arrival rate is relative to this machine: ``load`` 1 offers as many
requests as a server would just keep up with that answers them one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from minibatch.llm import chat_prompt
from minibatch.prompts import LONG, SHORT
from minibatch.request import Request, SamplingParams

BUILT_IN = ("mixed", "short", "long")


def read_prompts(name: str) -> list[str]:
    """A built-in set (``mixed`` is one long prompt to two short ones), or a text file with one prompt a line."""
    if name == "mixed":
        return [text for pair in zip(LONG, SHORT, SHORT[14:], strict=False) for text in pair]
    if name in BUILT_IN:
        return list(LONG if name == "long" else SHORT)
    if not Path(name).is_file():
        raise ValueError(f"workload {name!r} is neither {', '.join(BUILT_IN)} nor a text file with one prompt a line")
    lines = [line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines()]
    if not any(lines):
        raise ValueError(f"{name} holds no prompt: one a line is expected")
    return [line for line in lines if line]


def pick(texts: Sequence[str], number: int, seed: int) -> list[str]:
    """The first ``number`` in random order; they repeat if there are too few."""
    picked = [texts[i % len(texts)] for i in range(number)]
    random.Random(seed).shuffle(picked)
    return picked


def build(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[Request]:
    """A greedy request each, all at time 0."""
    params = SamplingParams(max_tokens=max_tokens)
    return [
        Request(encode(tokenizer, text), params, request_id=f"r{i}", arrival_time=0.0) for i, text in enumerate(texts)
    ]


def encode(tokenizer: Any, text: str) -> list[int]:
    """One user turn in the chat template, or plain text where the model has none."""
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer.encode(text)
    return chat_prompt(tokenizer, [{"role": "user", "content": text}])


def assign(requests: Sequence[Request], clients: int, priorities: int, seed: int) -> list[Request]:
    """The same requests, of so many clients and priorities: clients ``c0``, ``c1``, ... of whom each has half as many
    requests as the one before, on average, and priorities 0, 1, ... that are all as likely."""
    rng = random.Random(f"{seed} clients")
    weights = [0.5**number for number in range(clients)]
    owners = rng.choices(range(clients), weights, k=len(requests))
    return [
        replace(request, client=f"c{owner}" if clients > 1 else request.client, priority=rng.randrange(priorities))
        for request, owner in zip(requests, owners, strict=True)
    ]


def poisson(requests: Sequence[Request], rate: float, seed: int) -> list[Request]:
    """The same requests, arriving at ``rate`` a second on average with exponential gaps; the first at 0."""
    rng = random.Random(seed)
    times = accumulate((rng.expovariate(rate) for _ in requests[1:]), initial=0.0)
    return [replace(request, arrival_time=time) for request, time in zip(requests, times, strict=True)]
