"""Many independent runs: on all cores, or wherever joblib's backend of the moment puts them.

On a cluster, let joblib use it (``with joblib.parallel_config("dask"):``); nothing here changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from joblib import Parallel, delayed
from tqdm.auto import tqdm


def run_all(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], jobs: int | None = None, progress: bool = True
) -> list[Any]:
    """``function(*call)`` for each call, in their order.

    ``jobs``  processes; None: as many as there are cores, or what a ``joblib.parallel_config`` around this says
    """
    calls = list(calls)
    with tqdm(total=len(calls), unit="run", disable=not progress) as bar:
        # (None, where a parallel_config says something, is its number.)
        parallel = Parallel(n_jobs=jobs, return_as="generator") if jobs is not None else _everywhere()
        results = []
        for result in parallel(delayed(function)(*call) for call in calls):
            results.append(result)
            bar.update()
    return results


def _everywhere() -> Parallel:
    parallel = Parallel(return_as="generator")
    return parallel if parallel.n_jobs != 1 else Parallel(n_jobs=-1, return_as="generator")
