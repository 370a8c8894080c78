"""README's words are run: its snippets as they stand there, its map against the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_snippets_on_the_toy_model_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, one_iteration, from_a_trace, *policies = SNIPPETS
    names = {}
    for snippet in (one_iteration, from_a_trace, *policies):
        exec(compile(snippet, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert "places: 2 of 2 taken" in said and "[['of 3', 'of 9']," in said and "FCFS() {'big': " in said
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "run.png", "run.json"}


@pytest.mark.slow
def test_the_snippet_on_the_real_model_runs(capsys):
    exec(compile(SNIPPETS[0], "README.md", "exec"), {})
    assert "queue" in capsys.readouterr().out.lower()


def test_the_map_names_every_file():
    package = ROOT / "minibatch"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    files = {"labs/checks/" if name.startswith("labs/checks/") else name for name in files}
    missing = {name for name in files - {"__init__.py", "__main__.py"} if f"`{name}`" not in README}
    assert not missing


def test_every_picture_that_is_shown_is_there_and_its_maker_is_named():
    made = (ROOT / "figures" / "README.md").read_text(encoding="utf-8")
    for picture in set(re.findall(r"\((figures/[^)]+\.(?:png|svg))\)", README)):
        assert (ROOT / picture).is_file() and f"`{Path(picture).name}`" in made
