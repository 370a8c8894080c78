"""The committed pictures are the ones that are drawn here, from data that are what they say; all can be read."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import image, pyplot
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from minibatch import ToyModel, Trace, figures, figures_runs, run_table, studies
from minibatch.accounting import work
from minibatch.cli import main
from minibatch.compare import Setup
from minibatch.compare_report import plain
from minibatch.figures import PICTURES, How
from minibatch.membership_plot import THIN
from minibatch.plot_style import FOUND, LINES, MEMORY, RESIDENT, SERIES, TOKENS, footer

COMMITTED = Path(__file__).parents[1] / "figures"
EACH = [name if name == "abc" else pytest.param(name, marks=pytest.mark.slow) for name in PICTURES]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Another directory with the committed data."""
    directory = tmp_path_factory.mktemp("figures")
    shutil.copytree(COMMITTED / "data", directory / "data")
    return directory


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No pyplot figure stays open, and no global setting of matplotlib is changed."""
    before = dict(mpl.rcParams)
    yield
    assert pyplot.get_fignums() == []
    assert dict(mpl.rcParams) == before


# ---------------------------------------------------------------- the committed files


def differences(directory: Path, name: str) -> list[str]:
    """The files of a picture that are not the committed ones. An SVG has to be the same in every byte, a PNG in every
    pixel (how these are compressed is of no interest)."""
    made = [path for path in directory.glob(f"{name}.*") if path.suffix in (".svg", ".png")]
    made += (directory / "data").glob(f"{name}*")
    return [
        str(path.relative_to(directory)) for path in made if not same(path, COMMITTED / path.relative_to(directory))
    ]


def same(made: Path, committed: Path) -> bool:
    if not committed.is_file():
        return False
    if made.suffix == ".png":
        return np.array_equal(image.imread(made), image.imread(committed))
    return made.read_bytes() == committed.read_bytes()


def drawn_with(name: str) -> str:
    """The version of matplotlib that an SVG names."""
    return re.search(r"Matplotlib v([\w.+]+)", (COMMITTED / f"{name}.svg").read_text(encoding="utf-8"))[1]


@pytest.mark.parametrize("name", EACH)
def test_the_committed_picture_is_the_one_that_is_drawn_here(directory, name):
    """Fault: a picture or its data are of another program than this one; or drawing depends on the process, on the
    time, on the user's own style, on anything but the data."""
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "pink", "svg.fonttype": "path", "savefig.dpi": 50}):
        list(figures.make([name], directory, redraw=True))
    differ = differences(directory, name)
    if drawn_with(name) != mpl.__version__:
        differ = [path for path in differ if path.startswith("data/")]
    assert not differ, f"in figures/: {', '.join(differ)}. `{PICTURES[name].command}` makes them anew"
    if drawn_with(name) != mpl.__version__:
        pytest.skip(f"figures/{name}.svg is of matplotlib {drawn_with(name)}, here is {mpl.__version__}: only the data")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vtc", "negative"])
def test_a_study_run_again_has_the_committed_numbers(name):
    """Fault: the tables beside a picture are of another program than this one. The two that take the least time stand
    for all. Not byte for byte: another processor may round a logarithm in another way."""
    study = studies.run(name, progress=False)
    facts = json.loads((COMMITTED / "data" / f"reproduce-{name}.json").read_text(encoding="utf-8"))
    assert {**study.facts(), "data": [*study.data]} == facts, f"`minibatch figures reproduce-{name}` renews it"
    for part, table in study.data.items():
        path = COMMITTED / "data" / f"reproduce-{name}-{part}.csv"
        pd.testing.assert_frame_equal(table, pd.read_csv(path), rtol=1e-9, check_dtype=False, obj=path.name)


def test_the_directory_has_what_its_readme_names_and_nothing_else():
    """Fault: a picture that nothing makes, or a README that was edited by hand."""
    assert (COMMITTED / "README.md").read_text(encoding="utf-8") == figures.describe()
    pictures = {f"{name}.{suffix}" for name in PICTURES for suffix in ("svg", "png")}
    assert {path.name for path in COMMITTED.iterdir()} - {"data", "README.md"} == pictures
    data = {path.name for path in (COMMITTED / "data").iterdir()}
    parts = {f"{name}.csv" for name in PICTURES if not name.startswith("reproduce-")} | {"compare.json"}
    parts |= {f"{name}.trace.jsonl" for name in ("static", "continuous", "paged", "chunked")}
    for name in studies.STUDIES:
        known = json.loads((COMMITTED / "data" / f"reproduce-{name}.json").read_text(encoding="utf-8"))
        parts |= {f"reproduce-{name}.json", *(f"reproduce-{name}-{part}.csv" for part in known["data"])}
    assert data == parts


# ---------------------------------------------------------------- the data behind


@pytest.fixture(scope="module")
def measured():
    return figures_runs.measured(COMMITTED / "data")


