"""``minibatch bench`` beside other engines: everybody does the same work, and the numbers are those of the runs."""

import json
import math
import os
import random
import subprocess
import sys
import time

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from minibatch import (
    Engine,
    Request,
    SamplingParams,
    StaticBatching,
    bench_engines,
    bench_engines_report,
    bench_floor,
    bench_worker,
)
from minibatch.bench import Busy
from minibatch.bench_engines import BASELINE, Work
from minibatch.bench_process import Worker, WorkerFailed
from minibatch.cli import main
from minibatch.cost_model import Counts
from minibatch.kv_cache import ContiguousKVCache
from minibatch.model_shapes import ModelShape
from minibatch.models.transformers_model import TransformersModel


class Letters:
    """A tokenizer: a token a letter."""

    chat_template = None

    def encode(self, text):
        return [ord(letter) % VOCAB for letter in text]


# ---------------------------------------------------------------------------------------------------------- the work


def test_the_mixed_work_is_the_one_that_is_compared_everywhere():
    work = bench_engines.make_work("mixed", Letters())
    rng = random.Random(0)
    assert work.lengths == [rng.choice([8, 16, 32, 64, 128]) for _ in range(32)]
    assert work.num_tokens == 1736 and len(work.prompts) == 32
    assert work.longest == max(len(p) + n for p, n in zip(work.prompts, work.lengths, strict=True))
    assert work.kv_tokens == 64 * 256


def test_the_others_are_a_rectangle_and_long_prompts():
    assert bench_engines.make_work("static", Letters()).lengths == [64] * 32
    long = bench_engines.make_work("long", Letters())
    assert [len(prompt) for prompt in long.prompts] == [1500] * 16 and len(set(map(tuple, long.prompts))) == 16
    first = {tuple(prompt[:16]) for prompt in long.prompts}
    assert len(first) == 16, "a prefix that is shared would be computed once by who caches prefixes"
    assert long.kv_tokens == 16 * 6 * 256  # 1,532 tokens in pages of 256
    assert len(bench_engines.make_work("static", Letters(), requests=3).prompts) == 3


# ---------------------------------------------------------------------------------------------------------- numbers


def answer(seconds, tokens, cpu=1.0, **more):
    return {"seconds": seconds, "answers": tokens, "cpu": cpu, "peak_memory": 10, "others": 0.5, "stolen": 0.0, **more}


def test_rates_and_ratios_are_taken_within_a_round():
    """Fault: a ratio of two medians, which may be of a fast and of a slow minute."""
    work = Work("mixed", "two", [[1], [2]], [1, 3], 256)
    same, other = [[7], [8, 9, 9]], [[7], [8, 9, 1]]
    rounds = {BASELINE: [answer(4.0, same), answer(8.0, same)], "ours": [answer(2.0, other), answer(2.0, other)]}
    baseline, ours = bench_engines._outcomes(work, rounds)
    assert baseline.rates == (1.0, 0.5) and baseline.ratios == (1.0, 1.0) and baseline.same == 2
    assert ours.rates == (2.0, 2.0) and ours.ratios == (2.0, 4.0) and ours.same == 1
    assert (ours.others, ours.peak_memory, ours.phases, ours.kinds) == (0.5, 10, {}, ())


