"""The stepper in Jupyter: a slider, buttons, and one HTML widget that shows what the file would show.

A picture of the runs is shown first, as an output of its own: that is what remains where no kernel runs, and all there
is without ipywidgets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

from minibatch import notebook, plots
from minibatch.player.page import Show, legend
from minibatch.player.style import style
from minibatch.trace import Trace

NO_WIDGETS = "pip install ipywidgets to step through the run here"
NO_KERNEL = "<p>The stepper is here as long as a kernel runs; the picture above is what it begins with.</p>"
MILLISECONDS = 250  # between two steps of play


def show(traces: Mapping[str, Trace]) -> Player | None:
    """Displays the picture, and the stepper below it; returns it, or None without ipywidgets."""
    from IPython.display import display

    stage = Show.of(traces)  # before anything is shown: it may refuse
    several = len(traces) > 1
    picture = plots.compare_figures(traces)["membership"] if several else plots.membership(*traces.values())
    notebook.show(picture, f"Who takes part in which iteration: {', '.join(traces)}")
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        print(NO_WIDGETS)
        return None
    player = Player(stage)
    display({**player.box._repr_mimebundle_(), "text/html": NO_KERNEL}, raw=True)
    return player


class Player:
    """The controls and what they change. ``slider.value`` is the moment; ``view.value`` the HTML of all runs then."""

    def __init__(self, stage: Show) -> None:
        import ipywidgets as widgets

        self.stage = stage
        last = len(stage.moments) - 1
        self.slider = widgets.IntSlider(0, 0, last, description="moment", layout={"width": "min(40em, 100%)"})
        self.play = widgets.Play(value=0, min=0, max=last, interval=MILLISECONDS)
        widgets.link((self.play, "value"), (self.slider, "value"))
        self.buttons = {
            name: widgets.Button(description=name, layout={"width": "auto"}, tooltip=tooltip)
            for name, tooltip in {
                "|<": "previous event",
                "<": "step back",
                ">": "step on",
                ">|": "next event",
            }.items()
        }
        for name, button in self.buttons.items():
            button.on_click(lambda _, name=name: self.move(name))
        self.says, self.view = widgets.HTML(), widgets.HTML()
        controls = [self.play, *self.buttons.values(), self.slider]
        foot = f"<div class=mb>{legend()}<footer>{stage.signature}</footer></div>"
        self.box = widgets.VBox(
            [
                widgets.HTML(f"<style>{style()}</style>"),
                widgets.HBox(controls, layout={"flex_flow": "row wrap"}),
                self.says,
                self.view,
                widgets.HTML(foot),
            ]
        )
        self.slider.observe(self._draw, "value")
        self._draw()

    def _ipython_display_(self) -> None:
        """Nothing, where a cell ends with ``show``: it has been shown."""

    def move(self, name: str) -> None:
        """What a button does."""
        now, jumps = self.slider.value, self.stage.jumps
        before, after = bisect_left(jumps, now) - 1, bisect_right(jumps, now)
        there = {
            "|<": jumps[before] if before >= 0 else now,
            "<": now - 1,
            ">": now + 1,
            ">|": jumps[after] if after < len(jumps) else now,
        }
        self.slider.value = min(max(there[name], 0), self.slider.max)

    def _draw(self, _change: Any = None) -> None:
        number = self.slider.value
        said = self.stage.says(self.stage.moments[number])
        self.says.value = f"<div class=mb role=status aria-live=polite>{said}</div>"
        self.view.value = f"<div class=mb>{self.stage.html(number)}</div>"
