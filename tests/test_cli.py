"""The command line as a shell runs it: real processes, exit codes, what goes to which stream."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from minibatch import Trace
from minibatch.cli import main

COMPARE = ["compare", "--model", "toy", "--workload", "short", "--requests", "6", "--max-tokens", "12", "--quiet"]


def minibatch(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "minibatch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


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


def test_compare_json_is_json_and_nothing_else(tmp_path):
    done = minibatch(*COMPARE, "--out", str(tmp_path), "--json")
    numbers = json.loads(done.stdout)
    assert done.returncode == 0 and list(numbers["configurations"]) == ["static", "continuous", "paged", "chunked"]
    for configuration in numbers["configurations"].values():
        work = configuration["numbers"]
        parts = ("work prefill", "work decode", "work recomputed", "work left pads", "work dead rows")
        assert work["work executed"] == sum(work[part] for part in parts)
        assert configuration["equality"]["holds"]


def test_compare_shows_a_progress_bar_on_stderr(tmp_path):
    done = minibatch(*COMPARE[:-1], "--out", str(tmp_path))
    assert "30/30" in done.stderr and "30/30" not in done.stdout


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


@pytest.mark.parametrize("command", ["compare", "generate"])
def test_help_names_the_options(command):
    done = minibatch(command, "--help")
    assert done.returncode == 0
    for option in ("--model", "--dtype", "--device"):
        assert option in done.stdout
    if command == "compare":
        for option in ("--workload", "--kv-tokens", "--out", "--json", "--seed"):
            assert option in done.stdout


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
    ([*COMPARE, "--device", "cuda"], 2, "neither dtype nor device"),
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
