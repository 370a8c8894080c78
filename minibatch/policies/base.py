"""What all policies share: a text that says what they are, for traces and errors."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any


class Policy:
    """A dataclass whose repr names the functions in its fields, instead of giving their addresses."""

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.repr)
        return f"{type(self).__name__}({', '.join(f'{name}={named(value)}' for name, value in values)})"


def named(value: Any) -> str:
    """A function by its name; anything else by its repr, without the address that makes it another in every run."""
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
