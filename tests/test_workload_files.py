"""Readers of public traces: small files of the same form, and the real ones where they are.

The real files are no part of the repository: they are looked for in the directory that MINIBATCH_DATA names, or in
``shared/data`` beside the repository.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from minibatch import ContinuousBatching, Engine, PrefixCachedKVCache
from minibatch.arrival_processes import Poisson
from minibatch.models.simulated_model import SimulatedModel
from minibatch.open_loop import from_lengths
from minibatch.workload_files import read_azure, read_lengths, read_mooncake
from minibatch.workloads import Workload

DATA = Path(os.environ.get("MINIBATCH_DATA", Path(__file__).parents[2] / "shared" / "data"))


def real(*names):
    """Those files that are there."""
    return [DATA / name for name in names if (DATA / name).is_file()]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,374,44
2023-11-17 00:00:00.0000001,396,109
2023-11-17 00:00:01.9799600,1,1
"""


def write(tmp_path, text):
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows_of(workload):
    return [(r.arrival_time, len(r.prompt), r.output_length) for r in workload.requests]


def lines(*rows):
    return "".join(
        json.dumps(dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), row, strict=True))) + "\n"
        for row in rows
    )


# ---------------------------------------------------------------- Azure


@pytest.mark.parametrize("ends", [AZURE, AZURE[:-1], AZURE.replace("\n", "\r\n"), "\ufeff" + AZURE, AZURE + "\n"])
def test_azure_rows_become_requests(tmp_path, ends):
    """Seven digits of a second, over midnight. Fault: digits read as microseconds, times as floats of 1970."""
    workload = read_azure(write(tmp_path, ends))
    assert rows_of(workload) == [(0.0, 374, 44), (0.0200401, 396, 109), (2.0, 1, 1)]
    assert [r.params.max_tokens for r in workload.requests] == [44, 109, 1]
    assert workload.description == "trace: 3 requests"


def test_rows_may_be_out_of_order_and_limited(tmp_path):
    first, *rows = AZURE.splitlines()
    workload = read_azure(write(tmp_path, "\n".join([first, *rows[::-1]])), max_tokens=50)
    assert rows_of(workload) == [(0.0, 374, 44), (0.0200401, 396, 50), (2.0, 1, 1)]
    assert {r.params.max_tokens for r in workload.requests} == {50}


def test_rows_without_tokens_are_left_out_and_counted(tmp_path):
    """Fault: a request of no tokens that an engine refuses, or one that silently disappears."""
    text = AZURE + "2023-11-17 00:00:03,0,9\n2023-11-17 00:00:04.5,9,0\n"
    workload = read_azure(write(tmp_path, text))
    assert len(workload) == 3
    assert workload.description == "trace: 3 requests, without 2 rows of no prompt or no output"
    text = "num_prefill_tokens,num_decode_tokens\n3,4\n0,1\n1,0\n"
    assert read_lengths(write(tmp_path, text)).tolist() == [[3, 4]]
    assert len(read_mooncake(write(tmp_path, lines((0, 0, 5, []), (5, 5, 0, [1]), (7, 5, 5, [1]))))) == 1


@pytest.mark.parametrize(
    "read, good, bad, what",
    [
        (read_azure, AZURE, "2023-11-17 00:00:03.5,8", "2 values for 3 columns"),
        (read_azure, AZURE, "2023-11-17 00:00:03.5,8,1,2", "4 values for 3 columns"),
        (read_azure, AZURE, "17.11.2023 00:00:03,8,1", "'17.11.2023 00:00:03' is not a time"),
        (read_azure, AZURE, "2023-13-17 00:00:03,8,1", "month"),
        (read_azure, AZURE, "2023-11-17 00:00:03,-8,1", "'-8' is not a number of tokens"),
        (read_azure, AZURE, "2023-11-17 00:00:03,8.5,1", "'8.5' is not a number of tokens"),
        (read_azure, AZURE, "2023-11-17 00:00:03,,1", "'' is not a number of tokens"),
        (read_lengths, "a,num_prefill_tokens,num_decode_tokens\nx,1,2\nx,3,4\nx,5,6\n", "x,7,y", "'y' is not a number"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), '{"timestamp": 0', "delimiter"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), "[0, 5, 5]", "not an object"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), '{"timestamp": 0}', "'input_length' is missing"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), lines((0, 513, 5, [1])), "513 tokens are 2 blocks, and it has 1"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), lines((0, 5, 5, [-1])), "-1 is not a whole number"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), lines((0, 5, 5.0, [1])), "5.0 is not a whole number"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), lines((0, 5, 5, 1)), "iterable"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), lines((-1, 5, 5, [1])), "timestamp is -1"),
        (read_mooncake, lines(*[(0, 5, 5, [1])] * 4), lines((float("nan"), 5, 5, [1])), "timestamp is nan"),
    ],
)
def test_a_line_of_another_form_is_named_and_shown(tmp_path, read, good, bad, what):
    """Fault: a row skipped silently, or a message that leaves one looking for it."""
    path = write(tmp_path, good + bad)
    with pytest.raises(ValueError, match=what) as caught:
        read(path)
    assert f"{path}:5: " in str(caught.value) and repr(bad.strip()) in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "a,b\n1,2\n", AZURE.replace("ContextTokens", "Context")])
