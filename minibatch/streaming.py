"""One request's output as it is made.

A stream owns no thread: whoever asks it for more turns the engine's crank, and all other requests advance with it.
Leaving the stream (``close()``, the end of a ``with`` block, or dropping it) aborts the request, so that a client that
has gone costs nothing from the next iteration on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minibatch.engine import Engine
    from minibatch.request import RequestState, Result


class Delta(NamedTuple):
    """What is new: token ids, text that will not change any more, and on the last one why the request ended."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


class Stream(Iterator[Delta]):
    """Iterates over :class:`Delta`; exactly one, the last, has a ``finish_reason``."""

    def __init__(self, engine: Engine, state: RequestState) -> None:
        self._engine, self._state = engine, state
        self._num_seen, self._ended = 0, False

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def result(self) -> Result | None:
        """The final Result, None before the end."""
        return self._state.result

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        state = self._state
        while len(state.generated) == self._num_seen and not state.is_finished:
            self._engine.step()
        tokens = tuple(state.generated[self._num_seen :])
        self._num_seen += len(tokens)
        self._ended = state.is_finished
        return Delta(tokens, "" if state.text is None else state.text.delta(), state.finish_reason)

    def close(self) -> None:
        """Aborts the request if it is still running."""
        self._ended = True
        if not self._state.is_finished:
            self._engine.abort(self._state.request_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
