"""``minibatch export-html``: the stepper of one trace, or of several side by side, as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from minibatch import player
from minibatch.cli_options import add_command, option
from minibatch.trace import Trace, counted


def add(commands: argparse._SubParsersAction) -> None:
    text = (
        "Makes one HTML file to step through a run, iteration by iteration; of several runs, side by side on a common "
        "clock. It needs neither kernel nor network."
    )
    more = "Traces are what `minibatch compare`, `minibatch simulate --out` and `trace.save()` write."
    command = add_command(commands, "export-html", _export, text, epilog=more)
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a trace, *.jsonl")
    group = command.add_argument_group("output")
    option(group, "--out", None, "the file (default: beside the first trace, named after all of them)", Path)
    option(group, "--first", None, "first iteration that is shown", int)
    option(group, "--last", None, "last one, included", int)


def _export(options: argparse.Namespace) -> int:
    files = [path.name.removesuffix(".jsonl").removesuffix(".trace") for path in options.traces]
    out = options.out or options.traces[0].with_name(f"{'-'.join(files)}.html")
    if out.resolve() in [path.resolve() for path in options.traces]:
        raise ValueError(f"--out {out} is one of the traces")
    loaded = [Trace.load(path) for path in options.traces]
    names = [str(trace.meta.get("name") or file) for trace, file in zip(loaded, files, strict=True)]
    if len(set(names)) < len(names):  # two runs of one configuration: the files tell them apart
        names = player.distinct(files)
    player.export_html(dict(zip(names, loaded, strict=True)), out, options.first, options.last)
    print(f"written to {out}: {counted(out.stat().st_size, 'byte')}")
    return 0