def test_shares_add_up_and_iterations_are_sorted_by_what_they_do():
    phases = {"plan": 0.1, "forward": 0.8, "sample": 0.05}
    iterations = [
        (False, 4, 8e9, 4e9, 2.0),
        (True, 8, 2e9, 1e9, 0.5),
        (True, 3, 2e9, 1e9, 1.0),
        (True, 9, 3e9, 6e9, 1.0),
    ]
    shares = bench_engines._shares({"phases": phases, "total": 1.0})
    assert shares["rest"] == pytest.approx(0.05) and sum(shares.values()) == pytest.approx(1)
    prompts, eight, sixteen = bench_engines._kinds(iterations)
    assert (prompts.what, prompts.number, prompts.gb_per_s, prompts.gflop_per_s) == ("with prompts", 1, 4.0, 2.0)
    assert (eight.what, eight.number, eight.ms, eight.gb_per_s) == ("decode, up to 8 rows", 2, 750.0, 3.0)
    assert (sixteen.what, sixteen.gflop_per_s) == ("decode, up to 16 rows", 6.0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"others": 0.6}, "other processes had up to 0.6 cores"),
        ({"stolen": 0.3}, "the hypervisor gave up to 0.3 cores"),
        ({"rates": (1.0,)}, "ONE ROUND"),
        ({"rates": (1.0, 1.3)}, "took up to 1.30 times as long in another round"),
        ({"others": math.nan, "stolen": math.nan}, None),
    ],
)
def test_a_machine_that_is_not_quiet_is_said_to_be_one(changed, words):
    facts = {"rates": (1.0, 1.1), "ratios": (1.0, 1.0), "peak_memory": 1, "same": 1, "others": 0.0, "stolen": 0.0}
    outcome = bench_engines.Outcome(work="mixed", engine=BASELINE, **(facts | changed))
    found = bench_engines.Engines("m", "float32", "cpu", 2, {}, (("mixed", "x"),), {"mixed": 1}, True, (outcome,))
    said = bench_engines_report.describe(found)
    assert words in said if words else "QUIET" not in said and "ROUND" not in said


def test_the_table_says_who_did_what_and_where_our_time_went():
    shares = {"plan": 0.01, "forward": 0.97, "rest": 0.02}
    kinds = (bench_engines.Kind("decode, up to 8 rows", 64, 27.8, 10.5, 70.0),)
    common = {"work": "mixed", "peak_memory": 1.2e9, "same": 3, "others": 0.0, "stolen": 0.0}
    theirs = bench_engines.Outcome(engine=BASELINE, rates=(100.0, 101.0), ratios=(1.0, 1.0), **common)
    ours = bench_engines.Outcome(
        engine="ours", rates=(200.0, 204.0), ratios=(2.0, 2.02), phases=shares, kinds=kinds, **common
    )
    found = bench_engines.Engines("m", "bfloat16", "cpu", 1, {}, (("mixed", "x"),), {"mixed": 4}, False, (theirs, ours))
    said = bench_engines_report.describe(found)
    rows = [line.split() for line in said.splitlines()]
    assert ["ours", "202", "(200-204)", "2.01", "(2.00-2.02)", "1.20", "GB", "3", "of", "4"] in rows
    assert ["mixed:", "ours", "1.0", "%", "97.0", "%", "2.0", "%"] in rows
    assert ["mixed:", "ours", "decode,", "up", "to", "8", "rows", "64", "27.8", "10.5", "70"] in rows
    assert "1 thread;" in said and "FAST PATH WAS NOT USED" in said


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux counts the time of all processes")
def test_what_others_compute_is_told_from_what_we_compute():
    burn = "import time\nend = time.time() + 0.6\nwhile time.time() < end: pass"
    with Busy() as busy:
        other = subprocess.Popen([sys.executable, "-c", burn])
        own = time.process_time()
        while other.poll() is None:
            sum(range(1000))
        own = time.process_time() - own
    assert busy.others(own) > 0.2 and busy.others(own + 1000) == 0


# ---------------------------------------------------------------------------------------------------------- the worker


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", dtype=torch.float32).save_pretrained(path)
    return str(path)


WORK = Work("mixed", "three", [[1, 2, 3, 4], [5], [6, 7]], [3, 9, 5], 256)


