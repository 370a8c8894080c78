"""``minibatch bench``: arithmetic on made-up numbers, the states that are planned in, what is timed, and the command.

Nothing here depends on how fast anything is.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers import check_invariants
from tiny_models import tiny_model

from minibatch import ToyModel, bench, bench_planning, bench_swap
from minibatch.bench import Times
from minibatch.bench_planning import Case, Load
from minibatch.bench_swap import BreakEven, Length, Line, Swapping, break_even, fit
from minibatch.cli import main
from minibatch.clock import RealClock
from minibatch.models.toy_model import ToyStore
from minibatch.policies import ADMISSIONS, FCFS, ORDERS, PREEMPTIONS, LongestPrefix

SMALL = Load(running=16, waiting=50, plans=2)
CASES = {case.name: case for case in bench_planning.cases(SMALL)}


# ---------------------------------------------------------------- what the parts share


def test_times_are_percentiles_in_milliseconds():
    """Fault: seconds are shown as milliseconds, or two percentiles are exchanged."""
    times = Times.of([0.001 * i for i in range(101)])
    assert times.count == 101
    assert (times.p10, times.median, times.p90, times.p99) == pytest.approx((10, 50, 90, 99))


@pytest.mark.parametrize(("load", "words"), [(0.1, "0.10 on"), (1.5, "was not quiet"), (None, "unknown")])
def test_a_busy_machine_is_said_to_be_one(load, words):
    """Fault: numbers of a busy machine go out without a word."""
    text = bench.describe_where(bench.where(load))
    assert words in text and ("quiet" in text) == (load == 1.5) and "python" in text


# ---------------------------------------------------------------- planning


def test_every_policy_that_has_a_name_is_measured():
    """Fault: a policy is added and nobody looks at what it costs."""
    assert {f"order: {name}" for name in ORDERS} <= set(CASES)
    assert {f"admission: {name}" for name in ADMISSIONS} <= set(CASES)
    assert {f"short: {name}" for name in PREEMPTIONS} <= set(CASES)
    assert {f"order: fair, {clients} clients" for clients in (1, 50)} <= set(CASES)


@pytest.mark.parametrize("name", ["order: fair", "prefix cache, prefix", "short: swap", "all short at once: recompute"])
def test_the_state_is_that_of_an_engine_in_the_middle_of_its_work(name):
    """Fault: a state that no engine could be in, or one with so much room that nothing has to be decided."""
    case = CASES[name]
    engine = bench_planning.prepare(case, SMALL)
    check_invariants(engine, fcfs=False)
    assert (len(engine.active), len(engine.queue)) == (16, 50)
    assert all(state.is_decoding for state in engine.active)
    assert engine.kv.num_free < 60 if not case.short else engine.kv.num_free == 0
    growing = sum(state.num_computed % bench_planning.BLOCK == 0 for state in engine.active)
    assert growing == (16 if case.aligned else 0 if case.shares else 1)
    if case.shares:
        found = [engine.kv.draft().cached_tokens(state) for state in engine.queue]
        assert set(found) == {16 * bench_planning.BLOCK} and engine.kv.pool.num_shares > 0
    for _ in range(3):
        check_invariants(engine, engine.step(), fcfs=False)


def test_every_plan_decides_something():
    """Fault: a case measures a plan in which nobody waits, joins or gives way."""
    planning = bench_planning.run(SMALL, progress=False)
    assert len(planning.timings) == 2 * len(CASES)
    for timing in planning.timings:
        name = timing.case
        short = name.startswith(("short", "all short"))
        assert timing.plan.count == timing.cpu.count == timing.check.count == 2
        assert timing.computed > 0 and timing.left_waiting > 0, name
        assert (timing.preempted > 0) == (name.startswith("displacing") or (short and name != "short: never")), name
        assert (timing.admitted > 0) != short, name
    text = bench_planning.describe(planning)
    assert all(name in text for name in CASES) and "goal of 2 ms" in text


def test_a_plan_that_depends_on_the_plans_before_it_is_found_out():
    """Fault: a policy remembers something while it plans, and its times are those of other plans."""

    class Moody(FCFS):
        def walk(self, draft, now):
            self.mood = (getattr(self, "mood", 0) + 1) % 5
            return iter(sorted(self, key=lambda request: (request.rank + self.mood) % 5))

    with pytest.raises(RuntimeError, match="planned differently in the same state"):
        bench_planning.measure(Case("moody", Moody), SMALL)


def test_cases_differ_in_what_they_say_and_in_nothing_else():
    """Fault: two cases have different running requests, so that their times cannot be compared."""
    engines = [bench_planning.prepare(CASES[name], SMALL) for name in ("order: fcfs", "order: skip", "order: fair")]
    first, *others = [
        [(r.request_id, r.prompt, r.max_new_tokens, r.priority) for r in sorted(e.active, key=lambda r: r.rank)]
        for e in engines
    ]
    assert all(other == first for other in others)
    assert len({engine.kv.num_free for engine in engines}) == 1
    assert isinstance(bench_planning.prepare(CASES["order: prefix"], SMALL).queue, LongestPrefix)


# ---------------------------------------------------------------- swap: arithmetic


def test_the_fitted_line_is_the_line():
    """Fault: start and slope are exchanged, or the times are weighed so that the line misses all of them."""
    sizes = [16, 32, 64, 128]
    line = fit(sizes, [3 + 0.5 * size for size in sizes])
    assert (line.start, line.per_token) == pytest.approx((3, 0.5))
    assert fit([16], [8.0]) == Line(0.0, 0.5)


def test_short_lengths_count_as_much_as_long_ones():
    """Fault: the longest context decides alone, and the line says nothing about the short ones."""
    sizes = [16, 32, 64, 4096]
    line = fit(sizes, [1.6, 3.2, 6.4, 500.0])
    assert abs(line.start + 16 * line.per_token - 1.6) < 0.2


ALWAYS = [("swap", [5, 9, 17], [1, 2, 3]), ("recompute", [1, 2, 3], [5, 9, 17])]


@pytest.mark.parametrize(("name", "recompute", "swap"), ALWAYS)
def test_without_a_change_there_is_no_break_even(name, recompute, swap):
    """Fault: a length is made up that nobody measured."""
    assert break_even([16, 32, 64], recompute, swap) == BreakEven(name, name, None, 0)


def test_the_break_even_lies_where_both_cost_the_same():
    """Fault: the two are exchanged, or the length is one end of the interval instead of the crossing."""
    sizes = [16, 32, 64, 128]
    steep, flat = [0.1 * size for size in sizes], [4.0] * 4  # equal at 40
    assert break_even(sizes, steep, flat) == BreakEven("recompute", "swap", pytest.approx(40), 1)
    assert break_even(sizes, flat, steep) == BreakEven("swap", "recompute", pytest.approx(40), 1)


def test_a_cheaper_one_that_changes_often_is_noise():
    """Fault: the first of several crossings is sold as the break-even."""
    assert break_even([16, 32, 64], [5, 1, 5], [2, 2, 2]) == BreakEven("swap", "swap", None, 2)
    assert break_even([16, 32, 64, 128], [5, 1, 5, 1], [2, 2, 2, 2]).tokens is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (BreakEven("swap", "swap", None, 0), "swapping is cheaper from the first block on, at every length measured"),
        (BreakEven("recompute", "recompute", None, 0), "recomputing is cheaper from the first block on"),
        (
            BreakEven("recompute", "swap", 41.6, 1),
            "recomputing is cheaper up to about 42 tokens, swapping from there on",
        ),
        (BreakEven("swap", "swap", None, 2), "not clear: from 16 to 32 tokens the cheaper one changes 2 times"),
    ],
)
def test_the_verdict_in_words(found, words):
    """Fault: the words say the opposite of the numbers, or a CPU's answer is passed off as that of a GPU."""
    times = Times(3, 2.0, 1.0, 3.0, 3.0)
    lengths = (Length(16, 2**20, times, replace(times, median=1.0), replace(times, median=4.0)),)
    lengths += (replace(lengths[0], tokens=32),)
    swapping = Swapping("tiny", "float32", "cpu", lengths, Line(1.9, 0.004), Line(0.9, 0.004), found)
    text = bench_swap.describe(swapping)
    assert words in text and "same memory here" in text
    assert "1.9 ms + 4 us a token (within a factor of 1)" in text and "0.9 ms + 4 us a token (within" in text
    bent = bench_swap.describe(replace(swapping, swap=Line(0.5, 0.1)))
    assert "swap        no straight line: at 32 tokens measured 0.27 times what one would say" in bent
    (row,) = (line.split() for line in text.splitlines() if line.startswith("16 "))
    assert row == ["16", "1.00", "2.00", "1.00-3.00", "1.00", "1.00-3.00", "2.0", "4.00", "25%"]
    assert "same memory" not in bench_swap.describe(replace(swapping, device="cuda:0"))


