"""Builds the notebooks from their text twins, or checks that they are what a build gives.

    python notebooks/build.py [NAME ...]            executes and writes notebooks/NAME.ipynb
    python notebooks/build.py --check [NAME ...]    executes, and says what differs from what is there
    python notebooks/build.py --table [NAME ...]    prints README's table of the notebooks

``NAME.py`` (jupytext's percent format) is what people edit and review. A build is reproducible: a cell's id is the
notebook's number and the cell's place, nothing says when or how fast a cell ran, and live widgets are left out (beside
each of them stands a picture). Cells with the tag ``measured`` took times on some machine, so of their outputs only the
kinds are compared; all others must be equal, byte for byte with the matplotlib that the notebook names.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path

import jupytext
import matplotlib
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).parent
TIMEOUT = 120  # seconds a cell
WIDGET = "application/vnd.jupyter.widget-view+json"
COLAB, BINDER = "https://colab.research.google.com/github", "https://mybinder.org/v2/gh"


def twins(names: list[str]) -> list[Path]:
    """The text twins of all notebooks, or of those whose names begin with one of ``names``.

    Raises ValueError for a name that none begins with.
    """
    every = sorted(HERE.glob("[0-9][0-9]_*.py"))
    begins = tuple(Path(name).stem for name in names)  # so that a file can be named as well
    if unknown := [
        begin for begin in begins if not any(path.stem.startswith(begin) for path in every)
    ]:
        raise ValueError(
            f"no notebook {', '.join(unknown)}: there are {', '.join(path.stem for path in every)}"
        )
    return [path for path in every if not names or path.stem.startswith(begins)]


def read(twin: Path) -> nbformat.NotebookNode:
    """The notebook without outputs."""
    notebook = jupytext.read(twin)
    for place, cell in enumerate(notebook.cells):
        cell.id = f"{twin.stem[:2]}-{place:02}"
    if name := repository():
        notebook.cells.insert(1, install_cell(name))
    notebook.metadata = nbformat.from_dict(
        {
            "jupytext": {"formats": "ipynb,py:percent"},
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {
                "name": "python",
                "file_extension": ".py",
                "mimetype": "text/x-python",
            },
            "minibatch": {"matplotlib": matplotlib.__version__},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def repository() -> str | None:
    """``OWNER/NAME`` on GitHub, if ``[project.urls]`` of pyproject.toml names a Repository there."""
    urls = dict(
        entry.split(", ", 1)
        for entry in metadata.metadata("minibatch").get_all("Project-URL") or ()
    )
    return urls.get("Repository", "").partition("github.com/")[2].strip("/") or None


def install_cell(name: str) -> nbformat.NotebookNode:
    """For machines on which nothing is installed, such as Colab's: this release from its tag. (By name it would be
    somebody else's package: `minibatch` on PyPI is another project.)"""
    release = f'"minibatch[notebooks] @ git+https://github.com/{name}@v{metadata.version("minibatch")}"'
    source = f'import importlib.util\n\nif importlib.util.find_spec("minibatch") is None:\n    %pip install -q {release}'
    return nbformat.v4.new_code_cell(source, id="install", metadata={"tags": ["install"]})


def table(chosen: list[Path], name: str | None) -> str:
    """The notebooks in Markdown: question, minutes, and badges if there is a repository that they can open."""
    lines = ["| notebook | question | minutes | runs |", "|---|---|---|---|"]
    for twin in chosen:
        first = read(twin).cells[0].source
        title = re.search(r"# (.*)", first)[1]
        question, minutes, runs = (
            " ".join(
                re.search(rf"\*\*{word}\*\*\s+(.*?)(?=\s·|\n\n|\Z)", first, re.DOTALL)[
                    1
                ].split()
            )
            for word in ("Question.", "Minutes:", "Runs:")
        )
        badges = f" {_badges(twin.stem, name)}" if name else ""
        lines.append(
            f"| [{title}](notebooks/{twin.stem}.ipynb){badges} | {question} | {minutes} | {runs} |"
        )
    return "\n".join(lines)


def _badges(stem: str, name: str) -> str:
    path, tag = f"notebooks/{stem}.ipynb", f"v{metadata.version('minibatch')}"
    colab = f"[![Colab](https://colab.research.google.com/assets/colab-badge.svg)]({COLAB}/{name}/blob/{tag}/{path})"
    return f"{colab} [![Binder](https://mybinder.org/badge_logo.svg)]({BINDER}/{name}/{tag}?labpath={path})"