def test_the_measured_traces_are_of_the_run_whose_numbers_are_beside_them(measured):
    """Fault: traces and numbers of two runs, or a measured picture of a simulated one."""
    kept = json.loads((COMMITTED / "data" / "compare.json").read_text(encoding="utf-8"))
    assert kept["kind"] == "measured" and not any(trace.simulated for trace in measured.values())
    table = run_table.table(measured)
    for name, configuration in kept["configurations"].items():
        numbers = {" ".join(column): plain(table.loc[name, column]) for column in table.columns}
        assert configuration["numbers"] == {key: numbers[key] for key in configuration["numbers"]}
        assert configuration["equality"]["holds"]


def test_the_seed_example_by_hand():
    """Oracle: a batch of 18, 73 and 141 decodes executes 3 * 141 = 423 rows, of which 18 + 73 + 141 = 232 are useful.
    Fault: bars of the table that are not those of the runs."""
    table = figures_runs.membership_table(figures_runs.abc())
    static = table[table["run"] == "static"]
    widths = (static["right"] - static["left"]).groupby(static["kind"]).sum()
    assert widths["decode"] + widths["prefill"] == 232 + 3 and widths["dead_padding"] == 423 - 232
    assert static[static["kind"] == "finished"].set_index("request")["left"].to_dict() == {
        "A": 18.5,
        "B": 73.5,
        "C": 141.5,
    }


def test_the_tables_of_a_run_are_its_totals(measured):
    """Fault: a column of the wrong kind, or iterations that are missing."""
    tokens = figures_runs.tokens_table(measured).groupby("run").sum(numeric_only=True)
    memory = figures_runs.memory_table(measured)
    latencies = figures_runs.latency_table(measured)
    for name, trace in measured.items():
        done, row = work(trace), tokens.loc[name]
        assert (row["prefill"], row["decode"], row["dead_padding"]) == (done.prefill, done.decode, done.dead_padding)
        assert row[["prefill", "decode", "recomputed", "padding"]].sum() == done.executed
        counts = latencies[latencies["run"] == name]["measure"].value_counts()
        assert counts["ttft"] == len(trace.timelines)
        assert counts["tbt"] == sum(len(timeline.token_times) - 1 for timeline in trace.timelines)
    parts = ["kv_filled", "kv_fragmentation", "kv_reserved", "kv_cached", "kv_free"]
    assert (memory[parts].sum(axis=1) == memory["kv_capacity"]).all()
    assert len(memory) == sum(len(trace.steps) for trace in measured.values())


