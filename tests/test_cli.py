"""The command line as a shell runs it: real processes, exit codes, what goes to which stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from minibatch import Trace
from minibatch.cli import main

COMPARE = ["compare", "--model", "toy", "--workload", "short", "--requests", "6", "--max-tokens", "12", "--quiet"]


def minibatch(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "minibatch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_compare_prints_the_table_and_writes_the_pictures(tmp_path):
    done = minibatch(*COMPARE, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    for name in ("static", "continuous", "paged", "chunked"):
        assert f"{name:<12}6 of 6 equal" in done.stdout
    for words in (
        "simulated",
        "iterations",
        "useful",
        "tokens/s",
        "reserved",
        "fragmented",
        "preemptions",
        "TTFT",
        "TBT",
        "P99",
    ):
        assert words in done.stdout
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"membership.png", "kv_memory.png", "token_budget.png", "latency.png"}
    trace = Trace.load(tmp_path / "out" / "chunked.trace.jsonl")
    assert len(trace.timelines) == 6 and trace.simulated


@pytest.mark.slow
def test_compare_json_is_json_and_nothing_else(tmp_path):
    done = minibatch(*COMPARE, "--out", str(tmp_path), "--json")
    numbers = json.loads(done.stdout)
    assert done.returncode == 0 and list(numbers["configurations"]) == ["static", "continuous", "paged", "chunked"]
    for configuration in numbers["configurations"].values():
        work = configuration["numbers"]
        parts = ("work prefill", "work decode", "work recomputed", "work left pads", "work dead rows")
        assert work["work executed"] == sum(work[part] for part in parts)
        assert configuration["equality"]["holds"]


@pytest.mark.slow
def test_compare_shows_a_progress_bar_on_stderr(tmp_path):
    done = minibatch(*COMPARE[:-1], "--out", str(tmp_path))
    assert "30/30" in done.stderr and "30/30" not in done.stdout


@pytest.mark.slow
def test_generate_streams_the_answer_to_stdout_and_the_facts_to_stderr():
    done = minibatch("generate", "--model", "toy", "--prompt", "hello", "--max-tokens", "8", "--scheduler", "static")
    assert done.returncode == 0 and done.stdout.strip()
    assert "[static: 5 prompt + 8 new tokens, ended by length" in done.stderr


@pytest.mark.parametrize("scheduler", ["static", "continuous", "paged", "chunked"])
def test_generate_gives_the_same_answer_with_every_scheduler(scheduler, capsys):
    def answer(name: str) -> str:
        assert main(["generate", "--model", "toy", "--prompt", "same", "--scheduler", name]) == 0
        return capsys.readouterr().out

    assert answer(scheduler) == answer("static")


MODEL = ("--model", "--dtype", "--device")
POLICIES = ("--order", "round-robin", "--admission", "forecast", "--preemption", "most-blocks", "--prefix-cache")
HELP = {
    "compare": (*MODEL, "--workload", "--kv-tokens", "--out", "--json", "--seed", *POLICIES),
    "generate": MODEL,
    "explain": ("REQUEST", "--trace", "5 free, 1 promised"),
}


@pytest.mark.parametrize("command", HELP)
def test_help_names_the_options(command):
    done = minibatch(command, "--help")
    words = " ".join(done.stdout.split())
    assert done.returncode == 0
    for option in HELP[command]:
        assert option in words


# ---------------------------------------------------------------- policies of compare

TIGHT = [*COMPARE, "--load", "50", "--kv-tokens", "160", "--block-size", "8", "--max-tokens", "24"]
MINE = """
from minibatch.policies import Optimistic, Order, Recompute, Swap


class ShortPromptsFirst(Order):
    def key(self, request):
        return request.num_prompt


class Hurried(Optimistic):
    def tokens(self, request, size):
        return size


def biggest(candidates, memory):
    return max(candidates, key=memory.held)


def SwapTheBiggest():
    return Swap(victim=biggest)


class Twice(Order):
    def walk(self, draft, now):
        for request in self:
            yield request
            yield request


class Greedy(Optimistic):
    def tokens(self, request, size):
        return 10**6


def Strange():
    return Recompute(victim=lambda candidates, memory: "nobody")


class WithoutIndex(Order):
    def __init__(self):
        pass


class Half:
    def tokens(self, request, size):
        return size


def needs(more):
    return more


