"""Public traces of LLM services as workloads.

    read_azure      Azure LLM inference traces 2023 (Azure/AzurePublicDataset): arrivals and lengths
    read_mooncake   Mooncake, FAST 2025 (kvcache-ai/Mooncake): arrivals, lengths, and which blocks of prompts are equal
    read_lengths    a table of lengths without arrivals, such as ShareGPT's: for ``open_loop.from_lengths``

Times become seconds after the first request. A row without prompt tokens or without output tokens is no request to an
engine, which always generates something: it is left out, and the description says how many were. Any other line that
is not of the form raises ValueError with file, line and content.

``max_tokens``: what schedulers see, as in ``open_loop.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import numpy as np

from minibatch.contents import SHARED, Joined, join, own
from minibatch.open_loop import simulated_request
from minibatch.trace import counted
from minibatch.workloads import Workload

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOST_HASH_IDS = 2**50  # so that the blocks' tokens stay below contents.SHARED * 2

Row = TypeVar("Row")
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?")


def read_azure(path: str | Path, max_tokens: int | None = None) -> Workload:
    """A CSV file with TIMESTAMP (such as ``2023-11-16 18:17:03.9799600``), ContextTokens and GeneratedTokens."""
    rows = _table(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_row)
    kept = sorted((row for row in rows if row[1] and row[2]), key=lambda row: row[0])
    first = kept[0][0] if kept else 0
    requests = [
        simulated_request(f"r{i}", own(i, prompt), output, (time - first) / 10**9, max_tokens)
        for i, (time, prompt, output) in enumerate(kept)
    ]
    return Workload(requests, _description(path, len(kept), len(rows)))


def read_mooncake(path: str | Path, max_tokens: int | None = None) -> Workload:
    """JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``, one a 512-token block.

    Equal ids are equal tokens, the last block cut to the length. Only a prompt's last token is always its own: an
    answer counts on from there, and may be neither another request's answer nor the rest of a block that was cut. It
    costs no hit between equal prompts, of which at least the last token is computed anyway, nor where the last block
    is not full.
    """
    rows = list(_parsed(path, _lines(path), _mooncake_row))
    kept = sorted((row for row in rows if row[1] and row[2]), key=lambda row: row[0])
    first = kept[0][0] if kept else 0
    requests = [
        simulated_request(f"r{i}", _mooncake_prompt(i, length, hash_ids), output, (time - first) / 1000, max_tokens)
        for i, (time, length, output, hash_ids) in enumerate(kept)
    ]
    return Workload(requests, _description(path, len(kept), len(rows)))


def read_lengths(path: str | Path) -> np.ndarray:
    """A CSV file with num_prefill_tokens and num_decode_tokens: int64 [rows, 2], for ``open_loop.from_lengths``.

    Rows with a 0 are left out.
    """
    rows = _table(path, ("num_prefill_tokens", "num_decode_tokens"), lambda values: [_count(v) for v in values])
    return np.array([row for row in rows if all(row)], dtype=np.int64).reshape(-1, 2)


def _azure_row(values: Sequence[str]) -> tuple[int, int, int]:
    """Nanoseconds, prompt tokens, output tokens."""
    found = TIMESTAMP.fullmatch(values[0])
    if found is None:
        raise ValueError(f"{values[0]!r} is not a time such as 2023-11-16 18:17:03.9799600")
    seconds = datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc).timestamp()
    return int(seconds) * 10**9 + int((found[2] or "").ljust(9, "0")), _count(values[1]), _count(values[2])


def _mooncake_row(line: str) -> tuple[float, int, int, list[int]]:
    """Milliseconds, prompt tokens, output tokens, hash ids."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    time, length, output, hash_ids = [value[name] for name in MOONCAKE_FIELDS]
    for number in (length, output, *hash_ids):
        if type(number) is not int or not 0 <= number < MOST_HASH_IDS:
            raise ValueError(f"{number!r} is not a whole number from 0 on")
    if type(time) not in (int, float) or not 0 <= time < float("inf"):
        raise ValueError(f"timestamp is {time!r}, not a number of milliseconds from 0 on")
    if len(hash_ids) != (blocks := -(-length // MOONCAKE_BLOCK)):
        raise ValueError(f"{length} tokens are {blocks} blocks, and it has {len(hash_ids)} hash ids")
    return time, length, output, hash_ids


def _mooncake_prompt(index: int, length: int, hash_ids: Sequence[int]) -> range | Joined:
    blocks = [range(SHARED + MOONCAKE_BLOCK * h, SHARED + MOONCAKE_BLOCK * (h + 1)) for h in hash_ids]
    blocks[-1] = blocks[-1][: length - MOONCAKE_BLOCK * (len(blocks) - 1) - 1]  # the last token is its own
    return join([*blocks, own(index, 1)])


# ---------------------------------------------------------------- lines


def _table(path: str | Path, columns: Sequence[str], parse: Callable[[Sequence[str]], Row]) -> list[Row]:
    """The rows of a CSV file without quotes, of each the values of ``columns``; others do not matter."""
    lines = _lines(path)
    _, header = next(lines, (0, ""))
    names = header.split(",")
    if not set(columns) <= set(names):
        raise ValueError(f"{path}:1 should name the columns {', '.join(columns)}: {header!r}")
    places = [names.index(column) for column in columns]

    def row(line: str) -> Row:
        values = line.split(",")
        if len(values) != len(names):
            raise ValueError(f"{len(values)} values for {len(names)} columns")
        return parse([values[place] for place in places])

    return list(_parsed(path, lines, row))


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Numbered from 1; blank lines do not count. What is not UTF-8 becomes something that no reader takes."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if text := line.strip():
                yield number, text


def _parsed(path: str | Path, lines: Iterator[tuple[int, str]], parse: Callable[[str], Row]) -> Iterator[Row]:
    for number, line in lines:
        try:
            yield parse(line)
        except (ValueError, TypeError, KeyError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            shown = line if len(line) <= 100 else f"{line[:100]}..."
            raise ValueError(f"{path}:{number}: {why}: {shown!r}") from error


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a number of tokens")
    return int(text)


def _description(path: str | Path, kept: int, total: int) -> str:
    left_out = f", without {counted(total - kept, 'row')} of no prompt or no output" if kept < total else ""
    return f"{Path(path).name}: {counted(kept, 'request')}{left_out}"
