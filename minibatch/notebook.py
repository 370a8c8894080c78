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
from collections.abc import Callable, Sequence
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
    """The figure, or the figure of these axes, as a PNG file; the same figure gives the same bytes."""
    figure = picture if isinstance(picture, Figure) else np.ravel(picture)[0].figure
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def show(picture: Picture, alt: str = "") -> None:
    """Shows a figure, or the figure of some axes, in the output of the cell; ``alt``: what it shows, in words."""
    from IPython.display import Image, display

    display(Image(png(picture), alt=alt or None))


def explore(draw: Callable[..., Picture], **choices: Sequence[Any]) -> Sliders | None:
    """Shows what ``draw()`` draws, and below it, where ipywidgets is installed, a control for each of its arguments.

    ``choices``  argument -> the values that it can take: a slider for numbers, a menu for all else. It begins at the
                 argument's default, which must be one of them.

    Raises ValueError if an argument has no default, or one that is not among the choices.
    """
    start = _defaults(draw, choices)
    show(draw(**start), inspect.getdoc(draw) or f"{draw.__name__}() with its defaults")
    try:
        import ipywidgets  # noqa: F401  whether it is there is the question
        from IPython.display import display
    except ImportError:
        print(NO_SLIDERS)
        return None
    sliders = Sliders(draw, choices, start)
    display(sliders.box)
    return sliders


def _defaults(draw: Callable[..., Picture], choices: dict[str, Sequence[Any]]) -> dict[str, Any]:
    parameters = inspect.signature(draw).parameters
    start = {}
    for name, values in choices.items():
        if name not in parameters or parameters[name].default not in list(values):
            raise ValueError(f"{name} must be an argument with a default among its choices, {list(values)}")
        start[name] = parameters[name].default
    return start


class Sliders:
    """One control an argument, one picture, and a line that says what went wrong, if something did.

    ``controls``  argument -> widget, whose ``value`` can be set by a program as well
    ``image``     the picture; it stays as it was if ``draw`` fails, and ``error`` says why
    """

    def __init__(self, draw: Callable[..., Picture], choices: dict[str, Sequence[Any]], start: dict[str, Any]) -> None:
        import ipywidgets

        self._draw = draw
        self.controls = {name: _control(name, list(values), start[name]) for name, values in choices.items()}
        self.image = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.error = ipywidgets.HTML()
        self.box = ipywidgets.VBox([*self.controls.values(), self.error, self.image])
        for control in self.controls.values():
            control.observe(self._redraw, names="value")  # of all that a control reports, only the value: one run each
        self._redraw()

    def _redraw(self, _change: Any = None) -> None:
        try:
            self.image.value = png(self._draw(**{name: control.value for name, control in self.controls.items()}))
            self.error.value = ""
        except Exception as error:  # of any kind: it is the reader's own function, and the next change may work
            self.error.value = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"


def _control(name: str, values: list[Any], value: Any) -> ipywidgets.Widget:
    import ipywidgets

    look = {
        "description": name.replace("_", " "),
        "style": {"description_width": "9em"},
        "layout": {"width": "min(34em, 100%)"},
    }
    if all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
        return ipywidgets.SelectionSlider(options=values, value=value, continuous_update=False, **look)
    return ipywidgets.Dropdown(options=values, value=value, **look)
