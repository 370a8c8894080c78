"""Workloads in which what comes next depends on when an answer came.

A closed loop has a fixed number of clients, and each waits for its answer before it asks again: there are never more
requests in the system than clients, so it slows down with the engine, and hides an overload. A conversation is the same
for one user, and its next turn contains all that was said before, which a prefix cache may find.

All turns are drawn beforehand, from a child generator for every client or conversation. ``think_time`` is the mean of
an exponential pause between an answer and what follows; 0 is no pause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from minibatch.arrival_processes import ArrivalProcess
from minibatch.checks import check_float, check_int
from minibatch.contents import join, own, shared
from minibatch.distributions import Fixed, Lengths
from minibatch.open_loop import simulated_request
from minibatch.request import Request
from minibatch.trace import counted
from minibatch.workloads import FollowUp, Workload


def closed_loop(
    num_clients: int,
    num_requests: int,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    *,
    think_time: float = 0.0,
    seed: int = 0,
    max_tokens: int | None = None,
) -> Workload:
    """Every client sends ``num_requests``, one after the other, the first at time 0, and goes on after a refusal.

    Request ``c3.2`` is the third one of client ``c3``, which is the fourth.
    """
    check_int("num_clients", num_clients, 1)
    check_int("num_requests", num_requests, 1)
    check_float("think_time", think_time, 0.0, math.inf)
    firsts: list[Request] = []
    follow_ups: dict[str, FollowUp] = {}
    for client, child in enumerate(np.random.SeedSequence(seed).spawn(num_clients)):
        prompts, outputs, pauses = _turns(child, num_requests, prompt_lengths, output_lengths, think_time)
        requests = [
            simulated_request(
                f"c{client}.{turn}", own(client * num_requests + turn, prompt), output, 0.0, max_tokens, f"c{client}"
            )
            for turn, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        firsts.append(requests[0])
        follow_ups |= _chain(requests, pauses, needs_answer=False)
    what = (
        f"closed loop: {counted(num_clients, 'client')}, {counted(num_requests, 'request')} each, "
        f"think time {think_time:g} s, prompts {prompt_lengths.describe()}, outputs {output_lengths.describe()}"
    )
    return Workload(firsts, what, seed, follow_ups)


def conversations(
    n: int,
    turns: int | Lengths,
    arrivals: ArrivalProcess,
    user_lengths: Lengths,
    answer_lengths: Lengths,
    *,
    think_time: float = 0.0,
    system_prompt: int = 0,
    seed: int = 0,
    max_tokens: int | None = None,
    client: str = "default",
) -> Workload:
    """``n`` conversations; a turn's prompt is the system prompt, what was said before, and the user's new words.

    ``arrivals`` are those of the first turns. Turn ``c3.2`` is the third of the fourth conversation; the next one comes
    the think time after its answer, and not at all if it was refused or aborted. ``system_prompt``: tokens that all
    conversations begin with.
    """
    check_int("n", n, 0)
    check_int("system_prompt", system_prompt, 0)
    check_float("think_time", think_time, 0.0, math.inf)
    for_times, for_turns, for_contents = np.random.SeedSequence(seed).spawn(3)
    how_many = turns if isinstance(turns, Lengths) else Fixed(turns)
    times = arrivals.times(np.random.default_rng(for_times), n).tolist()
    numbers = how_many.draw(np.random.default_rng(for_turns), n).tolist()
    contents = count()
    firsts: list[Request] = []
    follow_ups: dict[str, FollowUp] = {}
    for number, child in enumerate(for_contents.spawn(n)):
        users, answers, pauses = _turns(child, numbers[number], user_lengths, answer_lengths, think_time)
        requests: list[Request] = []
        said = [shared(0, system_prompt)]
        for turn, (user, answer) in enumerate(zip(users, answers, strict=True)):
            content = next(contents)
            prompt = join([*said, own(content, user)])
            requests.append(simulated_request(f"c{number}.{turn}", prompt, answer, times[number], max_tokens, client))
            said.append(own(content, user + requests[-1].output_length))  # the answer counts on from the prompt
        firsts.append(requests[0])
        follow_ups |= _chain(requests, pauses, needs_answer=True)
    what = (
        f"{counted(n, 'conversation')}, turns {how_many.describe()}, arrivals {arrivals.describe()}, "
        f"think time {think_time:g} s, system prompt {counted(system_prompt, 'token')}, "
        f"user {user_lengths.describe()}, answers {answer_lengths.describe()}"
    )
    return Workload(firsts, what, seed, follow_ups)


def _turns(
    seed: np.random.SeedSequence, n: int, prompts: Lengths, outputs: Lengths, think_time: float
) -> tuple[list[int], list[int], list[float]]:
    """Prompt and output lengths of ``n`` turns, and the ``n - 1`` pauses between them."""
    for_prompts, for_outputs, for_pauses = map(np.random.default_rng, seed.spawn(3))
    pauses = think_time * for_pauses.standard_exponential(n - 1)
    return prompts.draw(for_prompts, n).tolist(), outputs.draw(for_outputs, n).tolist(), pauses.tolist()


def _chain(requests: Sequence[Request], pauses: Iterable[float], needs_answer: bool) -> dict[str, FollowUp]:
    """Each request but the first follows the one before it."""
    return {
        before.request_id: FollowUp(replace(after, arrival_time=None), pause, needs_answer)
        for before, after, pause in zip(requests, requests[1:], pauses, strict=False)
    }
