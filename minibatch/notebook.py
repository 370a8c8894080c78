"""What the walk-throughs need of Jupyter: a picture in a cell, and sliders that change it.

A picture is shown as a PNG, which every code host and every export can show. Sliders are an addition: what they would
show at first stands in the cell as a picture as well, and that is all there is where ipywidgets is not installed or no
kernel is attached. Nothing here is needed to draw; :mod:`minibatch.plots` returns axes, and who has no notebook saves
them.

The sliders set the value of one image widget. So there is exactly one picture however often they are moved, it is
replaced in place, and no output has to be cleared.
"""

from __future__ import annotations

import html
import inspect
import io
import sys
from collections.abc import Callable, Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    import ipywidgets

Picture = Axes | Figure | np.ndarray
DPI = 120
NO_SLIDERS = (
    "The sliders need ipywidgets (`pip install ipywidgets`). Without them: call the function with other values."
)


def png(picture: Picture) -> bytes:
    """The figure, or the figure of these axes, as a PNG file; the same figure gives the same bytes.

    Raises TypeError for anything else. A figure that pyplot made is closed, or it would be shown a second time.
    """
    first = picture if isinstance(picture, Figure) else next(iter(np.ravel(picture)), None)
    figure = getattr(first, "figure", None)  # of a figure: itself
    if not isinstance(figure, Figure):
        raise TypeError(f"a picture is a figure or its axes, got {type(picture).__name__}")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(figure)
    return file.getvalue()


def show(picture: Picture, alt: str = "") -> None:
    """Shows a figure, or the figure of some axes, in the output of the cell; ``alt``: what it shows, in words."""
    _show(png(picture), alt)


def _show(image: bytes, alt: str) -> None:
    from IPython.display import Image, display

    display(Image(image, alt=alt or None))


def explore(draw: Callable[..., Picture], /, **choices: Iterable[Any]) -> Sliders | None:
    """Shows what ``draw()`` draws, and below it, where ipywidgets is installed, a control for each of its arguments.

    ``choices``  argument -> the values that it can take: a slider for numbers, a menu for all else. It begins at the
                 argument's default, which must be one of them.

    Raises ValueError if an argument cannot be given by name, has no default, or one that is not among the choices.
    """
    listed = {name: list(values) for name, values in choices.items()}
    start = {name: values[_start(draw, name, values)] for name, values in listed.items()}
    first = png(draw(**start))
    _show(first, inspect.getdoc(draw) or "what is drawn at first")
    try:
        import ipywidgets  # noqa: F401  whether it is there is the question
        from IPython.display import display
    except ImportError:
        print(NO_SLIDERS.format(getattr(draw, "__name__", "draw")))
        return None
    sliders = Sliders(draw, listed, start, first)
    display(sliders.box)
    return sliders


def _start(draw: Callable[..., Picture], name: str, values: list[Any]) -> int:
    """Which of the values is the argument's default."""
    parameter = inspect.signature(draw).parameters.get(name)
    if parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        default = parameter.default
        for place, value in enumerate(values):
            if value == default:
                return place
    raise ValueError(f"{name} must be an argument with a default among its choices, {values}")


class Sliders:
    """One control an argument, one picture, and a line that says what went wrong, if something did.

    ``controls``  argument -> widget, whose ``value`` can be set by a program as well
    ``image``     the picture; it stays as it was if ``draw`` fails, and ``error`` says why
    """

    def __init__(
        self, draw: Callable[..., Picture], choices: dict[str, list[Any]], start: dict[str, Any], first: bytes
    ) -> None:
        """``first``: what it draws at the start."""
        import ipywidgets

        self._draw = draw
        self.controls = {name: _control(name, values, start[name]) for name, values in choices.items()}
        self.image = ipywidgets.Image(value=first, format="png", layout={"max_width": "100%"})
        self.error = ipywidgets.HTML()
        self.box = ipywidgets.VBox([*self.controls.values(), self.error, self.image])
        for control in self.controls.values():
            control.observe(self._redraw, names="value")  # of all that a control reports, only the value: one run each

    def _redraw(self, _change: Any) -> None:
        try:
            self.image.value = png(self._draw(**{name: control.value for name, control in self.controls.items()}))
            self.error.value = ""
        except Exception as error:  # of any kind: it is the reader's own function, and the next change may work
            self.error.value = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"


def _control(name: str, values: list[Any], value: Any) -> ipywidgets.Widget:
    import ipywidgets

    numbers = all(isinstance(each, Real) and not isinstance(each, (bool, np.bool_)) for each in values)
    return (ipywidgets.SelectionSlider if numbers else ipywidgets.Dropdown)(
        options=[(str(each), each) for each in values],  # as pairs: a pair alone would be taken for one
        index=next(place for place, each in enumerate(values) if each is value),
        description=name.replace("_", " "),
        style={"description_width": "9em"},
        layout={"width": "min(34em, 100%)"},
        **({"continuous_update": False} if numbers else {}),
    )
