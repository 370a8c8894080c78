"""The workload of the main job is a function of its seed, and what it says it is."""

from __future__ import annotations

import pytest

from minibatch import workload
from minibatch.compare import Setup
from minibatch.models.toy_model import ByteTokenizer


def build(kind="mixed", number=24, seed=0):
    return workload.build(ByteTokenizer(), workload.pick(workload.read_prompts(kind), number, seed), 8)


def test_equal_seeds_give_equal_workloads():
    assert build(seed=3) == build(seed=3) != build(seed=4)
    assert workload.poisson(build(), 2.0, 5) == workload.poisson(build(), 2.0, 5) != workload.poisson(build(), 2.0, 6)


def test_mixed_is_one_long_prompt_to_two_short_ones():
    lengths = [len(request.prompt) for request in build()]
    assert sum(length > 1000 for length in lengths) == 8 and sum(length < 300 for length in lengths) == 16


def test_arrivals_start_at_0_and_have_the_rate():
    times = [request.arrival_time for request in workload.poisson(build(number=2000), 4.0, 0)]
    assert times[0] == 0 and times == sorted(times)
    assert 2000 / 4 * 0.9 < times[-1] < 2000 / 4 * 1.1


def test_clients_and_priorities_are_assigned():
    """Fault: all requests of one client, as long as nobody asks (then ``--order fair`` shows nothing)."""
    many = workload.assign(build(number=2000), clients=3, priorities=2, seed=1)
    counts = [sum(request.client == client for request in many) for client in ("c0", "c1", "c2")]
    assert sum(counts) == 2000 and 0.4 < counts[1] / counts[0] < 0.6 and 0.4 < counts[2] / counts[1] < 0.6
    assert 0.45 < sum(request.priority for request in many) / 2000 < 0.55
    assert many == workload.assign(build(number=2000), 3, 2, 1) != workload.assign(build(number=2000), 3, 2, 2)
    assert workload.assign(build(), 1, 1, 0) == build()


def test_prompts_can_come_from_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two  \n")
    assert workload.read_prompts(str(file)) == ["one", "two"]
    file.write_text("\n \n")
    with pytest.raises(ValueError, match="no prompt"):
        workload.read_prompts(str(file))


@pytest.mark.parametrize("slot_size", [16, 48, 640])
def test_the_four_configurations_have_the_same_memory(slot_size):
    parts = Setup(block_size=16).configurations(4 * slot_size, slot_size)
    assert {kv.num_rows for _, kv in parts.values()} == {4 * slot_size}
