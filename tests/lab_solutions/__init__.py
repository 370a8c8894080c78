"""For every exercise, solutions that are wrong in a way that has a name, and others that are right and not ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wrong:
    """``name``: what somebody has misunderstood; ``part``: a function, or a class (for a method: a function, or a class
    that has it); ``says``: words that the checker's idea has to contain."""

    name: str
    part: Any
    says: str
