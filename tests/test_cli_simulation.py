"""``simulate``, ``sweep``, ``reproduce`` and ``calibrate`` as a shell runs them."""

from __future__ import annotations

import csv
import json

import pandas as pd
import pytest

from minibatch import Trace
from minibatch.cli import main
from minibatch.scenario import Scenario, numbers

SMALL = ["--num-requests", "12", "--prompts", "uniform:20,100", "--outputs", "geometric:20,100"]


def run(capsys, *arguments):
    code = main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_simulate_prints_the_table_of_compare_marked_simulated(capsys):
    code, out, _ = run(capsys, "simulate", *SMALL, "--gpu", "l4", "--model", "qwen3-0.6b")
    assert code == 0
    assert "Qwen3-0.6B on L4, simulated" in out and "time | KV cache (seconds, simulated)" in out
    for name in ("static", "continuous", "paged", "chunked"):
        assert any(line.startswith(name) for line in out.splitlines())
    for word in ("TTFT P99", "dead rows", "fragmented", "poisson:4", "seed 0"):
        assert word in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 110


def test_simulate_in_json_has_the_numbers_of_the_scenario(capsys):
    code, out, _ = run(capsys, "simulate", *SMALL, "--scheduler", "chunked", "--json")
    expected = numbers(Scenario(num_requests=12, prompts="uniform:20,100", outputs="geometric:20,100").run())
    assert code == 0 and json.loads(out) == {"chunked": expected}


@pytest.mark.slow
def test_simulate_writes_full_traces_and_pictures(capsys, tmp_path):
    code, out, _ = run(capsys, "simulate", *SMALL, "--scheduler", "paged", "static", "--out", str(tmp_path / "out"))
    assert code == 0 and "written to" in out
    trace = Trace.load(tmp_path / "out" / "paged.trace.jsonl")
    assert len(trace.timelines) == 12 and trace.steps and not trace.light
    assert {path.name for path in (tmp_path / "out").glob("*.png")} >= {"membership.png", "latency.png"}
    assert main(["explain", "r3", "--trace", str(tmp_path / "out" / "paged.trace.jsonl")]) == 0


def test_what_was_refused_is_said(capsys):
    """Fault: a workload of which a part was refused looks quick."""
    code, out, _ = run(capsys, "simulate", *SMALL, "--scheduler", "paged", "--kv-tokens", "128")
    assert code == 0 and "refused, the first: " in out and "the pool has 8" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "gpt-5"], "model must be one of"),
        (["--prompts", "uniform:9,3"], "uniform:9,3"),
        (["--workload", "azure:nowhere.csv"], "there is no file nowhere.csv"),
        (["--gpu", "l4", "--model", "llama-3-70b"], "the weights take 141"),
        (["--order", "nobody"], "no policy 'nobody'"),
        (["--kv-tokens", "20"], "the KV cache has 20"),
    ],
)
def test_wrong_usage_is_told_in_a_line(capsys, arguments, message):
    code, out, err = run(capsys, "simulate", *SMALL, *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_sweep_writes_one_row_a_run_and_prints_intervals(capsys, tmp_path):
    path = tmp_path / "sweep.csv"
    arguments = ["--rate", "2", "8", "--scheduler", "paged", "chunked", "--seeds", "2", "--jobs", "1", "--quiet"]
    code, out, _ = run(capsys, "sweep", *SMALL, *arguments, "--out", str(path))
    rows = list(csv.DictReader(path.open()))
    assert code == 0 and len(rows) == 8 and "±" in out.split("simulated;")[0]
    assert {(row["rate"], row["scheduler"], row["seed"]) for row in rows} == {
        (rate, scheduler, seed) for rate in ("2.0", "8.0") for scheduler in ("paged", "chunked") for seed in "01"
    }
    assert pd.read_csv(path)["completed"].eq(12).all()


SLO = ["sweep", *SMALL[2:], "--kv-tokens", "600", "--seeds", "1", "--jobs", "1", "--quiet"]


def test_sweep_finds_the_highest_rate_that_meets_an_objective(capsys, tmp_path):
    path = tmp_path / "capacity.csv"
    slo = ["--slo", "ttft_p99=1", "tbt_p99=0.1", "--between", "1", "100", "--tolerance", "0.3", "--seconds", "10"]
    code, out, _ = run(capsys, *SLO, *slo, "--out", str(path))
    row = pd.read_csv(path).iloc[0]
    assert code == 0 and f"{row['capacity']:.4g}" in out and 1 <= row["capacity"] < row["capacity_below"]


@pytest.mark.parametrize("bound, between, said", [("5", ("1", "4"), "above 4"), ("0.0001", ("3", "5"), "below 3")])
def test_a_capacity_outside_of_what_was_looked_at_is_not_a_number(capsys, tmp_path, bound, between, said):
    """Fault: the end of the range is printed as if it had been measured, with an interval of 0."""
    arguments = ["--slo", f"tbt_p99={bound}", "--between", *between, "--seconds", "10"]
    code, out, err = run(capsys, *SLO, *arguments, "--out", str(tmp_path / "capacity.csv"))
    assert code == 0 and said in out and "±" not in out.split("simulated;")[0] and "Warning" not in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--slo", "speed=3"], "no latency speed"),
        (["--slo", "ttft_p99"], "give a number of a run and its bound"),
        (["--slo", "ttft_p99=1", "ttft_p99=2"], "two bounds for one number"),
        (["--slo", "ttft_p99=1", "--rate", "3"], "with --slo the rate is looked for"),
        (["--slo", "ttft_p99=1", "--between", "5", "1"], "high must lie in"),
        (["--seeds", "0"], "seeds must be an integer of at least 1"),
        (["--jobs", "0"], "--jobs must be an integer of at least 1"),
        (["--out", "."], "is a directory"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused_before_it_runs(capsys, tmp_path, arguments, message):
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "sweep.csv")]
    code, said, err = run(capsys, *SLO, *arguments, *out)
    assert code == 2 and said == "" and message in err and err.count("\n") == 1


def test_reproduce_refuses_what_it_does_not_know(capsys):
    code, _, err = run(capsys, "reproduce", "gpt", "--quiet")
    assert code == 2 and "no study gpt: there are orca, vllm" in err


def test_calibrate_needs_a_model_that_computes(capsys, tmp_path):
    code, _, err = run(capsys, "calibrate", "--model", "toy", "--quiet")
    assert code == 2 and "takes no time of its own" in err
    code, _, err = run(capsys, "calibrate", "--out", str(tmp_path / "here.txt"))
    assert code == 2 and "has to end in .json" in err