def test_a_table_without_its_columns_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="trace:1 should name the columns TIMESTAMP, ContextTokens, GeneratedTokens"):
        read_azure(write(tmp_path, text))


def test_what_is_no_text_is_named_too(tmp_path):
    path = write(tmp_path, AZURE.encode() + b"2023-11-17 00:00:03,\xff\xfe,1\n")
    with pytest.raises(ValueError, match=r"trace:5: .* is not a number of tokens"):
        read_azure(path)


def test_a_table_without_rows_is_an_empty_workload(tmp_path):
    assert len(read_azure(write(tmp_path, AZURE.splitlines()[0]))) == 0
    assert read_lengths(write(tmp_path, "num_prefill_tokens,num_decode_tokens\n")).shape == (0, 2)


# ---------------------------------------------------------------- Mooncake


def prefix_hits(workload, block_size, num_blocks=4000):
    """Tokens of each prompt that a prefix cache had, when nothing is ever evicted and nobody overlaps."""
    engine = Engine(
        SimulatedModel(lambda plan: 1e-9), ContinuousBatching(4, 10**6), PrefixCachedKVCache(num_blocks, block_size)
    )
    results = engine.run(workload.requests)
    assert all(result.error is None for result in results)
    return [result.timeline.num_cached for result in results]


def leading(some, others):
    """How many leading ids are equal."""
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


def test_equal_hash_ids_are_equal_blocks(tmp_path):
    """Fault: contents by position instead of by id, blocks of another size, times in seconds."""
    rows = [
        (0, 1100, 5, [0, 1, 2]),
        (250, 1500, 5, [0, 1, 3]),
        (1500, 700, 5, [0, 9]),
        (2000, 512, 5, [4]),
    ]
    workload = read_mooncake(write(tmp_path, lines(*rows)))
    assert [(t, p, o) for t, p, o, _ in rows] == [(t * 1000, p, o) for t, p, o in rows_of(workload)]
    prompts = [list(r.prompt) for r in workload.requests]
    assert prompts[0][:1024] == prompts[1][:1024] and not set(prompts[0][1024:]) & set(prompts[1][1024:])
    assert prompts[2][:512] == prompts[0][:512] and not set(prompts[2][512:]) & set(prompts[0])
    assert not set(prompts[3]) & {token for prompt in prompts[:3] for token in prompt}
    assert prefix_hits(workload, 512) == [0, 1024, 512, 0]


def test_an_answer_is_nobody_elses_content(tmp_path):
    """Where a block is cut the answer goes on; it may not turn into the rest of the block, nor into another's answer.

    Fault: an answer that counts on from shared content, so that its blocks are found by who never saw it.
    """
    rows = [
        (0, 612, 900, [0, 1]),  # its answer counts over the rest of block 1 and over block 2
        (9000, 1536, 5, [0, 1, 2]),  # shares 512 + 99: the last token of the first was its own
        (20000, 612, 900, [0, 1]),  # the same prompt: all of it but the last token, in full blocks
        (30000, 1562, 5, [0, 1, 2, 3]),  # all of the second but the last token
        (40000, 1024, 700, [0, 4]),  # a full last block, and
        (50000, 1536, 5, [0, 4, 5]),  # who continues it
    ]
    workload = read_mooncake(write(tmp_path, lines(*rows)))
    answers = [set(range(r.prompt[-1], r.prompt[-1] + r.output_length + 1)) for r in workload.requests]
    prompts = [set(r.prompt) for r in workload.requests]
    for i, answer in enumerate(answers):
        assert not any(answer & (answers[j] | prompts[j]) for j in range(len(rows)) if j != i)
    assert prefix_hits(workload, 4) == [0, 608, 608, 1532, 512, 1020]


