"""Fixtures of several test files."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models: a second thread has nothing to do, and spins while it waits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