def alone(path):
    model = TransformersModel(path)
    return [model.generate(p, n)[0] for p, n in zip(WORK.prompts, WORK.lengths, strict=True)]


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize("name", ["generate", "continuous batching", "minibatch"])
def test_every_engine_gives_the_tokens_of_solo_generation(name, tiny, one_thread):
    """Faults: padding that is attended to, a length that is another request's, an end of sequence that is obeyed."""
    engine = bench_worker.ENGINES[name](tiny, "float32", "cpu")
    assert engine.run(WORK.prompts, WORK.lengths, WORK.kv_tokens) == alone(tiny)


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_the_parts_of_an_iteration_are_timed_and_its_work_is_counted(tiny, one_thread):
    engine = bench_worker.Minibatch(tiny, "float32", "cpu", configuration="static")
    for _ in range(2):  # nothing is left over from the first job
        started = time.perf_counter()
        engine.run(WORK.prompts, WORK.lengths, WORK.kv_tokens)
        facts, passed = engine.facts(), time.perf_counter() - started
    assert set(facts["phases"]) == {"plan", "reserve", "pack", "forward", "sample", "commit"}
    assert all(seconds > 0 for seconds in facts["phases"].values())
    assert sum(facts["phases"].values()) <= facts["total"] <= passed
    assert len(facts["iterations"]) == max(WORK.lengths)
    decode, rows, moved, computed, _ = facts["iterations"][-1]  # one of three is alive, with prompt 1 and 8 generated
    shape = ModelShape.from_config(engine.model.model.config)
    weights = shape.num_layers * shape.layer_parameters + shape.head_parameters
    a_token = shape.kv_bytes_per_token(4)
    assert (decode, rows) == (True, 3) and moved == 4 * weights + (9 + 1) * a_token
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * 9
    assert computed == 2 * weights * 3 + attention
    assert facts["iterations"][0][0] is False


def test_work_is_counted_as_the_cost_model_counts_it(one_thread):
    """What an iteration moves and computes is taken from ``Counts``; here a batch of two, by hand."""
    executor = TransformersModel(tiny_model("llama"))
    engine = Engine(executor, StaticBatching(2), ContiguousKVCache(2, 16))
    engine.run([Request([1, 2, 3], SamplingParams(max_tokens=2)), Request([4], SamplingParams(max_tokens=2))])
    first, second = (Counts.of_step(step) for step in engine.trace.steps)
    assert (first.tokens, first.logits, first.kv_read, first.kv_written) == (6, 2, 4, 4)
    assert (second.tokens, second.logits, second.kv_read, second.kv_written, second.attended) == (2, 2, 6, 2, 6)


# ---------------------------------------------------------------------------------------------------------- processes


def start(python):
    contender = bench_engines.vllm(python, [WORK])
    return Worker(contender.name, contender.setup, contender.python, {})