number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The working directory has a module of policies. No pictures are drawn, which takes seconds."""
    monkeypatch.setattr("minibatch.plots.compare_figures", lambda traces: {})
    (tmp_path / "my_policies.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    yield tmp_path
    sys.modules.pop("my_policies", None)


def test_compare_with_policies_and_a_prefix_cache(mine, capsys):
    """Fault: an option reaches no configuration, or the wrong ones, or its effect is in no number."""
    (mine / "prompts.txt").write_text("".join(f"the same beginning of them all, then {i}\n" for i in range(6)))
    options = ["--order", "fair", "--admission", "optimistic", "--preemption", "swap", "--prefix-cache"]
    assert main([*TIGHT, "--workload", "prompts.txt", *options]) == 0
    told = capsys.readouterr().out
    assert "order       Fair(input_weight=1, output_weight=2) in every configuration" in told
    assert "prefix cache | swap (tokens)" in told and "found of prompts found again" in told
    assert all(len(line) <= 100 for line in told.splitlines() if not line.startswith("written to "))
    moved = {}
    for name in ("continuous", "paged", "chunked", "static"):
        trace = Trace.load(mine / "compare-toy" / f"{name}.trace.jsonl")
        meta, moved[name] = (
            trace.meta,
            [sum(getattr(s, what) for s in trace.steps) for what in ("cached", "swapped_out")],
        )
        assert meta["order"].startswith("Fair(")
        assert ("PrefixCachedKVCache" in meta["kv_cache"]) == (name in ("paged", "chunked"))
        for part in ("admission=Optimistic()", "preemption=Swap("):
            assert (part in meta["scheduler"]) == (name != "static")
    numbers = json.loads((mine / "compare-toy" / "compare.json").read_text())
    assert numbers["setup"]["order"] == "fair" and numbers["setup"]["prefix_cache"] is True
    for name, configuration in numbers["configurations"].items():
        values, on_blocks = configuration["numbers"], name in ("paged", "chunked")
        assert configuration["order"].startswith("Fair(")
        assert [values["prefix cache found"], values["swap swapped"]] == moved[name]
        assert (values["prefix cache found"] > 0) == (values["prefix cache of prompts"] > 0) == on_blocks
        assert (values["swap swapped"] > 0) == (values["swap host peak"] > 0) == on_blocks
        assert values["work recomputed"] == 0


def test_compare_splits_by_client_and_priority(tmp_path, capsys):
    arguments = ["--model", "toy", "--workload", "short", "--requests", "6", "--max-tokens", "6", "--order", "fair"]
    more = ["--clients", "2", "--priorities", "2", "--out", str(tmp_path), "--quiet"]
    assert main(["compare", *arguments, *more]) == 0
    said = capsys.readouterr().out
    assert "TTFT mean, by client" in said and "TTFT mean, by priority" in said and "2 clients, 2 priorities" in said
    assert "same client" not in said


def test_compare_says_nothing_of_policies_that_nobody_asked_for(mine, capsys):
    """Fault: every reader gets columns of zeros; or an order that is the default is announced."""
    assert main(COMPARE) == 0
    told = capsys.readouterr().out
    assert "prefix cache" not in told and "swap" not in told and "order  " not in told


@pytest.mark.parametrize(
    "options",
    [
        ["--order", "my_policies:ShortPromptsFirst"],
        ["--admission", "my_policies:Hurried"],
        ["--preemption", "my_policies:SwapTheBiggest"],
    ],
    ids=lambda options: options[1],
)
def test_compare_takes_policies_from_the_working_directory(options, mine, capsys):
    """Fault: a policy of one's own cannot be given, or is ignored."""
    assert main([*TIGHT, *options]) == 0
    shown = {"order": "ShortPromptsFirst()", "admission": "admission=Hurried()", "preemption": "Swap(victim=biggest"}
    assert shown[options[0][2:]] in " ".join(capsys.readouterr().out.split())


BAD_POLICIES = [
    (["--order", "nope"], 2, "order: no policy 'nope': there are fcfs, skip, priority"),
    (["--order", "no_such_module:X"], 2, "order: no policy 'no_such_module:X': No module named 'no_such_module'"),
    (["--admission", "my_policies:X"], 2, "admission: no policy 'my_policies:X'"),
    (["--order", "my_policies:WithoutIndex"], 2, "which has no used"),
    (["--admission", "my_policies:Half"], 2, "which has no objection, check"),
    (["--preemption", "my_policies:number"], 2, "my_policies:number is 3: give a class, or a function"),
    (["--preemption", "my_policies:needs"], 2, "preemption: my_policies:needs: TypeError"),
    (["--order", "my_policies:Twice"], 5, "static: Twice() named r"),
    (["--admission", "my_policies:Greedy"], 5, "continuous: Greedy() sets aside 1000000 tokens for r"),
    (["--preemption", "my_policies:Strange"], 5, "chose str 'nobody', which is no candidate"),
    (["--preemption", "never", "--admission", "optimistic"], 5, "paged: ContinuousBatching planned nothing"),
]


