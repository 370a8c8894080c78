"""The stepper's style sheet: the colours of the pictures (``plot_style.py``) as CSS, for light and for dark screens.

What a kind of token or row looks like is the same in both; only near-white greys are darker on a dark screen. Text is
never on such a colour: it stands beside it, on ``panel``, or on the pale colour of a request (``owner``).
"""

from __future__ import annotations

from pathlib import Path

from minibatch.plot_style import FOUND, LINES, MEMORY, OWNERS, RESIDENT, TOKENS, Look

LIGHT = {
    "ink": "#1a1a1a",
    "muted": "#5a5a5a",
    "back": "#ffffff",
    "panel": "#f5f5f3",
    "line": "#cfcfcf",
    "accent": "#0b57a4",
    "past": "#b5b5b5",
    "nobody": "#e6e6e4",
}
DARK = {
    "ink": "#f0f0f0",
    "muted": "#b9bcc0",
    "back": "#15171a",
    "panel": "#202327",
    "line": "#4a4f56",
    "accent": "#8cc4ff",
    "past": "#777c83",
    "nobody": "#33373d",
}
GREYS = {"left_padding": "#5a5d61", "dead_padding": "#74777b", "free": "#33373d"}  # on a dark screen
PALE = {"light": 0.55, "dark": 0.32}  # share of a request's colour in the ground of its cells

LOOKS: dict[str, Look] = {**TOKENS, **MEMORY, "resident": RESIDENT, "found": FOUND}
LEGEND = {kind: look.label for kind, look in LOOKS.items() if kind not in ("free", "found")} | {
    kind: label for kind, (label, _) in LINES.items()
}


def style() -> str:
    """All of it."""
    light, dark = palette("light"), palette("dark")
    return (
        f".mb {{{_variables(light)}}}\n"
        f"@media (prefers-color-scheme: dark) {{.mb {{{_variables(dark)}}}}}\n"
        f"{_kinds()}{(Path(__file__).parent / 'player.css').read_text(encoding='utf-8')}"
    )


def palette(mode: str) -> dict[str, str]:
    """Name -> colour, ``mode`` light or dark; ``owner0``... are the grounds of requests' cells."""
    colors = dict(LIGHT if mode == "light" else DARK)
    for kind, look in LOOKS.items():
        colors[kind] = look.color if mode == "light" else GREYS.get(kind, look.color)
    for number, color in enumerate(OWNERS):
        colors[f"owner{number}"] = mix(color, colors["back"], PALE[mode])
    return colors


def mix(color: str, ground: str, share: float) -> str:
    """A colour thinned out: ``share`` of it on a ground."""
    parts = zip(_rgb(color), _rgb(ground), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[place : place + 2], 16) for place in (1, 3, 5))


def _variables(colors: dict[str, str]) -> str:
    return "; ".join(f"--{name}: {color}" for name, color in colors.items())


def _kinds() -> str:
    """A class a kind, hatched as in the pictures; and two a request: its colour, and the ground of its cells."""
    rules = [f".mb .{kind} {{background: {_hatch(look)} var(--{kind})}}" for kind, look in LOOKS.items()]
    for number, color in enumerate(OWNERS):
        rules.append(f".mb .o{number} {{--own: {color}; background: var(--owner{number})}}")
    return "\n".join(rules) + "\n"


def _hatch(look: Look) -> str:
    """The layers above the colour: lines to one side or to both, or dots."""

    def lines(angle: int) -> str:
        return f"repeating-linear-gradient({angle}deg, {look.ink} 0 1px, transparent 1px 4px)"

    if not look.hatch:
        return ""
    layers = {"/": [lines(135)], "x": [lines(135), lines(45)], ".": [f"radial-gradient({look.ink} 1px, transparent 0)"]}
    dots = " 0 0 / 4px 4px" if look.hatch[0] == "." else ""
    return f"{', '.join(layers[look.hatch[0]])}{dots},"
