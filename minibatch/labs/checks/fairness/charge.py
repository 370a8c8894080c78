"""What a request has cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.strips import Cell, strips
from minibatch.labs.trial import Broken, request, run
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plot_style import MEMORY, TOKENS
from minibatch.policies import Fair, Recompute, Swap
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import RequestState
from minibatch.trace import StepReport

REAL = "What was generated is charged, not what might have been: 10 x 1 + 10 x 2."
WHOLE = "The whole prompt is charged from the admission on, though it is computed piece by piece."
AGAIN = "A preemption costs the client nothing: what is computed again was charged before, once."
FOUND = "Prompt tokens that a prefix cache had cost nothing: nobody has computed them."
PART = "An aborted request pays for the prompt tokens that were computed, and not for the rest."
ANSWER = "An aborted request pays for its whole prompt when that was computed, and for its answer so far."
NEVER = "No charge is below 0: aborted before anything was computed, it costs nothing, whatever a cache had."
PRICES = "A prompt token costs input_weight and a generated one output_weight, as this order was given them."
WEIGHT = "The weight of the client has no part in it: the order divides by it where counters are compared."
EACH = "Each prompt token that was not cached (of an aborted request: and was computed), and each generated token."

BY_HAND = (  # of a prompt of 10 tokens: the charge, the idea, how far it has come
    (30, REAL, {"generated": 10, "finish_reason": "stop"}),
    (10, WHOLE, {"num_computed": 4, "high_water": 4}),
    (20, AGAIN, {"generated": 5, "num_computed": 0, "high_water": 14, "stays": 2}),
    (20, AGAIN, {"generated": 5, "num_computed": 14, "high_water": 14, "stays": 3}),
    (8, FOUND, {"generated": 3, "num_cached": 8}),
    (4, PART, {"num_computed": 4, "high_water": 4, "finish_reason": "abort"}),
    (4, PART, {"num_computed": 0, "high_water": 4, "finish_reason": "abort", "stays": 2}),
    (5, PART, {"num_computed": 9, "high_water": 9, "num_cached": 4, "finish_reason": "abort"}),
    (16, ANSWER, {"generated": 3, "finish_reason": "abort"}),
    (0, NEVER, {"num_computed": 0, "high_water": 0, "num_cached": 8, "finish_reason": "abort"}),
)


def check(part: type[Fair]) -> None:
    for want, idea, fields in BY_HAND:
        _bill(part(), want, idea, **fields)
    _bill(part(input_weight=0.5, output_weight=3.0), 10 * 0.5 + 4 * 3, PRICES, generated=4)
    _bill(part({"X": 2.0}), 30, WEIGHT, generated=10)
    for_all(
        lambda **drawn: _token_by_token(part, **drawn),
        prompt=st.integers(1, 9),
        generated=st.integers(0, 6),
        cached=st.integers(0, 9),
        high_water=st.integers(0, 14),
        reason=st.sampled_from([None, "length", "stop", "abort"]),
        weights=st.sampled_from([(1.0, 2.0), (0.5, 3.0), (0.0, 1.0), (2.0, 0.0)]),
    )
    _found_in_a_cache(part(lift=False))
    _aborted(part())
    for_all(
        lambda **drawn: _adds_up(part, **drawn),
        examples=25,
        asked=st.lists(st.tuples(st.sampled_from("XY"), st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=5),
        kind=st.sampled_from([PagedKVCache, PrefixCachedKVCache]),
        way=st.sampled_from([Recompute(), Swap()]),
    )


# --- bills of one request, without an engine ---


def _bill(
    order: Fair, want: float, idea: str, *, prompt: int = 10, generated: int = 0, stays: int = 1, **fields: Any
) -> None:
    """``fields`` of a request that has computed all that it can, if they say nothing else."""
    made = state("c", prompt, generated, prompt + max(generated - 1, 0), new=100, client="X")
    made.timeline.runs = [[float(i), float(i + 1)] for i in range(stays)]
    for name, value in fields.items():
        setattr(made, name, value)
    made.timeline.num_cached, made.timeline.token_times = made.num_cached, [float(i) for i in range(generated)]
    said = f"num_prompt {prompt}, generated {generated} tokens"
    for name in ("num_cached", "num_computed", "high_water", "finish_reason"):
        said += f", {name} {getattr(made, name)}"
    case = f"{said}; {stays} stay{'s' * (stays > 1)} among the active; input_weight {order.input_weight:g}"
    case += f", output_weight {order.output_weight:g}{f'; weights {order.weights}' if order.weights else ''}"
    got = order.charge(made)
    expect(got, want, what="charge", case=case, idea=idea, picture=lambda: _receipt(made, order, want, got))


def _receipt(made: RequestState, order: Fair, want: float, got: float) -> Figure:
    """The tokens of a request, and what each costs."""
    reached = min(made.high_water, made.num_prompt) if made.finish_reason == "abort" else made.num_prompt
    cached = min(made.num_cached, made.num_prompt)
    kinds = (
        ("cached", cached, 0.0, MEMORY["cached"].color),
        ("prompt", max(reached - cached, 0), order.input_weight, TOKENS["prefill"].color),
        ("never computed", made.num_prompt - max(reached, cached), 0.0, MEMORY["free"].color),
        ("generated", len(made.generated), order.output_weight, TOKENS["decode"].color),
    )
    rows = {
        "tokens": [Cell(kind, color, number) for kind, number, _, color in kinds if number],
        "cost": [Cell(f"{price:g}", color) for _, number, price, color in kinds for _ in range(number)],
    }
    return strips(rows, f"what each token costs: together {want:g}; charged was {in_words(got, 20)}")


def _token_by_token(
    part: type[Fair],
    prompt: int,
    generated: int,
    cached: int,
    high_water: int,
    reason: str | None,
    weights: tuple[float, float],
) -> None:
    cached, total = min(cached, prompt), generated * weights[1]
    computed = prompt + generated - 1 if generated else min(high_water, prompt)
    for position in range(cached, prompt):
        if reason != "abort" or position < computed:
            total += weights[0]
    so_far = {"num_cached": cached, "high_water": computed, "num_computed": computed, "finish_reason": reason}
    order = part(input_weight=weights[0], output_weight=weights[1])
    _bill(order, total, EACH, prompt=prompt, generated=generated, **so_far)


# --- in an engine ---


def _found_in_a_cache(order: Fair) -> None:
    asked = [request(10, 4, client="X"), request(10, 4, 9, client="Y")]
    trial = run(asked, ContinuousBatching(), PrefixCachedKVCache(32, 4), order=order)
    idea = "Y's prompt was X's: 8 of its 10 tokens are found in the cache, and are free."
    trial.expect([order.counter("X"), order.counter("Y")], [18.0, 10.0], what="counters of X, Y", idea=idea)


def _aborted(order: Fair) -> None:
    engine = Engine(ToyModel(), ChunkedPrefill(4), PagedKVCache(32, 4), order=order)
    engine.submit(request(10, 16, client="X"))
    case = "a prompt of 10 in chunks of 4; after the first"
    engine.step()
    expect(order.counter("X"), 10.0, what="counter of X", case=case, idea=WHOLE)
    engine.abort(engine.active[0].request_id)
    expect(order.counter("X"), 4.0, what="counter of X", case=f"{case} it is aborted", idea=PART)


def _adds_up(part: type[Fair], asked: list[tuple[str, int, int]], kind: type[PagedKVCache], way: Recompute) -> None:
    """Counters are what was computed for the first time, and generated, according to the reports."""
    order, due = part(input_weight=0.5, output_weight=3.0, lift=False), Counter()
    requests = [request(p, g, client=client) for client, p, g in asked]
    client = {chr(97 + i): each.client for i, each in enumerate(requests)}

    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        for member in report.members:
            due[client[member.request_id]] += 0.5 * member.prefill + 3.0 * (member.emitted is not None)
        for name, want in due.items():
            if order.counter(name) != want:
                idea = "A counter is 0.5 for each prompt token computed for the first time, and 3 for each token made."
                yield idea, f"counter of {name}: {want:g}", f"{order.counter(name):g}"

    run(requests, ContinuousBatching(3, preemption=way), kind(5, 3), order=order, watch=watch)