def build(twin: Path) -> nbformat.NotebookNode:
    """The executed notebook. Raises RuntimeError that names the cell which fails or takes too long."""
    notebook = read(twin)
    metadata = notebook.metadata.copy()
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        record_timing=False,
        coalesce_streams=True,  # else how a cell's lines are grouped depends on the moment
        resources={"metadata": {"path": HERE}},
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        cell = next(
            (c.id for c in notebook.cells if c.cell_type == "code" and _unfinished(c)), "?"
        )
        last = re.sub(r"\x1b\[[\d;]*m", "", str(error).strip().splitlines()[-1])
        raise RuntimeError(f"{twin.stem}: cell {cell} failed: {last}") from error
    notebook.metadata = metadata  # without what the kernel says of itself
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_noise(output)]
    return notebook


def _unfinished(cell: nbformat.NotebookNode) -> bool:
    return cell.execution_count is None or any(
        output.output_type == "error" for output in cell.outputs
    )


def _is_noise(output: nbformat.NotebookNode) -> bool:
    """Live widgets, which show nothing without a kernel, and progress bars."""
    return WIDGET in output.get("data", {}) or output.get("name") == "stderr"


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def differences(built: nbformat.NotebookNode, there: nbformat.NotebookNode) -> list[str]:
    """What differs, a line each; nothing if the notebook is current. (See :func:`same_matplotlib` for pictures.)"""
    if len(built.cells) != len(there.cells):
        return [f"{len(there.cells)} cells instead of {len(built.cells)}"]
    new, old = (
        {**n.metadata, "minibatch": {}, "minor": n.nbformat_minor} for n in (built, there)
    )
    found = [] if new == old and "minibatch" in there.metadata else ["other metadata"]
    pictures = same_matplotlib(built, there)
    for new, old in zip(built.cells, there.cells, strict=True):
        parts = ("id", "cell_type", "source", "metadata", "execution_count")
        if any(new.get(part) != old.get(part) for part in parts):
            found.append(f"cell {new.id}: not what the text twin says")
        elif new.cell_type == "code":
            measured = "measured" in new.metadata.get("tags", ())
            found += [
                f"cell {new.id}: {what}"
                for what in _outputs(new.outputs, old.outputs, measured, pictures)
            ]
    return found


def same_matplotlib(built: nbformat.NotebookNode, there: nbformat.NotebookNode) -> bool:
    """Whether pictures can be compared at all."""
    return built.metadata.minibatch == there.metadata.get("minibatch")


def _outputs(new: list, old: list, measured: bool, pictures: bool) -> list[str]:
    if [_kind(output) for output in new] != [_kind(output) for output in old]:
        return [f"outputs {[_kind(o) for o in old]} instead of {[_kind(o) for o in new]}"]
    if measured:
        return []
    pairs = zip(new, old, strict=True)
    return [
        f"other {_kind(n)}"
        for n, o in pairs
        if n != o and (pictures or _kind(n) != "image/png")
    ]


def _kind(output: nbformat.NotebookNode) -> str:
    data = output.get("data", {})
    return next(
        (kind for kind in ("image/png", "text/html", "text/plain") if kind in data),
        output.output_type,
    )


def check(twin: Path) -> list[str]:
    """What a build would change, a line each."""
    path = twin.with_suffix(".ipynb")
    if not path.exists():
        return ["is not there"]
    try:
        there, built = nbformat.read(path, as_version=4), build(twin)
    except (RuntimeError, nbformat.reader.NotJSONError) as error:
        return [str(error)]
    if not same_matplotlib(built, there):
        made, here = (
            each.metadata.get("minibatch", {}).get("matplotlib") for each in (there, built)
        )
        print(
            f"{path.name}: pictures are not compared: made with matplotlib {made}, here is {here}"
        )
    return differences(built, there)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name",
        nargs="*",
        metavar="NAME",
        help="the beginning of a notebook's name, such as 03",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if a notebook is not current",
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="print README's table of the notebooks, and build nothing",
    )
    options = parser.parse_args()
    try:
        chosen = twins(options.name)
    except ValueError as error:
        parser.error(str(error))
    if options.table:
        print(table(chosen, repository()))
        return 0
    failed = 0
    for twin in chosen:  # all of them, whatever becomes of one
        path = twin.with_suffix(".ipynb")
        if options.check:
            found = check(twin)
            failed += bool(found)
            print(
                "\n  ".join(
                    [f"{path.name}: {'not current' if found else 'current'}", *found]
                ),
                flush=True,
            )
            continue
        try:
            write(build(twin), path)
            print(f"wrote {path.name}", flush=True)
        except RuntimeError as error:
            failed += 1
            print(error, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