# ---------------------------------------------------------------- swap: what is timed


class Watched(ToyModel):
    """A toy that says it computes, and notes what it is asked to."""

    def __init__(self, **options):
        super().__init__(**options)
        self.computed, self.moved = [], []

    def clock(self):
        return RealClock()

    def allocate(self, num_rows):
        moved = self.moved

        class Store(ToyStore):
            def swap_out(self, key, rows):
                moved.append(len(rows))
                super().swap_out(key, rows)

            def swap_in(self, key, rows):
                moved.append(-len(rows))
                super().swap_in(key, rows)

        return Store(num_rows)

    def forward(self, plan, kv, store):
        self.computed += [(chunk.start, chunk.stop) for chunk in plan.chunks]
        return super().forward(plan, kv, store)


def test_each_length_is_computed_swapped_and_decoded_in_every_round():
    """Fault: only a part of the context is computed or moved, or the numbers of the first round are taken as well."""
    model = Watched()
    swapping = bench_swap.run(model, longest=70, repeats=3, progress=False)
    assert [length.tokens for length in swapping.lengths] == [16, 32, 64]
    assert all(times.count == 3 for one in swapping.lengths for times in (one.recompute, one.swap, one.decode))
    rounds = 1 + 3
    for size in (16, 32, 64):
        assert model.moved.count(size) == model.moved.count(-size) == rounds
        assert model.computed.count((0, size)) == 1 + rounds  # the first is the prompt itself
        assert model.computed.count((size, size + 1)) == rounds
    assert len(model.moved) == 2 * 3 * rounds and len(model.computed) == 3 + 2 * 3 * rounds


