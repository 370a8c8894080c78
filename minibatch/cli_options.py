"""What the commands share: options whose help says their default, and a directory that can be written to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minibatch.models.pretrained import DEFAULT_MODEL

DIFFERS = 4  # exit code: tokens differ from solo generation, and not by a numerical tie
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def add_command(
    commands: argparse._SubParsersAction, name: str, run: Callable, text: str, **more: Any
) -> argparse.ArgumentParser:
    """``minibatch NAME``, which calls ``run`` with its options."""
    command = commands.add_parser(name, help=text, description=text, **more)
    command.set_defaults(command=run)
    return command


def add_model_command(
    commands: argparse._SubParsersAction, name: str, run: Callable, text: str, fast: bool = False
) -> argparse.ArgumentParser:
    """A command that loads a model; ``fast``: it can be told to use our own forward pass."""
    command = add_command(commands, name, run, text)
    group = command.add_argument_group("model")
    names = "smollm2-135m, toy (no download, simulated time), a Hub id or a path"
    option(group, "--model", DEFAULT_MODEL, names, str)
    option(group, "--dtype", "float32", "of weights, K/V and computation", str, choices=DTYPES)
    option(group, "--device", "cpu", "cpu, or cuda for a GPU", str)
    if fast:
        what = "compute Llama-like models by a forward pass of our own, which gives the same up to rounding"
        group.add_argument("--fast", action="store_true", help=what)
    return command


def option(group: argparse._ActionsContainer, name: str, default: object, text: str, kind: type, **more: Any) -> None:
    """An option whose help says its default, where it has one."""
    text = text if default is None else f"{text} (default: {default})"
    metavar = {int: "N", float: "X"}.get(kind)
    group.add_argument(
        name, type=kind, default=default, help=text, metavar=None if "choices" in more else metavar, **more
    )


def check_writable(directory: Path) -> None:
    """Raises ValueError now rather than after minutes of work."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"cannot write to {directory}: {there} is not a directory that can be written to")
