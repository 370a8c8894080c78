"""What all policies share: a text that says what they are, for traces and errors; and being objects."""

from __future__ import annotations

import re
from typing import Any


class Policy:
    """Its repr gives its attributes, functions by name; a dataclass needs ``@dataclass(frozen=True, repr=False)``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={named(value)}' for name, value in vars(self).items())})"


def named(value: Any) -> str:
    """A function by its name; anything else by its repr, without the address that makes it another in every run."""
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def check_policy(name: str, value: object, kind: type, example: str) -> None:
    """Raises TypeError unless ``value`` is an object of this kind, and says which mistake it looks like."""
    if isinstance(value, kind):
        return
    if isinstance(value, type):
        raise TypeError(f"{name} is the class {value.__name__}, not an object of it: write {value.__name__}(...)")
    if isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: names are for the command line; give an object such as {example}")
    raise TypeError(f"{name} must be derived from {kind.__name__}, such as {example}; got {value!r}")
