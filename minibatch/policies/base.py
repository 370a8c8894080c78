"""What all policies share: a text that says what they are, for traces and errors."""

from __future__ import annotations

from dataclasses import fields


class Policy:
    """A dataclass whose repr names the functions in its fields, instead of giving their addresses."""

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.repr)
        shown = (f"{name}={getattr(value, '__name__', None) or repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(shown)})"
