"""Policies: the decisions that are layered on continuous batching, each in a small object that can be replaced alone.

    queueing.py     who is next                  the engine's queue:  Engine(..., order=Fair())
    admission.py    does it fit                  a scheduler's part:  ContinuousBatching(admission=ReserveMaximum())
    preemption.py   who is displaced, and how    a scheduler's part:  ContinuousBatching(preemption=Swap())
    predictors.py   how long an answer will be   a part of the others

On the command line a policy has a short name from the tables below, or the dotted name of anything that makes one when
it is called without arguments (``--order mymodule:MyOrder``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from minibatch.policies.admission import AdmissionPolicy, Forecast, Optimistic, ReserveMaximum, Watermark
from minibatch.policies.predictors import Noisy, Oracle, like_its_prompt, upper_bound
from minibatch.policies.preemption import (
    ByTokensLeft,
    Never,
    PreemptionPolicy,
    Recompute,
    Swap,
    by_priority,
    least_progress_lost,
    lowest_priority,
    most_blocks,
    newest,
)
from minibatch.policies.queueing import FCFS, Fair, LongestPrefix, Order, Priority, RoundRobin, ShortestFirst

__all__ = [
    "ADMISSIONS",
    "FCFS",
    "ORDERS",
    "PREEMPTIONS",
    "AdmissionPolicy",
    "ByTokensLeft",
    "Fair",
    "Forecast",
    "LongestPrefix",
    "Never",
    "Noisy",
    "Optimistic",
    "Oracle",
    "Order",
    "PreemptionPolicy",
    "Priority",
    "Recompute",
    "ReserveMaximum",
    "RoundRobin",
    "ShortestFirst",
    "Swap",
    "Watermark",
    "by_priority",
    "least_progress_lost",
    "like_its_prompt",
    "lowest_priority",
    "make",
    "most_blocks",
    "newest",
    "upper_bound",
]

ORDERS: dict[str, Callable[[], Any]] = {
    "fcfs": FCFS,
    "skip": lambda: FCFS(lookahead=16),
    "priority": Priority,
    "shortest": ShortestFirst,
    "prefix": LongestPrefix,
    "round-robin": RoundRobin,
    "fair": Fair,
}
ADMISSIONS: dict[str, Callable[[], Any]] = {
    "watermark": Watermark,
    "reserve": ReserveMaximum,
    "forecast": Forecast,
    "optimistic": Optimistic,
}
PREEMPTIONS: dict[str, Callable[[], Any]] = {
    "recompute": Recompute,
    "swap": Swap,
    "never": Never,
    "priority": lambda: Recompute(victim=lowest_priority, displaces=by_priority),
    "most-blocks": lambda: Recompute(victim=most_blocks),
    "least-progress": lambda: Recompute(victim=least_progress_lost),
}


def make(name: str, table: Mapping[str, Callable[[], Any]], methods: tuple[str, ...]) -> Any:
    """A new policy by its name in ``table`` or its dotted name, ``module:attribute``; modules may lie in the directory
    from which the command is run.

    Raises ValueError if there is none, or if what is there lacks one of ``methods``.
    """
    if name in table:
        return table[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"no policy {name!r}: there are {', '.join(table)}, or a dotted name such as mymodule:MyOrder")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"no policy {name!r}: {error}") from error
    finally:
        sys.path.remove(here)
    if not callable(factory):
        raise ValueError(f"{name} is {factory!r}: give a class, or a function that makes the policy")
    policy = factory()
    if missing := [method for method in methods if not callable(getattr(policy, method, None))]:
        raise ValueError(f"{name} makes {policy!r}, which has no {', '.join(missing)}")
    return policy