def test_an_engine_that_cannot_be_started_says_so_and_why(tmp_path):
    """Faults: a process that hangs, or an error without the words of the engine."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named vllm' >&2\nexit 7\n")
    broken.chmod(0o755)
    with pytest.raises(WorkerFailed, match="vllm ended with exit code 7:\nNo module named vllm"):
        start(broken)
    with pytest.raises(WorkerFailed, match=r"vllm cannot be started: .*nowhere"):
        start(tmp_path / "nowhere")


def test_a_program_that_is_no_engine_is_named(tmp_path):
    """Fault: what it printed is taken for an answer."""
    with pytest.raises(WorkerFailed, match="vllm does not answer as it should: '-I"):
        start("/bin/echo")
    with pytest.raises(WorkerFailed, match="vllm ended with exit code 0:\nit said nothing"):
        start("/bin/true")


@pytest.mark.parametrize("part", ["--engines", "--floor"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--model", "toy"], "toy computes nothing"), (["--device", "moon"], "device 'moon' cannot")],
)
def test_what_cannot_run_is_refused_before_anything_starts(part, arguments, words, capsys):
    assert main(["bench", part, *arguments, "--quiet"]) == 2
    assert words in capsys.readouterr().err


def test_an_engine_that_dies_in_the_middle_is_named(tmp_path):
    """Fault: while it is closed a broken pipe hides what has happened."""
    quick = tmp_path / "python"
    quick.write_text("#!/bin/sh\nread line\necho '{}'\n")  # it answers once
    quick.chmod(0o755)
    worker = start(quick)
    worker._process.wait()
    with pytest.raises(WorkerFailed, match="vllm ended with exit code 0"):
        worker.ask({"prompts": []})  # so short that it stays in the buffer
    worker.close()


def test_an_engine_that_gives_another_number_of_tokens_is_not_compared():
    """Fault: an engine that ends early looks fast."""

    class Short:
        name = "short"

        def ask(self, question):
            return {"answers": [[1]] * len(question["prompts"]), "cpu": 0.0}

    with pytest.raises(WorkerFailed, match=r"short gave \[1, 1, 1\] tokens, asked for were \[3, 9, 5\]"):
        bench_engines._measure(Short(), WORK)


@pytest.mark.slow
def test_the_command_measures_all_engines(tmp_path, capsys):
    """As it is used: processes, rounds, a table, JSON. The tiny model has no tokenizer of its own, so it gets one."""
    from transformers import PreTrainedTokenizerFast

    tokenizers = pytest.importorskip("tokenizers")
    tiny_model("llama", dtype=torch.float32, max_position_embeddings=2048).save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "the": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--rounds", "2", "--requests", "3", "--threads", "1", "--quiet"]
    capsys.readouterr()
    assert main(["bench", *arguments, "--works", "mixed", "long", "mixed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["engines"]
    assert found["threads"] == 1 and found["environment"]["OMP_NUM_THREADS"] == "1"
    names = [contender.name for contender in bench_engines.CONTENDERS]
    assert [o["engine"] for o in found["outcomes"] if o["work"] == "mixed"] == names
    assert [o["engine"] for o in found["outcomes"] if o["work"] == "long"] == [n for n in names if "static" not in n]
    assert found["fast"]
    assert all(len(o["rates"]) == len(o["ratios"]) == 2 and o["peak_memory"] > 1e7 for o in found["outcomes"])
    assert all(o["same"] == 3 for o in found["outcomes"])
    assert main(["bench", *arguments, "--works", "static", "--against", "vllm", "--vllm-python", "/bin/false"]) == 3
    assert "vllm ended with exit code 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--requests", "--threads"])
def test_numbers_that_make_no_sense_are_refused_before_anything_starts(option, capsys):
    assert main(["bench", option, "0", "--quiet"]) == 2
    assert f"{option} must be an integer of at least 1, got 0" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- the floor


def build(dtype):
    return tiny_model("llama", dtype=getattr(torch, dtype), max_position_embeddings=2048)


SMALL = bench_floor.Sizes(batches=(1, 3), context=20, requests=3, rounds=1, copied=2**20)


@pytest.mark.filterwarnings("ignore:.*tokenizer")
def test_the_floor_is_bytes_over_bandwidth(one_thread):
    floor = bench_floor.run("tiny", build, "cpu", "float32", SMALL, progress=False)
    assert floor.holds and set(floor.verdicts) == {"float32"} and floor.verdicts["float32"].startswith("8 of 8")
    shape = ModelShape.from_config(build("float32").config)
    assert floor.weight_bytes == 4 * (shape.num_layers * shape.layer_parameters + shape.head_parameters)
    a_token = shape.kv_bytes_per_token(4)
    for iteration in floor.iterations:
        moved = floor.weight_bytes + iteration.batch * (20 + bench_floor.DECODES / 2) * a_token
        assert iteration.floor == pytest.approx(1e3 * moved / floor.bandwidth)
        assert iteration.measured > iteration.floor and iteration.graphs is None
    assert len(floor.ours) == len(floor.theirs) == 1
    said = bench_floor.describe([floor])
    assert "8 of 8 equal" in said and "x floor" in said and "ratio" in said


def test_a_model_that_gives_other_tokens_is_found_out(one_thread):
    """Fault: an executor that is fast and wrong."""
    executor = TransformersModel(build("float32"), fast=True)
    good = executor.fused
    executor.fused = lambda step: good(step).flip(-1)
    assert not bench_floor.check(executor).holds


@pytest.mark.parametrize("name", bench_floor.SHAPES)
def test_the_shapes_are_those_of_the_models_they_are_named_after(name):
    """Their numbers of parameters, 1.24 and 8.19 thousand million, are in their model cards."""
    import transformers

    kind, fields = bench_floor.SHAPES[name]
    shape = ModelShape.from_config(getattr(transformers, kind)(**fields))
    assert shape.num_parameters == pytest.approx({"llama-3.2-1b": 1.2358e9, "qwen3-8b": 8.1907e9}[name], rel=1e-3)
