"""From tokens to text that may be shown: a stream never takes back what it has shown.

Two things make the text of the newest token uncertain. A token may end inside a character: byte-level tokenizers cut
UTF-8 where they like, and half a character decodes to U+FFFD until its other half arrives. And the text may be the
beginning of a stop string, which will be cut off if the rest of it follows. So text takes three steps:

    tokens -> decoded (no half characters) -> safe (no beginning of a stop string) -> shown by ``delta``

Tokens cannot be decoded one by one: SentencePiece writes the space before a word only if something precedes it, and
the bytes of a character have to meet in one call. So a token is decoded behind the few tokens before it, and the text
of those is taken off again: the idea of the prefix and read offsets of Hugging Face TGI and vLLM. The window is of
bounded length, so that a token costs the same however long the text has become.

As in vLLM, the text of a token that ends the request by its id is left out, unless ``include_stop_str_in_output``,
and a stop string counts only if it ends behind the first ``min_tokens`` tokens. Otherwise than in vLLM: of several
stop strings the one that begins first wins, not the one listed first; an incomplete character at the very end is
shown as U+FFFD, as decoding the whole would; and decoding starts at the first generated token, not in the prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from minibatch.request import SamplingParams

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not, or not yet, a character
CONTEXT = 8  # tokens that a cut of the window leaves; the window is at most twice as long


class TextStream:
    """The text of one request, token by token.

    ``tokenizer``       has ``decode(ids, skip_special_tokens=...)``
    ``stop_token_ids``  all ids that end the request: RequestState.stop_token_ids adds the model's end-of-sequence ids
                        to those of ``params``
    ``stop_reason``     the stop string that ended the text, if one did
    ``text``            all that can be shown by now: the deltas, joined, plus the one that is due
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, stop_token_ids: Collection[int] = ()) -> None:
        # The bare tokenizer under a transformers one decodes alike, faster, and never "cleans up" spaces afterwards.
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._params = params
        self._stop_token_ids = frozenset(params.stop_token_ids).union(stop_token_ids)
        self.stop_reason: str | None = None
        self._ended = False
        self._num_tokens = 0
        self._window: list[int] = []  # the newest tokens,
        self._decoded = ""  # their text,
        self._taken = 0  # and how many characters of it have gone on to _held
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._untested = 0  # in characters of _held: stop strings that end within them do not count
        self._safe: list[str] = []
        self._num_shown = 0  # of the pieces in _safe

    @property
    def text(self) -> str:
        return "".join(self._safe)

    def push(self, token: int) -> bool:
        """Takes the next generated token; True if a stop string ended the text. Nothing may be pushed after the end."""
        if self._ended:
            raise RuntimeError("the text has ended; no token can follow")
        self._num_tokens += 1
        if token not in self._stop_token_ids:
            self._held += self._decode(token)
            self._look_for_stop()
        elif self._params.include_stop_str_in_output:
            self._held += self._decode(token)
        return self.stop_reason is not None

    def finish(self) -> None:
        """No token will follow: what was held back is text now, half a character as U+FFFD. Harmless after the end."""
        if not self._ended:
            self._held += self._decoded[self._taken :]
            self._release(len(self._held))
            self._ended = True

    def delta(self) -> str:
        """The text that can be shown and was not part of an earlier delta."""
        new = "".join(self._safe[self._num_shown :])
        self._num_shown = len(self._safe)
        return new

    # --- decoded -> safe ----------------------------------------------------------------------------------------------

    def _look_for_stop(self) -> None:
        if self._num_tokens <= self._params.min_tokens:
            self._untested = len(self._held)
        found = [(self._find(stop), order) for order, stop in enumerate(self._params.stop)]
        found = [match for match in found if match[0] >= 0]
        if not found:
            self._release(len(self._held) - self._partial_stop())
            return
        start, order = min(found)
        self.stop_reason = self._params.stop[order]
        self._release(start + len(self.stop_reason) * self._params.include_stop_str_in_output)
        self._ended = True

    def _find(self, stop: str) -> int:
        """Where ``stop`` first occurs in the held text with its end behind the untested part; -1 if nowhere.

        A match that began in text released earlier cannot be: its beginning would have been held back.
        """
        return self._held.find(stop, max(0, self._untested - len(stop) + 1))

    def _partial_stop(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = 0
        for stop in self._params.stop:
            sizes = range(min(len(stop) - 1, len(self._held)), longest, -1)
            longest = next((size for size in sizes if self._held.endswith(stop[:size])), longest)
        return longest

    def _release(self, size: int) -> None:
        if size:
            self._safe.append(self._held[:size])
        self._held = self._held[size:]
        self._untested = max(0, self._untested - size)

    # --- tokens -> decoded --------------------------------------------------------------------------------------------

    def _decode(self, token: int) -> str:
        """The text that became certain with this token, perhaps with that of tokens before it."""
        text = self._text_of([*self._window, token])
        if text and text == self._decoded and not self._text_of([token]):
            return ""  # a special token that is skipped: it must not push the real context out of the window
        waiting = ""
        if text.startswith(self._decoded[: self._taken]):
            self._window.append(token)
        else:
            # SentencePiece decodes a run of byte tokens as all or nothing: one bad byte, or half a character, and the
            # good characters before it are U+FFFD too. They have been taken: leave them out of it.
            waiting = self._decoded[self._taken :]
            self._window, self._taken, text = [token], 0, self._text_of([token])
        end = max(self._taken, len(text) - _maybe_incomplete(text))
        new = waiting + text[self._taken : end]
        self._decoded, self._taken = text, end
        if len(self._window) >= 2 * CONTEXT:
            self._shrink_window()
        return new

    def _shrink_window(self) -> None:
        """Forgets the older tokens of the window. What has not been taken are a few characters at the end: they stay.

        The cut must not split a character; one has at most four tokens, so one of four neighbouring cuts does not.
        """
        num_waiting = len(self._decoded) - self._taken
        for size in range(CONTEXT, CONTEXT + 4):
            text = self._text_of(self._window[-size:])
            if self._decoded.endswith(text):
                break
        self._window, self._decoded = self._window[-size:], text
        self._taken = max(0, len(text) - num_waiting)

    def _text_of(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._params.skip_special_tokens)


def _maybe_incomplete(text: str) -> int:
    """How many characters at the end of a decoded text may still change.

    An incomplete character is at most three bytes; decoders write one U+FFFD for all of them, or one for each. More
    than that, and the first is simply wrong: a stray byte is held back for three characters, not for ever.
    """
    return min(3, len(text) - len(text.rstrip(REPLACEMENT)))
