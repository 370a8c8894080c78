"""The pictures in ``figures/`` and the data behind them: ``minibatch figures``.

Simulated pictures are the same files whenever they are made, byte for byte with the same version of matplotlib on one
platform. Measured ones are drawn from the traces of one run, which are kept beside them. A study's picture is drawn
from the tables beside it, read back from the disk, so that they are the data behind it by construction; and it can be
drawn again without the minutes that the study takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import pandas as pd
from matplotlib import style
from matplotlib.figure import Figure

from minibatch import figures_runs as runs
from minibatch import plots, studies
from minibatch.configurations import CONFIGURATIONS
from minibatch.plot_style import save

DATA = "data"  # beside the pictures
SIMULATED, MEASURED = "simulated", "measured"
STUDY = "reproduce-"  # what the names of their pictures begin with


@dataclass(frozen=True)
class How:
    """``data``: the directory with the tables and traces. ``redraw``: no study is run, its tables are there."""

    data: Path
    redraw: bool = False
    progress: bool = True


@dataclass(frozen=True)
class Picture:
    """``caption``: what to see. ``kind``: simulated or measured. ``seed``: None if nothing is drawn at random.
    ``draw``: writes the data behind the figure, and returns it."""

    name: str
    caption: str
    kind: str
    seed: int | None
    draw: Callable[[How], Figure]

    @property
    def command(self) -> str:
        return f"minibatch figures {self.name}"


def _of_runs(
    name: str, picture: str, table: Callable[[runs.Traces], pd.DataFrame], traces: Callable[[], runs.Traces], how: How
) -> Figure:
    """``picture``: one of :func:`minibatch.plots.compare_figures`; ``table``: the same in numbers."""
    shown = traces()
    _write(table(shown), how.data / f"{name}.csv")
    return plots.compare_figures(shown)[picture]


def _of_the_comparison(picture: str, table: Callable[[runs.Traces], pd.DataFrame], how: How) -> Figure:
    return _of_runs(picture, picture, table, partial(runs.measured, how.data), how)


def _of_a_study(name: str, how: How) -> Figure:
    facts = how.data / f"{STUDY}{name}.json"
    if not how.redraw:
        study = studies.run(name, progress=how.progress)
        facts.write_text(json.dumps({**study.facts(), "data": [*study.data]}, indent=2) + "\n", encoding="utf-8")
        for part, table in study.data.items():
            _write(table, how.data / f"{STUDY}{name}-{part}.csv")
    known = json.loads(facts.read_text(encoding="utf-8"))
    tables = {part: pd.read_csv(how.data / f"{STUDY}{name}-{part}.csv") for part in known["data"]}
    return import_module(f"minibatch.studies.{name}").figure(tables, known["footer"])


def _write(table: pd.DataFrame, path: Path) -> None:
    table.to_csv(path, index=False, lineterminator="\n")


_CAPTIONS = {
    "orca": "Left: with static batching a request waits for the whole batch before it, so latency rises at a lower "
    "rate. Right: the ratio of the rates at equal latency. With equal lengths (dashed) it is smaller, hardly above 1 "
    "at the same maximum batch where the limit is loose.",
    "vllm": "What every row of the K/V memory holds, by how it is reserved; black lines are the published shares. "
    "What large blocks cost.",
    "anyscale": "Four rungs from a harness that runs every batch to the longest answer of all, to paged continuous "
    "batching. The higher the cap on the answers, the higher the ladder; what is missing to the published 23 is white.",
    "sarathi": "Left: the time between tokens, at the same rate; a prompt that is computed whole stalls everybody. "
    "Right: how many requests a second are served within a limit on it.",
    "vtc": "Two clients, one of which asks for twice as much. First come, first served gives it twice as much; virtual "
    "token counters keep the difference within a bound, and need a lift for who comes late.",
    "negative": "At low load and with equal lengths there is nothing to gain. Cutting prompts moves the wait from one "
    "request to another; when all requests wait anyway, small chunks cost throughput.",
}

PICTURES = {
    picture.name: picture
    for picture in (
        Picture(
            "membership",
            "Who takes part in which iteration: a row a request, a column an iteration. Static batches start and end "
            "as blocks, with dead rows; under continuous batching a row ends and another begins in the next column.",
            MEASURED,
            0,
            partial(_of_the_comparison, "membership", runs.membership_table),
        ),
        Picture(
            "kv_memory",
            "Where every row of the KV cache is, iteration by iteration. Slots of the longest length are mostly "
            "reserved and never filled; blocks are filled.",
            MEASURED,
            0,
            partial(_of_the_comparison, "kv_memory", runs.memory_table),
        ),
        Picture(
            "token_budget",
            "What every iteration executes. A tall column is a prompt, and everybody who decodes waits for it; chunked "
            "prefill cuts the columns to the budget.",
            MEASURED,
            0,
            partial(_of_the_comparison, "token_budget", runs.tokens_table),
        ),
        Picture(
            "latency",
            "Who waits, and for what: a dot a request (for the time between tokens, a gap), with P50 and P99.",
            MEASURED,
            0,
            partial(_of_the_comparison, "latency", runs.latency_table),
        ),
        Picture(
            "abc",
            "Three requests of 18, 73 and 141 decodes. Continuous batching wastes nothing, and is not a step faster "
            "until somebody waits for the room.",
            SIMULATED,
            None,
            partial(_of_runs, "abc", "membership", runs.membership_table, runs.abc),
        ),
        Picture(
            "policies",
            "The same nine requests under three sets of policies. A common beginning that is found again saves memory; "
            "swapping saves computing again; by priority it is never the urgent r6 that gives way.",
            SIMULATED,
            runs.SEED,
            partial(_of_runs, "policies", "membership", runs.membership_table, runs.policies),
        ),
        *(
            Picture(f"{STUDY}{name}", f"{title}. {_CAPTIONS[name]}", SIMULATED, 0, partial(_of_a_study, name))
            for name, title in studies.STUDIES.items()
        ),
    )
}


def make(
    names: Sequence[str],
    directory: Path,
    measure: bool = False,
    redraw: bool = False,
    progress: bool = True,
) -> Iterator[list[Path]]:
    """Makes these pictures (none: all), one after the other; yields the paths of each.

    ``measure``  first take a new measured run (``minibatch compare``, with the default weights)
    ``redraw``   run no study: draw from the tables that are there

    Raises ValueError for a name that does not exist, for nothing to measure, for data that are not there, and for a
    directory with a README.md that is not the one written here.
    """
    how = How(directory / DATA, redraw, progress)
    wanted, readme = chosen(names), directory / "README.md"
    if readme.exists() and not readme.read_text(encoding="utf-8").startswith(_HEAD[: _HEAD.index("each")]):
        raise ValueError(f"{readme} is there and is not ours: choose another directory")
    _check(wanted, how, measure)
    how.data.mkdir(parents=True, exist_ok=True)
    readme.write_text(describe(), encoding="utf-8")
    if measure:
        runs.measure(how.data, progress)
    for picture in wanted:
        yield _make(picture, directory, how)


def chosen(names: Sequence[str]) -> list[Picture]:
    if unknown := [name for name in names if name not in PICTURES]:
        raise ValueError(f"no picture {', '.join(unknown)}: there are {', '.join(PICTURES)}")
    return [picture for name, picture in PICTURES.items() if name in names or not names]


def _check(wanted: Sequence[Picture], how: How, measure: bool) -> None:
    measured = [picture.name for picture in wanted if picture.kind == MEASURED]
    if measure and not measured:
        raise ValueError(f"none of {', '.join(picture.name for picture in wanted)} is measured")
    missing = [path for path in (runs.trace_file(how.data, name) for name in CONFIGURATIONS) if not path.is_file()]
    if measured and missing and not measure:
        raise ValueError(f"{', '.join(measured)}: drawn from {missing[0]}, which is not there; --measure makes it")
    if how.redraw:
        for path in (path for picture in wanted if picture.name.startswith(STUDY) for path in _needed(picture, how)):
            if not path.is_file():
                raise ValueError(f"{path} is needed and is not there; without --redraw it is made")


def _needed(picture: Picture, how: How) -> Iterator[Path]:
    """What a study's picture is drawn from."""
    facts = how.data / f"{picture.name}.json"
    yield facts
    try:
        parts = json.loads(facts.read_text(encoding="utf-8"))["data"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{facts} is not what minibatch figures writes: {error}") from error
    yield from (how.data / f"{picture.name}-{part}.csv" for part in parts)


def _make(picture: Picture, directory: Path, how: How) -> list[Path]:
    with style.context("default", after_reset=True):  # whatever the user's own settings are
        figure = picture.draw(how)
        paths = [directory / f"{picture.name}.{suffix}" for suffix in ("svg", "png")]
        for path in paths:
            save(figure, path)
    return [*paths, *sorted(how.data.glob(f"{picture.name}*"))]


def describe() -> str:
    """The README of the pictures' directory."""
    parts = [_HEAD]
    for picture in PICTURES.values():
        kind = picture.kind if picture.seed is None else f"{picture.kind}, seed {picture.seed}"
        files = f"`{picture.name}.png`, `{picture.name}.svg`, `{DATA}/{picture.name}*`"
        parts.append(
            f"## {picture.name}\n\n![{picture.name}]({picture.name}.png)\n\n{picture.caption}\n\n"
            f"*{kind}* · `{picture.command}` · {files}"
        )
    return "\n\n".join(parts) + "\n"


_HEAD = f"""# Figures

This directory is made by `minibatch figures`; each picture below has its own command. Every one is there as SVG, whose
text stays text, and as PNG, and the numbers that it shows are in `{DATA}/`.

- *Simulated* pictures are the same whenever they are made, byte for byte with the same version of matplotlib (an SVG
  names it) on one platform. `minibatch figures` runs all six studies again, which takes about ten minutes on 2 cores;
  with `--redraw` it draws them from the tables in `{DATA}/`.
- *Measured* pictures show one run of `minibatch compare` with its defaults. Its traces and its numbers are in
  `{DATA}/*.trace.jsonl` and `{DATA}/compare.json`, with machine and versions; `minibatch explain r5 --trace
  figures/{DATA}/paged.trace.jsonl` tells a request's story. `minibatch figures --measure` takes a new run: another
  machine gives other times, and so other iterations too.

Blue is prefill, orange decode, light blue what was found in a prefix cache; hatched is waste: pink what is computed
again, grey padding and dead rows. Of memory, green is filled, yellow reserved, red-orange fragmentation. What
is only compared (systems, orders, measures) has shades of violet. All differ in greyscale, or by hatch, stroke or mark.
In a table of the membership iteration i lasts from i - 0.5 to i + 0.5."""
