"""Independent runs: in order, on all cores, with errors that come through, and on a cluster."""

import os
import time

import joblib
import pytest

from minibatch.parallel import run_all
from minibatch.scenario import Scenario
from minibatch.sweep import grid, sweep

SMALL = Scenario(num_requests=8, prompts="fixed:50", outputs="fixed:10")


def slow_square(number):
    time.sleep(0.02 * (number % 3))
    return number**2, os.getpid()


def broken(number):
    raise ValueError(f"number {number}")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2, None])
def test_results_come_in_the_order_of_the_calls(jobs):
    """Fault: results in the order in which they finish."""
    results = run_all(slow_square, [(number,) for number in range(8)], jobs, progress=False)
    assert [square for square, _ in results] == [number**2 for number in range(8)]


def test_two_jobs_are_two_processes():
    """Fault: threads, which would wait for each other; or everything in this process."""
    results = run_all(slow_square, [(number,) for number in range(8)], 2, progress=False)
    assert os.getpid() not in {process for _, process in results}


def test_no_calls_give_no_results():
    assert run_all(slow_square, [], progress=False) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_a_run_comes_through(jobs):
    with pytest.raises(ValueError, match="number 3"):
        run_all(broken, [(3,)], jobs, progress=False)


def test_a_parallel_config_around_it_decides():
    """Fault: our own choice of processes wins over the user's."""
    with joblib.parallel_config("threading", n_jobs=2):
        results = run_all(slow_square, [(number,) for number in range(4)], progress=False)
    assert {process for _, process in results} == {os.getpid()}


@pytest.mark.slow
def test_a_sweep_on_a_dask_cluster_is_the_sweep_on_this_machine():
    """The recipe of README, on a local cluster."""
    from dask.distributed import Client, LocalCluster

    scenarios = grid(SMALL, scheduler=["paged", "chunked"])
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
        joblib.parallel_config("dask"),
    ):
        on_cluster = sweep(scenarios, seeds=2, progress=False)
    assert on_cluster.equals(sweep(scenarios, seeds=2, jobs=1, progress=False))
