"""``minibatch bench``: this engine beside others, on the same work, on this machine, at the same time.

Each engine lives in a process of its own (``bench_worker.py``): same environment, same threads. One works at a time,
and they take turns for some rounds, so that a machine that slows down slows all of them down; so the ratio of two
engines is taken within a round. Loading, and one small run to warm up, are not measured.

The work is offline: all requests are there at once. ``mixed`` has answers of very different lengths, which is where
membership that changes between iterations pays; ``static`` has equal ones, where it does not; ``long`` has prompts so
long that attention weighs.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minibatch.bench import Busy
from minibatch.bench_process import Worker, WorkerFailed
from minibatch.bench_worker import PAGE
from minibatch.prompts import LONG, SHORT
from minibatch.workload import encode, pick

WORKS = ("mixed", "static", "long")
LENGTHS = (8, 16, 32, 64, 128)
BASELINE = "transformers continuous batching"


@dataclass(frozen=True)
class Work:
    """Prompts, how many tokens each of them generates, and tokens of K/V cache that every engine may use."""

    name: str
    what: str
    prompts: list[list[int]]
    lengths: list[int]
    kv_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True))


def make_work(name: str, tokenizer: Any, requests: int | None = None) -> Work:
    """``mixed``, ``static`` or ``long``; ``requests``: fewer or more of them than usual (32, of long ones 16)."""
    number = requests or (16 if name == "long" else 32)
    if name == "long":
        texts = ["\n\n".join((f"Part {i}.", *LONG[i % 10 :], *LONG)) for i in range(number)]  # no common beginning
        prompts = [tokenizer.encode(text)[:1500] for text in texts]
        cache = in_pages([len(prompt) + 32 for prompt in prompts])
        return Work(name, f"{number} prompts of 1,500 tokens, 32 tokens each", prompts, [32] * number, cache)
    prompts = [encode(tokenizer, text) for text in pick(SHORT, number, seed=0)]
    rng = random.Random(0)
    lengths = [64] * number if name == "static" else [rng.choice(LENGTHS) for _ in range(number)]
    each = "64 tokens each" if name == "static" else f"{', '.join(map(str, LENGTHS))} tokens each, drawn with seed 0"
    what = f"{number} prompts of about {sum(map(len, prompts)) / number:.0f} tokens, {each}: {sum(lengths):,}"
    return Work(name, what, prompts, lengths, 64 * PAGE)


def in_pages(sizes: Sequence[int]) -> int:
    """Tokens of a cache for requests of these sizes, if a page belongs to one request."""
    return sum(-(-size // PAGE) * PAGE for size in sizes)


@dataclass(frozen=True)
class Contender:
    """An engine as it is started: its name here, what the worker is told, and works it makes no sense for.

    ``python``  None: this one
    """

    name: str
    setup: dict[str, Any]
    works: Sequence[str] = WORKS
    python: Path | None = None


OURS = {"engine": "minibatch"}
CONTENDERS = (
    Contender("transformers generate", {"engine": "generate"}),
    Contender(BASELINE, {"engine": "continuous batching"}),
    Contender("minibatch static, fast", {**OURS, "configuration": "static", "fast": True}, ("mixed", "static")),
    Contender("minibatch chunked, fast", {**OURS, "configuration": "chunked", "fast": True}),
    Contender("minibatch chunked", {**OURS, "configuration": "chunked", "fast": False}),
)


def vllm(python: Path | None, works: Sequence[Work]) -> Contender:
    """With room for the longest request, and for all of them at once."""
    longest, most = max(work.longest for work in works), max(len(work.prompts) for work in works)
    return Contender("vllm", {"engine": "vllm", "longest": longest, "requests": most}, python=python)


# ---------------------------------------------------------------------------------------------------------- the numbers


@dataclass(frozen=True)
class Kind:
    """Iterations of one kind in one job: how many, and medians of their time (ms), of GB and of GFLOP a second."""

    what: str
    number: int
    ms: float
    gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True)
class Outcome:
    """One engine on one work.

    ``rates``        useful tokens a second, of each round
    ``ratios``       to the baseline, transformers' continuous batching, within each round
    ``peak_memory``  bytes: the most that its process has had by then, since the model was loaded
    ``same``         requests with the very same answer as the first engine's: in half precision near ties part
    ``others``       cores that other processes had while it worked, and ``stolen`` those that the hypervisor gave to
                     other machines, on average; NaN where that cannot be known
    ``phases``       of this engine: share of the time of an iteration; of the round of median speed, as ``kinds``
    """

    work: str
    engine: str
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    peak_memory: int
    same: int
    others: float
    stolen: float
    phases: dict[str, float] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ()

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Engines:
    """``fast``: whether the fast path was there for this model where it was asked for."""

    model: str
    dtype: str
    device: str
    threads: int
    environment: dict[str, str]
    works: tuple[tuple[str, str], ...]
    num_requests: dict[str, int]
    fast: bool
    outcomes: tuple[Outcome, ...]


# The same for every engine, unless the user has set it. An idle OpenMP thread spins this often before it sleeps: by
# default for milliseconds, and with another process on a core a decode iteration then took 60 times as long.
ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}


def run(
    model: str,
    dtype: str,
    device: str,
    contenders: Sequence[Contender],
    works: Sequence[Work],
    rounds: int = 3,
    threads: int | None = None,
    progress: bool = True,
) -> Engines:
    """Every contender on every work, in turns. ``model``: a directory or Hub id. Raises WorkerFailed."""
    environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    jobs = [(work, c) for work in works for _ in range(rounds) for c in contenders if work.name in c.works]
    outcomes = []
    with ExitStack() as stack, tqdm(total=len(jobs), disable=not progress) as bar:
        workers = {}
        for contender in sorted(contenders, key=lambda c: c.setup["engine"] != "vllm"):  # the one that may be missing
            bar.set_description(f"starting {contender.name}")
            setup = {**contender.setup, "model": model, "dtype": dtype, "device": device}
            worker = Worker(contender.name, setup, contender.python, environment)
            stack.callback(worker.close)
            workers[contender.name] = worker
            worker.ask(_warm_up(works[0]))
        for work in works:
            answers: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contenders if work.name in c.works}
            for _ in range(rounds):
                for name in answers:
                    bar.set_description(f"{work.name}: {name}")
                    answers[name].append(_measure(workers[name], work))
                    bar.update()
            outcomes += _outcomes(work, answers)
    return Engines(
        model,
        dtype,
        device,
        workers[contenders[0].name].facts["threads"],
        environment,
        tuple((work.name, work.what) for work in works),
        {work.name: len(work.prompts) for work in works},
        all(workers[c.name].facts["fast"] for c in contenders if c.setup.get("fast")),
        tuple(outcomes),
    )


def _warm_up(work: Work) -> dict[str, Any]:
    prompts = work.prompts[:4]
    return {"prompts": prompts, "lengths": [4] * len(prompts), "kv_tokens": work.kv_tokens}


def _measure(worker: Worker, work: Work) -> dict[str, Any]:
    with Busy() as busy:
        answer = worker.ask({"prompts": work.prompts, "lengths": work.lengths, "kv_tokens": work.kv_tokens})
    given = [len(tokens) for tokens in answer["answers"]]
    if given != work.lengths:
        raise WorkerFailed(f"{worker.name} gave {given} tokens, asked for were {work.lengths}")
    return {**answer, "others": busy.others(answer["cpu"]), "stolen": busy.stolen}


def _outcomes(work: Work, answers: dict[str, list[dict[str, Any]]]) -> Iterator[Outcome]:
    first = next(iter(answers.values()))[0]["answers"]
    baseline = answers[BASELINE]
    for name, rounds in answers.items():
        median = sorted(rounds, key=lambda answer: answer["seconds"])[len(rounds) // 2]
        yield Outcome(
            work=work.name,
            engine=name,
            rates=tuple(work.num_tokens / answer["seconds"] for answer in rounds),
            ratios=tuple(b["seconds"] / a["seconds"] for a, b in zip(rounds, baseline, strict=True)),
            peak_memory=max(answer["peak_memory"] for answer in rounds),
            same=sum(a == b for a, b in zip(rounds[0]["answers"], first, strict=True)),
            others=statistics.fmean(answer["others"] for answer in rounds),
            stolen=statistics.fmean(answer["stolen"] for answer in rounds),
            phases=_shares(median),
            kinds=tuple(_kinds(median.get("iterations", []))),
        )


def _shares(answer: dict[str, Any]) -> dict[str, float]:
    """Of the time of all iterations; ``rest``: what lies between the phases."""
    if "phases" not in answer:
        return {}
    shares = {name: seconds / answer["total"] for name, seconds in answer["phases"].items()}
    return {**shares, "rest": 1 - sum(shares.values())}


def _kinds(iterations: Sequence[Sequence[Any]]) -> Iterator[Kind]:
    """Decode iterations by number of rows, and those that compute prompts."""
    limits = (8, 16, 32, 10**9)
    groups: dict[str, list[Sequence[Any]]] = {}
    for iteration in iterations:
        decode, rows = iteration[:2]
        upper = next(limit for limit in limits if rows <= limit)
        groups.setdefault(f"decode, up to {upper} rows" if decode else "with prompts", []).append(iteration)
    for what, members in groups.items():
        seconds = [m[4] for m in members]
        yield Kind(
            what,
            len(members),
            1e3 * statistics.median(seconds),
            statistics.median(m[2] / m[4] for m in members) / 1e9,
            statistics.median(m[3] / m[4] for m in members) / 1e9,
        )
