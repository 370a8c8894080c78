"""``minibatch figures``: the pictures of ``figures/``, made again."""

from __future__ import annotations

import argparse
from pathlib import Path

from minibatch import figures
from minibatch.cli_options import add_command, check_writable, option


def add(commands: argparse._SubParsersAction) -> None:
    text = "Makes the pictures of figures/ again, as SVG and PNG, and the data behind them."
    command = add_command(commands, "figures", _figures, text)
    command.add_argument("name", nargs="*", metavar="NAME", help=f"{', '.join(figures.PICTURES)} (default: all)")
    option(command, "--out", Path("figures"), "directory of the pictures; their data are in data/ below it", Path)
    how = command.add_mutually_exclusive_group()
    how.add_argument("--measure", action="store_true", help="take a new measured run first (a few minutes)")
    how.add_argument("--redraw", action="store_true", help="run no study, draw from the tables that are there")
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def _figures(options: argparse.Namespace) -> int:
    check_writable(options.out)
    progress = not options.quiet
    for paths in figures.make(options.name, options.out, options.measure, options.redraw, progress):
        written = ", ".join(str(path.relative_to(options.out)) for path in paths)
        print(f"written to {options.out}/: {written}", flush=True)
    return 0
