"""Who has which place in the batch, and who is in the queue: followed from report to report.

A report says who took part and what changed; where somebody sits, and who is still waiting, follows from those before.
"""

from __future__ import annotations

from collections.abc import Iterable

from minibatch.trace import StepReport


def seat(places: dict[str, int], here: Iterable[str]) -> dict[str, int]:
    """Request -> its place. Who was there keeps it, who comes takes the lowest that is free, who has gone has none."""
    here = list(dict.fromkeys(here))
    now = {name: places[name] for name in here if name in places}
    for name in here:
        if name not in now:
            now[name] = next(place for place in range(len(here)) if place not in now.values())
    return now


def follow_queue(absent: dict[str, str], step: StepReport) -> None:
    """``absent``: who is in the queue, ``waiting``, ``preempted`` (its K/V is lost) or ``swapped``."""
    absent.update(dict.fromkeys(step.arrived, "waiting"))
    absent.update((change.request_id, "swapped" if change.swapped else "preempted") for change in step.preempted)
    ran = (row.request_id for row in (*step.members, *step.padding))
    for name in (*(change.request_id for change in step.admitted), *ran, *(name for name, _ in step.finished)):
        absent.pop(name, None)
