"""Prompts that nobody writes down: a simulated request needs to say which tokens it has, not to hold them.

A prompt without shared content is a ``range`` of numbers that no other request has, so that nothing is found in a
prefix cache by accident. Shared content is the same range in several prompts; a prompt of several parts is their
:class:`Joined`. Both take the same few bytes for ten tokens and for a million.

The simulated model counts on from the last token of the prompt, so a prompt's last token has to be its own, and its
number followed by room for the answer: every request has :data:`ROOM` numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

ROOM = 2**32  # numbers of one request or one shared content; 0 to ROOM - 1 are nobody's
SHARED = 2**60  # shared contents count from here
MOST = SHARED // ROOM - 1  # contents of either kind: all below 2**61 - 1, where Python's hashes of integers repeat


def own(index: int, num_tokens: int) -> range:
    """The first tokens of request ``index`` (from 0), which no other request has."""
    return _content(ROOM, index, num_tokens)


def shared(index: int, num_tokens: int) -> range:
    """The first tokens of shared content ``index`` (from 0)."""
    return _content(SHARED, index, num_tokens)


def _content(base: int, index: int, num_tokens: int) -> range:
    if not 0 <= index < MOST or not 0 <= num_tokens < ROOM:
        raise ValueError(f"content {index} of {num_tokens} tokens: there are {MOST} contents of {ROOM - 1} tokens")
    start = base + ROOM * index
    return range(start, start + num_tokens)


@dataclass(frozen=True)
class Joined(Sequence[int]):
    """The tokens of several ranges, one after the other; make it with :func:`join`.

    A slice is a plain list. Equal contents are equal objects, because pieces that continue each other are never kept
    apart.
    """

    pieces: tuple[range, ...]
    _stops: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each piece, its end in the whole

    def __post_init__(self) -> None:
        if not self.pieces or not all(self.pieces):
            raise ValueError("a prompt has at least one token, and so has each of its pieces")
        stops, total = [], 0
        for piece in self.pieces:
            total += len(piece)
            stops.append(total)
        object.__setattr__(self, "_stops", tuple(stops))

    def __len__(self) -> int:
        return self._stops[-1]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.pieces)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(*index.indices(len(self)))
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"token {index} of {len(self)}")
        number = bisect_right(self._stops, position)
        return self.pieces[number][position - self._stops[number]]  # counted from the piece's end

    def _slice(self, start: int, stop: int, step: int) -> list[int]:
        if step != 1:
            return [self[position] for position in range(start, stop, step)]
        tokens: list[int] = []
        number = bisect_right(self._stops, start)
        while start < stop:
            piece, end = self.pieces[number], self._stops[number]
            begin = end - len(piece)
            tokens += piece[start - begin : stop - begin]
            start, number = end, number + 1
        return tokens


def join(pieces: Iterable[range]) -> range | Joined:
    """The pieces one after the other; one range, if each continues the one before. Empty pieces do not count.

    Raises ValueError for a range that does not count up by one, or if there are no tokens at all.
    """
    merged: list[range] = []
    for piece in pieces:
        if piece.step != 1:
            raise ValueError(f"a piece of a prompt counts up by one, got {piece!r}")
        if merged and merged[-1].stop == piece.start:
            merged[-1] = range(merged[-1].start, max(piece.stop, piece.start))
        elif piece:
            merged.append(piece)
    if not merged:
        raise ValueError("a prompt has at least one token, and these pieces have none")
    return merged[0] if len(merged) == 1 else Joined(tuple(merged))


def pieces(prompt: Sequence[int]) -> tuple[range, ...] | None:
    """The ranges that a prompt is made of; None if it is written out."""
    if isinstance(prompt, range):
        return (prompt,)
    return prompt.pieces if isinstance(prompt, Joined) else None