def test_a_table_comes_back_from_the_disk_as_it_was(tmp_path):
    """Fault: a picture drawn from the file is another one than that of the run: digits, infinities, types."""
    table = pd.DataFrame(
        {
            "name": ["a, b", 'a "b"', "±"],
            "number": [0.1 + 0.2, 1 / 3, 1e-300],
            "odd": [np.inf, np.nan, -0.0],
            "count": [1, 2, 3],
            "flag": [True, False, True],
        }
    )
    figures._write(table, tmp_path / "table.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "table.csv"), table, rtol=1e-14)  # pandas 2 loses a digit


# ---------------------------------------------------------------- measuring


@pytest.mark.slow
def test_a_new_measured_run_is_written_and_drawn(monkeypatch, tmp_path, capsys):
    """Fault: --measure draws the old traces. (The toy and four requests stand for the real run.)"""
    few = Setup(num_requests=4, workload="short", max_tokens=8)
    monkeypatch.setattr(figures_runs, "load_model", lambda name: ToyModel())
    monkeypatch.setattr(figures_runs.compare, "Setup", lambda: few)
    assert main(["figures", "latency", "--measure", "--quiet", "--out", str(tmp_path)]) == 0
    assert "latency.svg, latency.png, data/latency.csv" in capsys.readouterr().out
    assert json.loads((tmp_path / "data" / "compare.json").read_text())["setup"]["num_requests"] == 4
    table = pd.read_csv(tmp_path / "data" / "latency.csv")
    assert set(table["run"]) == {"static", "continuous", "paged", "chunked"}
    assert "simulated" in (tmp_path / "latency.svg").read_text()


def test_no_picture_is_made_of_a_run_with_wrong_tokens(monkeypatch, tmp_path):
    """Fault: pictures of an engine that computes something else."""

    class Wrong:
        holds, runs, traces = False, {}, {}

    monkeypatch.setattr(figures_runs, "load_model", lambda name: ToyModel())
    monkeypatch.setattr(figures_runs.compare, "run", lambda *arguments: Wrong)
    with pytest.raises(ValueError, match="tokens differ from solo generation"):
        list(figures.make(["latency"], tmp_path, measure=True, progress=False))
    assert not list(tmp_path.rglob("latency*"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["abd"], "no picture abd: there are membership, kv_memory, "),
        (["abc", "--measure"], "none of abc is measured"),
        (["latency"], "static.trace.jsonl, which is not there; --measure makes it"),
        (["reproduce-vtc", "--redraw"], "reproduce-vtc.json is needed and is not there; without --redraw it is made"),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anything_is_written(arguments, message, tmp_path, capsys):
    """Fault: minutes of work, and then an error; or half a directory."""
    assert main(["figures", *arguments, "--out", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_readme_of_somebody_else_is_not_overwritten(tmp_path, capsys):
    """Fault: `--out .` replaces the README of the project."""
    (tmp_path / "README.md").write_text("# mine\n")
    assert main(["figures", "abc", "--out", str(tmp_path), "--quiet"]) == 2
    assert "README.md is there and is not ours" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "# mine\n" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("broken", ["{", '{"data": ["together"]}'])
def test_a_table_that_is_missing_or_broken_is_named(broken, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "reproduce-vtc.json").write_text(broken)
    assert main(["figures", "reproduce-vtc", "--redraw", "--out", str(tmp_path), "--quiet"]) == 2
    assert "reproduce-vtc" in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


# ---------------------------------------------------------------- to be read by everybody


@pytest.mark.parametrize("name", EACH)
def test_a_picture_can_be_read(directory, name):
    """Fault: too wide for a page, letters too small at that width, cut off, or not said what kind of numbers it has."""
    picture = PICTURES[name]
    figure = picture.draw(How(directory / "data", redraw=True))
    assert 800 <= figure.get_figwidth() * figure.dpi <= 1000
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) >= 7
    assert picture.kind in figure.get_supxlabel()
    for box in (part.get_tightbbox() for part in (*figure.axes, figure._supxlabel)):
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, box
    svg = (COMMITTED / f"{name}.svg").read_text(encoding="utf-8")
    assert svg.count("<text") > 10 and picture.kind in svg and "<dc:date>" not in svg


def test_simulated_numbers_do_not_depend_on_the_versions_of_others():
    """Fault: a picture changes with a version of torch that it has nothing to do with; or a measured one hides it."""
    versions = {"python": "3.11", "minibatch": "1.0", "torch": "2.9"}
    assert footer([Trace({"seed": 1, "versions": versions})]) == "simulated time · seed 1 · minibatch 1.0"
    assert footer([Trace({"clock": "real", "versions": versions})]).endswith("python 3.11, minibatch 1.0, torch 2.9")


# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB: what those see who lack one kind of cone.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(color: str, matrix=((1, 0, 0), (0, 1, 0), (0, 0, 1))) -> np.ndarray:
    """CIELAB, where a distance of about 2 can just be seen side by side; the first number is the lightness."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x = XYZ @ np.clip(np.array(matrix) @ linear, 0, 1) / WHITE
    f = np.where(x > 216 / 24389, np.cbrt(x), (24389 / 27 * x + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# What can be in one picture: by name, the colour, and the hatch, stroke, mark or height that helps to tell it apart.
TOGETHER = {
    "tokens": {kind: (look.color, look.hatch) for kind, look in TOKENS.items()}
    | {"found": (FOUND.color, FOUND.hatch), "resident": (RESIDENT.color, THIN)},
    "memory": {kind: (look.color, look.hatch) for kind, look in MEMORY.items()},
    "lines": {kind: (style["color"], style["linestyle"]) for kind, (_, style) in LINES.items()},
    "bars of what is compared": {str(i): (series["color"], None) for i, series in enumerate(SERIES)},
    "lines of what is compared": {str(i): ("black", (s["marker"], s["linestyle"])) for i, s in enumerate(SERIES)},
}


@pytest.mark.parametrize("together", TOGETHER)
def test_kinds_can_be_told_apart_in_greyscale_and_by_colour_blind_readers(together):
    """Fault: two kinds that differ for some readers only. In greyscale by lightness or by hatch, stroke, mark or
    height; in simulated colour blindness by their colours too, for areas without a hatch."""
    for (one, (color, form)), (other, (second, its)) in itertools.combinations(TOGETHER[together].items(), 2):
        if form != its:
            continue
        assert abs(lab(color)[0] - lab(second)[0]) >= 9, f"{one} and {other} are alike in greyscale"
        for kind, matrix in BLINDNESS.items():
            apart = np.linalg.norm(lab(color, matrix) - lab(second, matrix))
            assert apart >= 15, f"{one} and {other} are alike with {kind}"


def test_a_colour_of_a_kind_is_of_nothing_else():
    """Fault: a reader takes a system for prefill because it is blue. Light blue is one kind: found, or kept to be."""
    of_kinds = [look.color for look in (*TOKENS.values(), *MEMORY.values(), RESIDENT)]
    assert len(set(of_kinds)) == len(of_kinds) and FOUND.color == MEMORY["cached"].color
    for series in SERIES:
        distances = [np.linalg.norm(lab(series["color"]) - lab(color)) for color in of_kinds]
        assert min(distances) > 25
    sources = [path.read_text(encoding="utf-8") for path in Path(studies.__file__).parent.glob("*_plot.py")]
    written = {color.upper() for source in sources for color in re.findall(r"#[0-9A-Fa-f]{6}", source)}
    assert all(len({color[1:3], color[3:5], color[5:7]}) == 1 for color in written), (
        "studies take colours from the style"
    )