@pytest.mark.parametrize(("options", "code", "words"), BAD_POLICIES, ids=[case[0][1] for case in BAD_POLICIES])
def test_a_bad_policy_is_named_and_ends_with_a_code(options, code, words, mine, capsys):
    """Fault: a traceback from the depths of a plan; or a typing error is noticed after minutes."""
    assert main([*TIGHT, *options]) == code
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told
    assert {path.name for path in mine.iterdir()} <= {"my_policies.py", "__pycache__"}


# ---------------------------------------------------------------- explain


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minibatch.plots.compare_figures", lambda traces: {})
        assert main([*TIGHT, "--out", str(directory)]) == 0
    return directory


def test_explain_tells_the_story_of_a_request(compared, capsys):
    """Fault: the command tells something else than the trace."""
    capsys.readouterr()
    path = compared / "paged.trace.jsonl"
    name = max(Trace.load(path).timelines, key=lambda t: t.num_preemptions).request_id
    assert main(["explain", name, "--trace", str(path)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{name}: prompt ") and told.err == ""
    for words in ("arrived", "admitted", "preempted", "computed again", "ended by length", "Times are seconds"):
        assert words in told.out
    assert max(map(len, told.out.splitlines())) <= 100


def test_explain_ends_quietly_when_its_reader_has_gone(compared):
    """Fault: `minibatch explain ... | head -1` ends with a traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "minibatch", "explain", "r0", "--trace", str(compared / "paged.trace.jsonl")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    os.close(write)
    assert done.returncode == 0 and done.stderr == ""


def test_explain_says_what_it_cannot_explain(compared, tmp_path, capsys):
    """Fault: a wrong id or file is a traceback, or looks like a story."""
    path = compared / "paged.trace.jsonl"
    (tmp_path / "notes.txt").write_text("not a trace\n")
    for arguments, words in (
        (["r55", "--trace", str(path)], "no request 'r55' in this trace; close to it: r5"),
        (["r0", "--trace", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["r0", "--trace", str(tmp_path / "notes.txt")], "notes.txt:1 is not a line of a minibatch trace"),
        (["r0", "--trace", str(tmp_path)], str(tmp_path)),
    ):
        capsys.readouterr()
        assert main(["explain", *arguments]) == 2
        told = capsys.readouterr()
        assert words in told.err and told.out == ""


REFUSED = [
    ([], 2, "COMMAND"),
    (["compare", "--requests", "many"], 2, "invalid int"),
    ([*COMPARE, "--requests", "0"], 2, "num_requests must be an integer of at least 1, got 0"),
    ([*COMPARE, "--kv-tokens", "16"], 2, "the budget is 16"),
    ([*COMPARE, "--load", "-1"], 2, "load must lie in (0, inf), got -1.0"),
    ([*COMPARE, "--workload", "no/such/file"], 2, "no/such/file"),
    ([*COMPARE, "--load", "inf"], 2, "load must lie in (0, inf), got inf"),
    ([*COMPARE, "--out", "/dev/null/x"], 2, "cannot write to /dev/null/x"),
    ([*COMPARE, "--max-tokens", "9000"], 2, "the context 8192"),
    ([*COMPARE, "--device", "cuda"], 2, "neither dtype nor device nor a fast path"),
    (["generate", "--model", "toy", "--prompt", ""], 2, "empty"),
    (["generate", "--model", "toy", "--prompt", "x", "--temperature", "-1"], 2, "temperature must lie in [0, inf)"),
    (["generate", "--model", "toy", "--prompt", "x", "--max-tokens", "0"], 2, "max_tokens"),
    (["generate", "--model", "./no/such/model", "--prompt", "x"], 3, "no/such/model"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED, ids=[" ".join(case[0][-2:]) for case in REFUSED])
def test_what_cannot_run_says_why_and_ends_with_a_code(arguments, code, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        ended = main(arguments)
    except SystemExit as error:  # argparse's own
        ended = error.code
    captured = capsys.readouterr()
    assert ended == code and words in captured.err and "Traceback" not in captured.err
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


@pytest.mark.slow
def test_compare_ends_with_4_when_tokens_differ(monkeypatch, tmp_path, capsys):
    """An executor that is wrong in a batch, and only there, must not get away with it."""
    from minibatch.models.toy_model import ToyModel

    class Leaky(ToyModel):
        def forward(self, plan, kv, store):
            logits = super().forward(plan, kv, store)
            return logits[::-1] if len(logits) > 1 else logits

    monkeypatch.setattr("minibatch.cli.load_model", lambda *_: Leaky())
    assert main([*COMPARE, "--load", "50", "--out", str(tmp_path)]) == 4
    assert "DIFFER" in capsys.readouterr().out
