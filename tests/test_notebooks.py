"""The walk-throughs: each has its fixed form, runs, and is what a build of its text twin gives."""

import copy
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter

ROOT = Path(__file__).parents[1] / "notebooks"
spec = importlib.util.spec_from_file_location("build", ROOT / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

TWINS = build.twins([])
NAMES = [twin.stem for twin in TWINS]
QUESTIONS = ["question", "you will be able to", "before this", "minutes", "runs"]
ALIVE = ("explore(", "player.show(")
WIDE = 100  # letters of a printed line


def committed(twin):
    return nbformat.read(twin.with_suffix(".ipynb"), as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_all_fifteen_are_there():
    assert [name[:2] for name in NAMES] == [f"{number:02}" for number in range(15)]
    assert sorted(path.stem for path in ROOT.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_the_form(twin):
    """Fault: a notebook without its question, without a prediction before what it predicts, or without its limits."""
    cells = build.read(twin).cells
    first = cells[0].source
    assert first.startswith(f"# {twin.stem[:2]} · ")
    assert [word for word in QUESTIONS if f"**{word}" not in first.lower()] == []
    assert int(re.search(r"\*\*Minutes:\*\* (\d+)", first)[1]) <= 60
    headings = [
        line for cell in cells if cell.cell_type == "markdown" for line in re.findall("^## .*", cell.source, re.M)
    ]
    starts = [
        next((i for i, heading in enumerate(headings) if heading.startswith(start)), None)
        for start in ("## Predict", "## Try", "## What this does not show")
    ]
    assert None not in starts and starts == sorted(starts), headings
    assert "pyplot" not in twin.read_text(encoding="utf-8")


@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_the_committed_notebook_is_its_text_twin(twin):
    """Without running it: the same cells, ids and tags. (The outputs are compared by the slow test.)"""
    there = committed(twin)
    for new, old in zip(build.read(twin).cells, there.cells, strict=True):
        assert all(new.get(part) == old.get(part) for part in ("id", "cell_type", "source", "metadata"))
    nbformat.validate(there)


@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_what_a_code_host_shows(twin):
    """Fault (NB-03 of public notebooks): an output that is only a live widget, a traceback, a picture without words."""
    shown = outputs(committed(twin))
    assert shown and all(output.output_type in ("display_data", "execute_result", "stream") for output in shown)
    assert all(build.WIDGET not in output.get("data", {}) for output in shown)
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    assert pictures
    for cell in committed(twin).cells:
        assert cell.cell_type != "code" or cell.execution_count or not cell.source
        if cell.cell_type == "code" and cell.source.startswith(ALIVE):
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.id
    text = "\n".join(output.text for output in shown if output.output_type == "stream")
    assert [line for line in text.splitlines() if len(line) > WIDE] == []
    assert not re.search(r"object at 0x|/home/|/root/|/work/|/tmp/", text)


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_it_can_be_exported(twin):
    page, _ = HTMLExporter().from_notebook_node(committed(twin))
    assert page.count("<img") >= 1


def test_readme_lists_them():
    """Renew its table with: python notebooks/build.py --table"""
    assert build.table(TWINS, build.repository()) in (ROOT.parent / "README.md").read_text(encoding="utf-8")


def test_with_a_repository_there_are_badges_and_an_install_cell(monkeypatch):
    """Fault: a badge that opens another version than it installs, or installs another project's `minibatch` by name."""
    version = build.metadata.version("minibatch")
    row = build.table(TWINS[:1], "owner/name").splitlines()[-1]
    stem = TWINS[0].stem
    assert f"colab.research.google.com/github/owner/name/blob/v{version}/notebooks/{stem}.ipynb" in row
    assert f"mybinder.org/v2/gh/owner/name/v{version}?labpath=notebooks/{stem}.ipynb" in row
    monkeypatch.setattr(build, "repository", lambda: "owner/name")
    cells = build.read(TWINS[0]).cells
    assert f"git+https://github.com/owner/name@v{version}" in cells[1].source and cells[2].id == f"{stem[:2]}-01"
    nbformat.validate(build.read(TWINS[0]))


@pytest.mark.parametrize("name", ["https://github.com/owner/name", "https://github.com/owner/name/", None])
def test_the_repository_is_the_one_of_pyproject(monkeypatch, name):
    entries = [f"Repository, {name}"] if name else None
    monkeypatch.setattr(
        build.metadata, "metadata", lambda package: type("M", (), {"get_all": lambda self, key: entries})()
    )
    assert build.repository() == ("owner/name" if name else None)


CHANGES = {
    "cell 03-01: not what the text twin says": lambda cell, n: cell.update(source="1 + 2"),
    "cell 03-01: other text/plain": lambda cell, n: cell.outputs[0].data.update({"text/plain": "3"}),
    "cell 03-01: outputs ['text/plain', 'text/plain'] instead of ['text/plain']": lambda cell, n: cell.outputs.append(
        cell.outputs[0]
    ),
    "other metadata": lambda cell, n: n.metadata.pop("minibatch"),
    "1 cells instead of 2": lambda cell, n: n.cells.pop(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_notebook_that_is_not_current_is_noticed(what):
    """Fault: a check that cannot fail."""
    v4 = nbformat.v4
    output = v4.new_output("execute_result", {"text/plain": "2", "image/png": "abc"}, execution_count=1)
    output.data.pop("image/png")
    cell = v4.new_code_cell("1 + 1", id="03-01", outputs=[output], execution_count=1)
    meta = {"minibatch": {"matplotlib": "1"}}
    made = v4.new_notebook(cells=[v4.new_markdown_cell("# 03", id="03-00"), cell], metadata=meta)
    there = nbformat.from_dict(copy.deepcopy(made))
    assert build.differences(made, there) == []
    CHANGES[what](there.cells[1], there)
    assert build.differences(made, there) == [what]


def test_other_pictures_are_noticed_if_matplotlib_is_the_same():
    def notebook(matplotlib, picture, tags=()):
        output = nbformat.v4.new_output("display_data", {"image/png": picture})
        cell = nbformat.v4.new_code_cell("show()", id="03-00", outputs=[output], metadata={"tags": list(tags)})
        return nbformat.v4.new_notebook(cells=[cell], metadata={"minibatch": {"matplotlib": matplotlib}})

    assert build.differences(notebook("1", "a"), notebook("1", "b")) == ["cell 03-00: other image/png"]
    assert build.differences(notebook("2", "a"), notebook("1", "b")) == []
    assert build.differences(notebook("1", "a", ["measured"]), notebook("1", "b", ["measured"])) == []


@pytest.mark.parametrize(("names", "unknown"), [(["nope"], "nope"), (["03", "77"], "77")])
def test_an_unknown_name_is_an_error(names, unknown):
    with pytest.raises(ValueError, match=f"no notebook {unknown}: there are 00_"):
        build.twins(names)
    assert [twin.stem[:2] for twin in build.twins(["notebooks/03_x.ipynb".replace("_x", "")])] == ["03"]


@pytest.mark.slow
def test_a_failing_cell_is_named_and_the_others_are_built(tmp_path, monkeypatch, capsys):
    """Fault: one notebook that fails hides what became of the rest."""
    (tmp_path / "01_bad.py").write_text("# %% [markdown]\n# # bad\n\n# %%\n1 / 0\n")
    (tmp_path / "02_good.py").write_text("# %% [markdown]\n# # good\n\n# %%\n1 + 1\n")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr("sys.argv", ["build.py"])
    assert build.main() == 1
    out = capsys.readouterr().out
    assert "01_bad: cell 01-01 failed: ZeroDivisionError: division by zero" in out and "wrote 02_good.ipynb" in out


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_a_build_gives_what_is_there(twin):
    """Renew it with: python notebooks/build.py NAME"""
    assert build.differences(build.build(twin), committed(twin)) == []


@pytest.mark.slow
@pytest.mark.parametrize("twin", [twin for twin in TWINS if any(word in twin.read_text() for word in ALIVE)], ids=str)
def test_it_runs_without_ipywidgets(twin, tmp_path, monkeypatch):
    """Fault: a notebook that needs live widgets to have something to show."""
    (tmp_path / "ipywidgets.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for output in outputs(build.build(twin)):
        assert output.output_type in ("display_data", "execute_result", "stream")