def test_one_token_of_a_last_block_is_its_own(tmp_path):
    (request,) = read_mooncake(write(tmp_path, lines((3, 513, 2, [6, 7])))).requests
    assert len(request.prompt) == 513 and request.prompt[511] + 1 != request.prompt[512]
    (request,) = read_mooncake(write(tmp_path, lines((3, 1, 2, [6])))).requests
    assert len(request.prompt) == 1


# ---------------------------------------------------------------- the real files

if DATA.is_dir():  # else there is nothing to collect

    @pytest.mark.parametrize("path", real("azure_llm_2023_conv.csv", "azure_llm_2023_code.csv"), ids=lambda p: p.name)
    def test_the_azure_traces(path):
        """An hour each; the number of rows and of tokens, the latter from the columns themselves."""
        workload = read_azure(path)
        rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
        assert len(workload) == {"azure_llm_2023_conv.csv": 19_366, "azure_llm_2023_code.csv": 8_819}[path.name]
        assert [(str(p), str(o)) for _, p, o in rows_of(workload)] == [(p, o) for _, p, o in rows]
        total = sum(r.output_length for r in workload.requests)
        assert round(total / 1e5) == {"azure_llm_2023_conv.csv": 41, "azure_llm_2023_code.csv": 2}[path.name]
        assert 3400 < workload.duration < 3600

    @pytest.mark.parametrize("path", real("sharegpt_8k_lengths.csv"), ids=lambda p: p.name)
    def test_the_sharegpt_lengths(path):
        """Sarathi-Serve's table: medians 1730 and 415, 90th percentiles 5696 and 834."""
        pairs = read_lengths(path)
        assert pairs.shape == (30_731, 2)
        assert np.percentile(pairs, [50, 90], axis=0).tolist() == [[1730, 415], [5696, 834]]
        summary = from_lengths(pairs, Poisson(1.0)).summary()
        assert (summary["prompt_median"], summary["output_p90"]) == (1730, 834)

    @pytest.mark.parametrize(
        "path", real("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"), ids=lambda p: p.name
    )
    def test_the_mooncake_traces(path, tmp_path):
        """Number of requests, share of blocks that repeat, and for the first hundreds the hits, from the ids alone."""
        workload = read_mooncake(path)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        expected = {"mooncake_conversation.jsonl": (12_031, 0.366), "mooncake_synthetic.jsonl": (3_993, 0.640)}[
            path.name
        ]
        blocks = [h for row in rows for h in row["hash_ids"]]
        assert (len(workload), round(1 - len(set(blocks)) / len(blocks), 3)) == expected
        assert [len(r.prompt) for r in workload.requests] == [row["input_length"] for row in rows]
        first_tokens = [r.prompt[512 * i] for r in workload.requests for i in range((len(r.prompt) - 1) // 512)]
        first_ids = [h for row in rows for h in row["hash_ids"][: (row["input_length"] - 1) // 512]]
        assert len(set(zip(first_tokens, first_ids, strict=True))) == len(set(first_tokens)) == len(set(first_ids))
        for request, row in list(zip(workload.requests, rows, strict=True))[:200]:
            assert len(set(request.prompt[::512])) == len(row["hash_ids"])
        for (one, first), (two, second) in pairwise(list(zip(workload.requests, rows, strict=True))[:300]):
            same = leading(first["hash_ids"], second["hash_ids"])
            shorter = min(len(one.prompt), len(two.prompt))
            length = min(512 * same, shorter - (same == -(-shorter // 512)))
            assert one.prompt[:length] == two.prompt[:length] and one.prompt[length] != two.prompt[length]
        workload.head(500).save(tmp_path / "w.jsonl")
        assert Workload.load(tmp_path / "w.jsonl") == workload.head(500)