def test_lengths_end_with_the_context():
    """Fault: a model is asked for more tokens than it knows positions."""
    swapping = bench_swap.run(Watched(max_model_len=40), repeats=1, progress=False)
    assert [length.tokens for length in swapping.lengths] == [16, 32]
    with pytest.raises(ValueError, match="a context of 16 tokens"):
        bench_swap.run(Watched(max_model_len=16), repeats=1, progress=False)


# ---------------------------------------------------------------- the command


@pytest.fixture
def few_cases(monkeypatch):
    """Enough to see what the command does with them."""
    monkeypatch.setattr(bench_planning, "cases", lambda load: [CASES["order: fair"], CASES["short: recompute"]])


def test_the_command_gives_all_numbers_as_json(tmp_path, capsys, one_thread, few_cases):
    """Fault: a number, the machine or the versions are missing, or something else is on stdout."""
    tiny_model("llama").save_pretrained(tmp_path)
    arguments = ["--planning", "--running", "8", "--waiting", "20", "--plans", "2"]
    arguments += ["--swap", "--model", str(tmp_path), "--longest", "32", "--repeats", "2"]
    capsys.readouterr()
    with pytest.warns(UserWarning, match="has no tokenizer"):
        assert main(["bench", *arguments, "--json", "--quiet"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert set(numbers) == {"machine", "cores", "load_average", "versions", "planning", "swap"}
    assert {"python", "numpy", "torch", "transformers"} <= set(numbers["versions"])
    planning, swap = numbers["planning"], numbers["swap"]
    assert planning["load"] == {"running": 8, "waiting": 20, "plans": 2} and planning["goal_ms"] == 2
    keys = {"case", "scheduler", "computed", "admitted", "left_waiting", "preempted", "plan", "cpu", "check"}
    assert all(set(timing) == keys for timing in planning["timings"])
    assert set(swap) == {"model", "dtype", "device", "lengths", "recompute", "swap", "break_even"}
    a_token = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, bytes
    assert [(one["tokens"], one["kv_bytes"]) for one in swap["lengths"]] == [(16, 16 * a_token), (32, 32 * a_token)]
    assert all(one[name]["median"] > 0 for one in swap["lengths"] for name in ("recompute", "swap", "decode"))
    assert set(swap["recompute"]) == set(swap["swap"]) == {"start", "per_token"}
    assert set(swap["break_even"]) == {"short", "long", "tokens", "changes"}


def test_the_command_prints_a_table(capsys, few_cases):
    """Fault: the words of a part that was not chosen, or none."""
    small = ["--planning", "--running", "8", "--waiting", "20", "--plans", "2", "--quiet"]
    assert main(["bench", *small]) == 0
    shown = capsys.readouterr().out
    assert "8 running and 20 waiting requests" in shown and "order: fair" in shown and "break-even" not in shown


REFUSED = [
    (["--model", "toy"], "toy computes nothing"),
    (["--planning", "--plans", "0"], "plans must be an integer of at least 1, got 0"),
    (["--planning", "--running", "0"], "running must be an integer of at least 1"),
    (["--swap", "--model", "toy"], "toy computes nothing"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(case[0][-2:]) for case in REFUSED])
def test_what_cannot_be_measured_says_why(arguments, words, capsys):
    """Fault: a command that measures nothing ends with 0, or with a traceback."""
    try:
        ended = main(["bench", *arguments])
    except SystemExit as error:  # argparse's own
        ended = error.code
    assert ended == 2 and words in capsys.readouterr().err
