"""The block map at the end of an iteration: who has each physical unit, how full it is, and what just happened to it.

A report lists the units of each request, in token order; here the same is seen from the units' side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from minibatch.kv_cache import Holding
from minibatch.trace import StepReport, Trace


@dataclass(frozen=True, slots=True)
class Unit:
    """One physical block or slot; the three numbers are rows, the rest of them is free.

    ``owners``  who has it, in the order of admission; nobody: free, or ``idle``: it keeps a prefix that can be found
    ``mark``    what happened to it in this iteration: ``hit`` (found in the prefix cache), ``copied`` (copy-on-write),
                ``swapped`` (its content came back from the host), ``new`` (taken), or nothing

    (Blocks that are kept for answers still to fork are drawn as the end of their parent's: where in its table the
    reserved rows are, a trace does not say.)
    """

    owners: tuple[str, ...] = ()
    filled: int = 0
    reserved: int = 0
    fragmentation: int = 0
    mark: str = ""
    idle: bool = False


def unit_size(trace: Trace) -> int:
    """Rows of a block or slot, as far as a trace says: 0 if nobody ever held one."""
    held = (holding for step in trace.steps for holding in step.kv.holdings if holding.units)
    return next(((h.filled + h.reserved + h.fragmentation) // len(h.units) for h in held), 0)


def unit_name(trace: Trace) -> str:
    """``block`` or ``slot``, as the cache calls them in the header; ``unit`` if it does not say."""
    words = str(trace.meta.get("kv_cache", "")).split()  # such as PagedKVCache(14 blocks of 4)
    return words[1].removesuffix("s") if len(words) == 4 else "unit"


def holders(traces: Sequence[Trace]) -> list[str]:
    """Everybody who ever had a unit, in the order in which they first had one: that of their colours."""
    return list(dict.fromkeys(h.request_id for trace in traces for step in trace.steps for h in step.kv.holdings))


def units_of(step: StepReport, size: int, marks: Mapping[int, str] | None = None) -> tuple[Unit, ...]:
    """All of them, in physical order. ``size``: rows of a unit; ``marks``: those of :func:`marks_of`, if wanted."""
    units = [Unit()] * (step.kv.capacity // size)
    for number in step.kv.idle:
        units[number] = Unit(idle=True)
    for holding in sorted(step.kv.holdings, key=lambda holding: holding.filled == 0):  # what the living read is filled
        for place, number in enumerate(holding.units):
            unit = units[number]
            if unit.owners:  # its rows are those of the first
                units[number] = replace(unit, owners=(*unit.owners, holding.request_id))
            else:
                units[number] = _part(holding, place, size)
    for number, mark in (marks or {}).items():
        units[number] = replace(units[number], mark=mark)
    return tuple(units)


def _part(holding: Holding, place: int, size: int) -> Unit:
    """What a holding does with the unit at this place of its table: its rows are filled from the beginning."""
    begin = place * size
    filled = _within(holding.filled - begin, size)
    meant = _within(holding.filled + holding.reserved - begin, size)
    return Unit((holding.request_id,), filled, meant - filled, size - meant)


def _within(rows: int, size: int) -> int:
    return min(max(rows, 0), size)


def marks_of(step: StepReport, before: Mapping[str, Holding], size: int) -> dict[int, str]:
    """Unit -> mark; the later of two wins. ``before``: who had what after the last iteration."""
    now = {holding.request_id: holding for holding in step.kv.holdings}
    marks = dict.fromkeys(_new(now, before), "new")
    marks |= dict.fromkeys(_copied(step, now, before, size), "copied")
    for change in step.admitted:
        if change.request_id in now:
            units = now[change.request_id].units
            marks |= dict.fromkeys(units[: -(-change.swapped_in // size)], "swapped")
            marks |= dict.fromkeys(units[: -(-change.cached // size)], "hit")
    return marks


def _new(now: Mapping[str, Holding], before: Mapping[str, Holding]) -> Iterator[int]:
    """Units that their owner did not have, unless it only joined those who had it."""
    had = {name: set(holding.units) for name, holding in before.items()}
    held = set().union(*had.values())
    owners = Counter(number for holding in now.values() for number in holding.units)
    for name, holding in now.items():
        for number in holding.units:
            if number not in had.get(name, ()) and not (owners[number] > 1 and number in held):
                yield number


def _copied(step: StepReport, now: Mapping[str, Holding], before: Mapping[str, Holding], size: int) -> Iterator[int]:
    """Units that somebody writes into instead of the shared one that he had there: the report counts only the rows."""
    if not step.copied_rows:
        return
    parents = {fork.request_id: now[fork.parent] for fork in step.forked if fork.parent in now}
    for name, holding in now.items():
        if name in parents and holding.filled % size:  # at once: the parent's last block, partly filled
            last = holding.filled // size
            yield from _differing(parents[name].units[last : last + 1], holding.units[last : last + 1])
        elif name in before:
            yield from _differing(before[name].units, holding.units)


def _differing(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[int]:
    return (b for a, b in zip(old, new, strict=False) if a != b)
