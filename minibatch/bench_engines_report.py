"""What ``minibatch bench`` prints of engines side by side: nothing is measured here."""

from __future__ import annotations

import statistics

from minibatch.bench import table
from minibatch.bench_engines import Engines, Outcome
from minibatch.trace import counted


def describe(found: Engines) -> str:
    settings = " ".join(f"{name}={value}" for name, value in found.environment.items())
    lines = [
        f"engines     {found.model}, {found.dtype}, {found.device}, {counted(found.threads, 'thread')}; greedy",
        f"            every process: {settings}",
        "            useful tokens/s: median of the rounds (slowest to fastest). ratio: to transformers' continuous",
        "            batching within a round. memory: the most its process has had since it was loaded. same: requests",
        "            with the very same tokens as the first engine gave. (Memory for K/V counts from when it is used;",
        "            transformers' continuous batching uses all of its cache at once.)",
    ]
    if not found.fast:
        lines.append("            THE FAST PATH WAS NOT USED: it does not fit this model")
    for name, what in found.works:
        outcomes = [outcome for outcome in found.outcomes if outcome.work == name]
        rows = [_row(outcome, found.num_requests[name]) for outcome in outcomes]
        titles = (f"{name}", "tokens/s", "", "ratio", "", "memory", "same")
        lines += ["", f"{name}: {what}", table(titles, rows)]
    lines += _own(found) + _noise(found)
    return "\n".join(lines)


def _row(outcome: Outcome, requests: int) -> list[str]:
    ratios = outcome.ratios
    return [
        outcome.engine,
        f"{outcome.rate:.0f}",
        f"({min(outcome.rates):.0f}-{max(outcome.rates):.0f})",
        f"{statistics.median(ratios):.2f}",
        f"({min(ratios):.2f}-{max(ratios):.2f})",
        f"{outcome.peak_memory / 1e9:.2f} GB",
        f"{outcome.same} of {requests}",
    ]


def _own(found: Engines) -> list[str]:
    """Where the time of our own iterations goes."""
    own = [outcome for outcome in found.outcomes if outcome.phases]
    if not own:
        return []
    phases = list(own[0].phases)
    rows = [[f"{o.work}: {o.engine}", *(f"{100 * o.phases[p]:.1f} %" for p in phases)] for o in own]
    lines = ["", "where the time of our iterations goes", table(("", *phases), rows), ""]
    rows = [
        [
            f"{o.work}: {o.engine}",
            kind.what,
            str(kind.number),
            f"{kind.ms:.1f}",
            f"{kind.gb_per_s:.1f}",
            f"{kind.gflop_per_s:.0f}",
        ]
        for o in own
        for kind in o.kinds
    ]
    lines += [
        "forward passes by kind, medians (GB: all weights once and the K/V that are read and written)",
        table(("", "kind", "number", "ms", "GB/s", "GFLOP/s"), rows),
    ]
    return lines


def _noise(found: Engines) -> list[str]:
    """A warning if others had a part of the machine, or rounds differ a lot."""
    spread = max(max(o.rates) / min(o.rates) for o in found.outcomes)
    if all(len(o.rates) == 1 for o in found.outcomes):
        return ["", "ONE ROUND: nothing here says how much a second one would differ."]
    others = max((o.others for o in found.outcomes if o.others == o.others), default=0.0)
    stolen = max((o.stolen for o in found.outcomes if o.stolen == o.stolen), default=0.0)
    said = []
    if others > 0.1:
        said.append(f"other processes had up to {others:.1f} cores")
    if stolen > 0.05:
        said.append(f"the hypervisor gave up to {stolen:.1f} cores to other machines")
    if spread > 1.15:
        said.append(f"the same run took up to {spread:.2f} times as long in another round")
    return ["", f"NOT QUIET: {'; '.join(said)}. Trust the ratios more than the times."] if said else []
