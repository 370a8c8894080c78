"""A workload: which requests come, when, how long they are, and what follows an answer.

Everything is decided before the run. Requests of an open loop arrive at their planned times; those of a closed loop, or
the later turns of a conversation, wait in ``follow_ups`` for the answer that they follow. So a workload has no state:
the same object may be given to any number of engines, and each sees the same requests.

    engine.run(workload.requests, on_finish=workload.next)

Builders are in ``open_loop.py`` and ``closed_loop.py``, readers of public traces in ``workload_files.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from minibatch.checks import check_float, check_int
from minibatch.contents import join, pieces
from minibatch.door import check_envelope
from minibatch.request import Request, Result, SamplingParams
from minibatch.trace import counted

FORMAT = 1


@dataclass(frozen=True)
class FollowUp:
    """A request that is sent ``delay`` seconds after another has ended.

    ``needs_answer``  not if the other was refused or aborted: there is nothing to reply to
    """

    request: Request
    delay: float = 0.0
    needs_answer: bool = False


@dataclass(frozen=True, repr=False)
class Workload:
    """``requests`` arrive by themselves, ascending in time; ``follow_ups``: by the id of the request that they follow.

    ``description`` and ``seed`` are for the trace's header, see :attr:`meta`. Raises ValueError if an id is missing or
    used twice, a time is missing or out of order, or a follow-up has nothing to follow.
    """

    requests: tuple[Request, ...]
    description: str = ""
    seed: int | None = None
    follow_ups: Mapping[str, FollowUp] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", tuple(self.requests))
        object.__setattr__(self, "follow_ups", dict(self.follow_ups))
        ids: set[str] = set()
        for request in self.every_request:
            _check_request(request)
            if request.request_id in ids:
                raise ValueError(f"two requests of a workload have the id {request.request_id!r}")
            ids.add(request.request_id)
        last = 0.0
        for request in self.requests:
            if request.arrival_time is None or request.arrival_time < last:
                raise ValueError(f"{request.request_id} arrives at {request.arrival_time}, the one before it at {last}")
            last = request.arrival_time
        for request_id, follow in self.follow_ups.items():
            check_float("delay", follow.delay, 0.0, math.inf)
            if request_id not in ids:
                raise ValueError(f"{follow.request.request_id} follows {request_id!r}, which is not in this workload")

    def __repr__(self) -> str:
        return f"Workload({self.description!r}, seed={self.seed}: {counted(len(self), 'request')})"

    def __len__(self) -> int:
        return len(self.requests) + len(self.follow_ups)

    def next(self, result: Result) -> Iterable[Request]:
        """What comes after this result: nothing, or one request with its arrival time. For ``Engine.run``."""
        follow = self.follow_ups.get(result.request_id)
        if follow is None or (follow.needs_answer and result.finish_reason not in ("stop", "length")):
            return ()
        return (replace(follow.request, arrival_time=result.timeline.finish + follow.delay),)

    # ---------------------------------------------------------------- as numbers

    @property
    def every_request(self) -> tuple[Request, ...]:
        """Follow-ups included, after the others."""
        return (*self.requests, *(follow.request for follow in self.follow_ups.values()))

    @property
    def output_lengths(self) -> dict[str, int]:
        """Tokens that each request will generate, by id: what ``predictors.Oracle`` knows and no scheduler sees."""
        lengths = {request.request_id: _output_length(request) for request in self.every_request}
        return {request_id: length for request_id, length in lengths.items() if length is not None}

    @property
    def duration(self) -> float:
        """Seconds from the first to the last planned arrival."""
        return self.requests[-1].arrival_time - self.requests[0].arrival_time if self.requests else 0.0

    @property
    def rate(self) -> float | None:
        """Planned arrivals a second, follow-ups apart: 1 over the mean gap. None if all arrive at once."""
        return (len(self.requests) - 1) / self.duration if self.duration else None

    @property
    def meta(self) -> dict[str, Any]:
        """For an engine's ``meta``: what identifies this workload in a trace."""
        return {"workload": self.description, "seed": self.seed}

    def summary(self) -> dict[str, float | None]:
        """Numbers that two workloads can be compared by; follow-ups are counted in all but duration and rate."""
        prompts = [len(request.prompt) for request in self.every_request]
        outputs = list(self.output_lengths.values())
        return {
            "requests": len(self),
            "follow_ups": len(self.follow_ups),
            "duration": self.duration,
            "rate": self.rate,
            **_spread("prompt", prompts),
            **_spread("output", outputs),
            "total_tokens": sum(prompts) + sum(outputs),
        }

    # ---------------------------------------------------------------- another workload made of it

    def at_rate(self, rate: float) -> Workload:
        """The same requests at this mean rate: all arrival times are stretched alike. Think times stay."""
        check_float("rate", rate, 0.0, math.inf, above=True)
        if self.rate is None:
            raise ValueError(f"{len(self.requests)} requests at one time have no rate that could become {rate}")
        factor = self.rate / rate
        moved = [replace(request, arrival_time=request.arrival_time * factor) for request in self.requests]
        return replace(self, requests=moved, description=f"{self.description}, at {rate:g} requests/s")

    def slice(self, start: float, stop: float) -> Workload:
        """Who arrives from ``start`` on and before ``stop``, in seconds, which become times from 0 on."""
        kept = [
            replace(request, arrival_time=request.arrival_time - start)
            for request in self.requests
            if start <= request.arrival_time < stop
        ]
        return self._only(kept, f"seconds {start:g} to {stop:g}")

    def head(self, n: int) -> Workload:
        """The first ``n`` arrivals, with what follows them."""
        check_int("n", n, 0)
        return self._only(self.requests[:n], f"the first {n:,} arrivals")

    def sample(self, n: int, seed: int) -> Workload:
        """``n`` arrivals chosen at random, with what follows them; times stay, so the rate falls with the number.

        A smaller sample with the same seed is part of a larger one. Raises ValueError if there are fewer than ``n``.
        """
        check_int("n", n, 0)
        total = len(self.requests)
        if n > total:
            raise ValueError(f"a sample of {n} needs as many arrivals, and there are {total}")
        chosen = np.sort(np.random.default_rng(seed).permutation(total)[:n])
        kept = [self.requests[index] for index in chosen]
        return self._only(kept, f"{n:,} of {total:,} arrivals at random (seed {seed}), the others left out")

    def _only(self, requests: Sequence[Request], what: str) -> Workload:
        """These requests, and of the follow-ups those that come after them."""
        follow_ups = {}
        for request in requests:
            request_id = request.request_id
            while (follow := self.follow_ups.get(request_id)) is not None:
                follow_ups[request_id] = follow
                request_id = follow.request.request_id
        return replace(self, requests=requests, follow_ups=follow_ups, description=f"{self.description}, {what}")

    # ---------------------------------------------------------------- files

    def save(self, path: str | Path) -> None:
        """Writes JSON lines: a header, then one request a line; prompts as the ranges that they are made of."""
        header = {"format": FORMAT, "description": self.description, "seed": self.seed}
        lines = [("workload", header)]
        lines += [("request", _to_json(request)) for request in self.requests]
        for request_id, follow in self.follow_ups.items():
            lines.append(("follow_up", {"after": request_id, **_fields(follow), "request": _to_json(follow.request)}))
        with open(path, "w", encoding="utf-8") as file:
            for kind, value in lines:
                line = json.dumps({kind: value}, separators=(",", ":"), default=lambda number: number.item())
                file.write(line + "\n")  # default: numpy's numbers

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Reads what ``save`` wrote, an equal workload; raises ValueError naming file and line for anything else."""
        header, requests, follow_ups = None, [], {}
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    ((kind, value),) = json.loads(line).items()
                    if header is None:
                        header = _header(kind, value)
                    elif kind == "request":
                        requests.append(_from_json(value))
                    elif kind == "follow_up":
                        if (after := value.pop("after")) in follow_ups:
                            raise ValueError(f"{after!r} is followed already")
                        follow_ups[after] = FollowUp(**{**value, "request": _from_json(value["request"])})
                    else:
                        raise ValueError(f"unknown kind {kind!r}")
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ValueError(f"{path}:{number} is not a line of a minibatch workload: {error}") from error
        if header is None:
            raise ValueError(f"{path} is not a minibatch workload: it has no header line")
        try:
            return cls(requests, follow_ups=follow_ups, **header)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a minibatch workload: {error}") from error


def _check_request(request: Request) -> None:
    check_envelope(request)
    if request.request_id is None:
        raise ValueError(f"every request of a workload has an id, this one has none: {request!r}")


def _output_length(request: Request) -> int | None:
    most = request.params.max_tokens
    if request.output_length is None or most is None:
        return request.output_length or most
    return min(request.output_length, most)


def _spread(name: str, lengths: Sequence[int]) -> dict[str, float | None]:
    median, p90 = np.percentile(lengths, [50, 90]).tolist() if lengths else (None, None)
    return {f"{name}_median": median, f"{name}_p90": p90, f"{name}_tokens": sum(lengths)}


def _header(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    if kind != "workload" or value.pop("format") != FORMAT:
        raise ValueError(f"it should be the header of workload format {FORMAT}")
    if not isinstance(value["description"], str):
        raise ValueError(f"description must be a string, got {value['description']!r}")
    return value


def _to_json(request: Request) -> dict[str, Any]:
    """What is not at its default; the prompt as ``pieces`` [start, stop], or as ``tokens`` if it is written out."""
    value = _fields(request)
    value.pop("prompt", None)
    if "params" in value:
        value["params"] = _fields(request.params)
    ranges = pieces(request.prompt)
    if ranges is None:
        return {**value, "tokens": list(request.prompt)}
    return {**value, "pieces": [[piece.start, piece.stop] for piece in ranges]}


def _from_json(value: dict[str, Any]) -> Request:
    params = value.pop("params", {})
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    if "tokens" in value:
        prompt = list(value.pop("tokens"))
    else:
        prompt = join([range(start, stop) for start, stop in value.pop("pieces")])
    request = Request(prompt=prompt, params=SamplingParams(**params), **value)
    _check_request(request)
    return request


def _fields(instance: Any) -> dict[str, Any]:
    """Of a dataclass, by name, those that are not at their default."""
    found = {}
    for f in fields(instance):
        value = getattr(instance, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if default is MISSING or value != default:
            found[f.name] = value
    return found
