"""What every study returns: claims with their verdicts, numbers, a figure, and what is different here.

A verdict is computed from the numbers of the run, never written down; where a published number cannot come from a
simulation of one engine with equal kernels, the claim says so instead of being tuned until it fits.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from minibatch.plot_style import save

WIDTH = 100  # columns of the terminal


@dataclass(frozen=True)
class Claim:
    """``holds`` None: cannot be shown by this simulation, and ``ours`` says why, and what can."""

    claim: str
    conditions: str
    published: str
    ours: str
    holds: bool | None

    @property
    def verdict(self) -> str:
        return "cannot be shown here" if self.holds is None else "holds" if self.holds else "does not hold"


@dataclass(frozen=True)
class Study:
    """``setting``      model, hardware, workload, policies, seeds: all that the numbers depend on
    ``differences``  from the published experiment, each in one sentence
    ``tables``       the numbers, by title
    ``data``         what the figure is drawn from, by a short name: flat tables, equal after a way through CSV files
    ``footer``       the line under the figure
    ``figure``       None only while there is nothing to draw
    """

    name: str
    title: str
    source: str
    setting: str
    claims: Sequence[Claim]
    differences: Sequence[str]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    data: dict[str, pd.DataFrame] = field(default_factory=dict)
    footer: str = ""
    figure: Figure | None = None

    def describe(self) -> str:
        """All of it as text for a terminal."""
        parts = [f"{self.title} (simulated)\n{'=' * len(self.title + ' (simulated)')}", _wrap(f"Source: {self.source}")]
        parts += [_wrap(f"Setting: {self.setting}")]
        for claim in self.claims:
            lines = (("claim", claim.claim), ("conditions", claim.conditions), ("published", claim.published))
            lines += (("ours", claim.ours), ("verdict", claim.verdict.upper()))
            parts.append("\n".join(_wrap(f"{name:>10}  {text}", " " * 12) for name, text in lines))
        for title, table in self.tables.items():
            parts.append(f"{title}\n{table.to_string(float_format=lambda number: f'{number:.4g}')}")
        parts.append("What is different here:\n" + "\n".join(_wrap(f"- {text}", "  ") for text in self.differences))
        return "\n\n".join(parts)

    def facts(self) -> dict[str, Any]:
        """What the tables do not say, ready for ``json.dump``."""
        names = ("title", "source", "setting", "footer")
        said = ("claim", "conditions", "published", "ours", "verdict")
        claims = [{name: getattr(claim, name) for name in said} for claim in self.claims]
        return {**{name: getattr(self, name) for name in names}, "claims": claims, "differences": [*self.differences]}

    def save(self, directory: Path) -> list[Path]:
        """Writes the text, the numbers and the figure; returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"{self.name}.txt"]
        paths[0].write_text(self.describe() + "\n", encoding="utf-8")
        for number, table in enumerate(self.tables.values(), start=1):
            paths.append(directory / f"{self.name}{'' if len(self.tables) == 1 else f'-{number}'}.csv")
            table.to_csv(paths[-1])
        if self.figure is not None:
            paths.append(directory / f"{self.name}.png")
            save(self.figure, paths[-1])
        return paths


def _wrap(text: str, indent: str = "") -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False))
