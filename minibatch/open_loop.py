"""Workloads whose requests arrive at planned times, whether or not the engine keeps up.

Arrivals, prompt lengths and output lengths are drawn from independent generators, children of one seed: another rate
leaves the lengths as they are, and another distribution of one length leaves the other. What is drawn for the first
hundred requests does not depend on how many there are.

Everywhere, ``max_tokens`` is what schedulers see of an answer's length, which ends when it ends: None is its exact
length; a number, such as the limit that a server gives everybody (Orca), also cuts longer answers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minibatch.arrival_processes import ArrivalProcess
from minibatch.checks import check_float, check_int
from minibatch.contents import join, own, shared
from minibatch.distributions import Lengths
from minibatch.request import Request, SamplingParams
from minibatch.trace import Timeline, Trace, counted
from minibatch.workloads import Workload


def synthetic(
    n: int,
    arrivals: ArrivalProcess,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    seed: int = 0,
    *,
    max_tokens: int | None = None,
    client: str = "default",
) -> Workload:
    """``n`` requests ``r0``, ``r1``, ... that share nothing, with independent lengths."""
    check_int("n", n, 0)
    times, prompts, outputs = _columns(n, arrivals, prompt_lengths, output_lengths, np.random.SeedSequence(seed))
    what = f"{counted(n, 'request')}, arrivals {arrivals.describe()}, {_lengths(prompt_lengths, output_lengths)}"
    requests = [
        simulated_request(f"r{i}", own(i, prompt), output, time, max_tokens, client)
        for i, (time, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True))
    ]
    return Workload(requests, what + _limit(max_tokens), seed)


def shared_prefix(
    n: int,
    groups: int,
    prefix_length: int,
    arrivals: ArrivalProcess,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    seed: int = 0,
    *,
    max_tokens: int | None = None,
) -> Workload:
    """Every request belongs to one of ``groups``, at random, and begins with the ``prefix_length`` tokens of its group.

    A system prompt, a tool's instructions, a document that many ask about. ``prompt_lengths`` are of what comes after.
    """
    check_int("groups", groups, 1)
    check_int("prefix_length", prefix_length, 1)
    base = synthetic(n, arrivals, prompt_lengths, output_lengths, seed, max_tokens=max_tokens)
    rng = _generators(np.random.SeedSequence(seed), 4)[3]  # the others draw times and lengths
    chosen = np.floor(rng.random(n) * groups).astype(int)
    requests = [
        replace(request, prompt=join([shared(group, prefix_length), request.prompt]))
        for request, group in zip(base.requests, chosen.tolist(), strict=True)
    ]
    what = f"{counted(groups, 'group')} with a common prefix of {counted(prefix_length, 'token')}"
    return Workload(requests, f"{base.description}, {what}", seed)


@dataclass(frozen=True)
class Client:
    """One of several clients: how often, how much, and from ``start`` for ``duration`` seconds.

    It sends ``n`` requests, or all that arrive in ``duration``, or what ends first.
    """

    name: str
    arrivals: ArrivalProcess
    prompt_lengths: Lengths
    output_lengths: Lengths
    start: float = 0.0
    duration: float | None = None
    n: int | None = None
    priority: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_float("start", self.start, 0.0, math.inf)
        if self.duration is not None:
            check_float("duration", self.duration, 0.0, math.inf)
        if self.n is not None:
            check_int("n", self.n, 0)
        if self.n is None and (self.duration is None or self.arrivals.mean_rate == math.inf):
            raise ValueError(f"client {self.name!r} would never stop: give it n, or a rate and a duration")

    def columns(self, seed: np.random.SeedSequence) -> tuple[list[float], list[int], list[int]]:
        """Its arrival times, prompt lengths and output lengths."""
        n = 64 if self.n is None else self.n
        duration = math.inf if self.duration is None else self.duration
        while self.n is None and self.arrivals.times(_generators(seed)[0], n)[-1] < duration:
            n *= 2  # the longer list begins with the shorter one
        times, prompts, outputs = _columns(n, self.arrivals, self.prompt_lengths, self.output_lengths, seed)
        kept = sum(time < duration for time in times)
        return [self.start + time for time in times[:kept]], prompts[:kept], outputs[:kept]


def clients(several: Sequence[Client], seed: int = 0) -> Workload:
    """The requests of several clients, in order of arrival (of equal times, in the order of the clients).

    Each client has a child generator of its own: what it sends does not depend on who comes after it in the list.
    """
    if len({client.name for client in several}) < len(several):
        raise ValueError(f"two clients have the same name: {', '.join(client.name for client in several)}")
    rows = []
    for client, child in zip(several, np.random.SeedSequence(seed).spawn(len(several)), strict=True):
        rows += [(*row, client) for row in zip(*client.columns(child), strict=True)]
    rows.sort(key=lambda row: row[0])
    requests = [
        simulated_request(f"r{i}", own(i, prompt), output, time, client.max_tokens, client.name, client.priority)
        for i, (time, prompt, output, client) in enumerate(rows)
    ]
    return Workload(requests, "; ".join(map(_describe, several)), seed)


def from_lengths(
    pairs: np.ndarray, arrivals: ArrivalProcess, seed: int = 0, n: int | None = None, *, max_tokens: int | None = None
) -> Workload:
    """Requests whose (prompt, output) lengths are rows of ``pairs``, ``n`` of them at random, each at most once.

    A long question tends to have a long answer, so the two are not drawn apart. Raises ValueError if there are fewer
    than ``n`` rows; None takes all of them, in random order.
    """
    total = len(pairs)
    n = total if n is None else n
    check_int("n", n, 0)
    if n > total:
        raise ValueError(f"{n} requests need as many rows of lengths, and there are {total}")
    for_times, for_rows = _generators(np.random.SeedSequence(seed), 2)
    chosen = np.asarray(pairs)[for_rows.permutation(total)[:n]].tolist()
    requests = [
        simulated_request(f"r{i}", own(i, prompt), output, time, max_tokens)
        for i, (time, (prompt, output)) in enumerate(zip(arrivals.times(for_times, n).tolist(), chosen, strict=True))
    ]
    what = f"{n:,} of {total:,} pairs of lengths, arrivals {arrivals.describe()}"
    return Workload(requests, what + _limit(max_tokens), seed)


def from_trace(trace: Trace) -> Workload:
    """A measured or simulated run as a workload: same arrivals, lengths, limits, clients, priorities and ids.

    Every answer to one prompt (``n > 1``) becomes a request of its own. What emitted no token (refused, or aborted
    before its first one) is left out, and counted in the description. Contents are not in a trace, so nothing is
    shared: hits of a prefix cache do not come back. A closed loop becomes an open one: arrivals are as recorded.
    """
    timelines = [t for t in sorted(trace.timelines, key=lambda t: t.arrival) if t.token_times and t.num_prompt]
    left_out = len(trace.timelines) - len(timelines)
    what = f"replay of {trace.meta.get('workload') or 'a trace'}"
    if left_out:
        what += f", without {counted(left_out, 'request')} that emitted nothing"
    return Workload([_replayed(i, timeline) for i, timeline in enumerate(timelines)], what)


def simulated_request(
    request_id: str,
    prompt: Sequence[int],
    output: int,
    time: float | None,
    max_tokens: int | None = None,
    client: str = "default",
    priority: int = 0,
) -> Request:
    """A simulated request that generates ``output`` tokens, or ``max_tokens`` if that is less."""
    limit = output if max_tokens is None else max_tokens
    return Request(prompt, _params(limit), request_id, time, priority, client, output_length=min(output, limit))


@functools.lru_cache(maxsize=1 << 14)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def _replayed(index: int, timeline: Timeline) -> Request:
    return simulated_request(
        timeline.request_id,
        own(index, timeline.num_prompt),
        len(timeline.token_times),
        timeline.arrival,
        timeline.max_new_tokens,
        timeline.client,
        timeline.priority,
    )


def _generators(seed: np.random.SeedSequence, number: int = 3) -> list[np.random.Generator]:
    """Independent of each other and, each, of how many there are. The same at every call."""
    fresh = np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key)  # spawn() counts what it has given away
    return [np.random.default_rng(child) for child in fresh.spawn(number)]


def _columns(
    n: int, arrivals: ArrivalProcess, prompts: Lengths, outputs: Lengths, seed: np.random.SeedSequence
) -> tuple[list[float], list[int], list[int]]:
    for_times, for_prompts, for_outputs = _generators(seed)
    return (
        arrivals.times(for_times, n).tolist(),
        prompts.draw(for_prompts, n).tolist(),
        outputs.draw(for_outputs, n).tolist(),
    )


def _describe(client: Client) -> str:
    until = "" if client.duration is None else f", {client.duration:g} s"
    number = "" if client.n is None else f", at most {counted(client.n, 'request')}"
    return (
        f"{client.name}: arrivals {client.arrivals.describe()} from {client.start:g} s{until}{number}, "
        f"{_lengths(client.prompt_lengths, client.output_lengths)}{_limit(client.max_tokens)}"
    )


def _lengths(prompts: Lengths, outputs: Lengths) -> str:
    return f"prompts {prompts.describe()}, outputs {outputs.describe()}"


def _limit(max_tokens: int | None) -> str:
    return "" if max_tokens is None else f", max_tokens {max_tokens}"
