"""Sliders change one picture in place, and where there are none a picture stands."""

import builtins

import ipywidgets
import numpy as np
import pytest
from matplotlib import pyplot
from PIL import Image

from minibatch import ContinuousBatching, Engine, PagedKVCache, Request, SamplingParams, ToyModel, notebook, plots

RUNS = []


def draw(batch=2, blocks=16, order="fcfs"):
    RUNS.append((batch, blocks, order))
    engine = Engine(ToyModel(), ContinuousBatching(batch), PagedKVCache(blocks, 4))
    engine.run([Request(range(5), SamplingParams(max_tokens=8), f"r{i}") for i in range(4)])
    return plots.membership(engine.trace)


@pytest.fixture
def shown(monkeypatch):
    """What goes to the output of the cell."""
    RUNS.clear()
    outputs = []
    monkeypatch.setattr("IPython.display.display", outputs.append)
    yield outputs
    assert pyplot.get_fignums() == []


def test_show_is_a_png_with_its_words(shown):
    notebook.show(draw(), alt="four requests in two places")
    (image,) = shown
    assert image.data.startswith(b"\x89PNG") and image.alt == "four requests in two places"
    axes = plots.latencies(plots_trace())
    notebook.show(axes)
    notebook.show(axes[0].figure)
    assert shown[1].data == shown[2].data != shown[0].data


def plots_trace():
    engine = Engine(ToyModel(), ContinuousBatching(2), PagedKVCache(16, 4))
    engine.run([Request(range(5), SamplingParams(max_tokens=8), f"r{i}") for i in range(4)])
    return engine.trace


def test_five_changes_are_five_runs_and_one_picture(shown):
    """Fault (NB-01 of public notebooks): each move of a slider adds a picture below, or runs several times."""
    sliders = notebook.explore(draw, batch=range(1, 7), blocks=[8, 16], order=["fcfs", "fair"])
    static, box = shown
    assert static.data == sliders.image.value and len(RUNS) == 1
    for batch in (1, 3, 4, 5, 6):
        before = sliders.image.value
        sliders.controls["batch"].value = batch
        assert RUNS[-1] == (batch, 16, "fcfs")
        assert sliders.image.value != before or batch > 4  # more places than requests: the same picture
    assert len(RUNS) == 6 and len(shown) == 2
    pictures = [child for child in box.children if isinstance(child, ipywidgets.Image)]
    assert len(pictures) == 1
    sliders.controls["batch"].value = 6  # no change, no run
    assert len(RUNS) == 6


def test_numbers_are_sliders_and_all_else_menus(shown):
    sliders = notebook.explore(draw, batch=range(1, 7), order=["fcfs", "fair"])
    assert isinstance(sliders.controls["batch"], ipywidgets.SelectionSlider)
    assert isinstance(sliders.controls["order"], ipywidgets.Dropdown)
    assert not sliders.controls["batch"].continuous_update


@pytest.mark.parametrize(
    ("values", "default", "slider"),
    [
        (np.arange(1, 4), 2, True),
        (np.linspace(0, 1, 3), 0.5, True),
        ((n for n in (1, 2)), 1, True),
        ([True, False], False, False),
        ([(1, 2), (3, 4)], (3, 4), False),
        ([("x", 5), ("y", 6)], ("x", 5), False),
        ([None, 3], None, False),
    ],
)
def test_choices_of_any_type(shown, values, default, slider):
    """Fault: a pair is taken for a label and its value, a generator is used up, numpy's integers are no numbers."""
    got = []

    def each(value=default):
        got.append(value)
        return draw()

    control = notebook.explore(each, value=values).controls["value"]
    assert isinstance(control, ipywidgets.SelectionSlider) is slider
    control.index = 1 - control.index
    assert got[0] == default and got[1] != default and len(got) == 2


def test_figures_of_pyplot_are_closed_and_other_answers_refused(shown):
    """Fault: each change leaves a figure open, which Jupyter shows once more at the end of the cell."""

    def plotted(size=1):
        return pyplot.subplots(1, size)[1]

    sliders = notebook.explore(plotted, size=[1, 2])
    sliders.controls["size"].value = 2
    assert pyplot.get_fignums() == []
    for answer in (None, {}, [], "text"):
        with pytest.raises(TypeError, match="a picture is a figure or its axes"):
            notebook.png(answer)


def test_an_argument_can_have_any_name(shown):
    def named(draw=1, self=2):
        return globals()["draw"]()

    assert set(notebook.explore(named, draw=[1, 2], self=[2, 3]).controls) == {"draw", "self"}


def test_an_error_is_said_and_the_next_change_works(shown):
    """Fault: an exception in a callback is swallowed, or ends the reaction to further changes."""

    def fails(size=1):
        if size == 2:
            raise ValueError("size <2> is not possible")
        return draw(batch=size)

    sliders = notebook.explore(fails, size=[1, 2, 3])
    picture = sliders.image.value
    sliders.controls["size"].value = 2
    assert "ValueError: size &lt;2&gt; is not possible" in sliders.error.value
    assert sliders.image.value == picture
    sliders.controls["size"].value = 3
    assert sliders.error.value == "" and sliders.image.value != picture


def test_without_ipywidgets_the_picture_stands_alone(shown, monkeypatch, capsys):
    """Fault (NB-03): nothing to see where widgets are not installed."""
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "ipywidgets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert notebook.explore(draw, batch=[1, 2]) is None
    assert len(shown) == 1 and shown[0].data.startswith(b"\x89PNG")
    assert "pip install ipywidgets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("choices", "message"),
    [({"batch": [3, 4]}, "batch must be an argument with a default"), ({"size": [1]}, "size must be an argument")],
)
def test_choices_that_do_not_fit_the_function(shown, choices, message):
    with pytest.raises(ValueError, match=message):
        notebook.explore(draw, **choices)
    assert shown == []


def test_a_picture_is_the_same_file_each_time(tmp_path):
    assert notebook.png(draw()) == notebook.png(draw())
    (tmp_path / "a.png").write_bytes(notebook.png(draw()))
    assert Image.open(tmp_path / "a.png").width == 960
