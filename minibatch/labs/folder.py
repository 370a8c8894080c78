"""A student's folder: what ``minibatch lab new`` writes, and how the others find the student's file in it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from minibatch.labs import sources, words
from minibatch.labs.exercise import Exercise, Lab
from minibatch.labs.manifest import LABS

README = """# {title}

Lab `{name}`, {points} points, about {minutes} minutes. Afterwards you can

{goals}

Complete `{name}.py`, then, in this directory:

```
minibatch lab check .     # what is right, and a counter-example for what is not
minibatch lab run .       # the engine with your parts in it, and its pictures
```

Or work in `{name}.ipynb`, or run `pytest`. The exercises do not need each other: while one is checked, all else is the
package's own. The checks look at what your code does, never at how; when it is graded there may be others.

{exercises}

## What you can use

What `{name}.py` imports from the package, without the bodies.

<details><summary>Classes and functions</summary>

```python
{usable}
```

</details>
"""

ABOUT = """## {id} {title}

`{name}`, of `{module}` · {points} points · {length} · to read: notebook {notebook}

{task}

```python
{signature}
```{around}"""

AROUND = """

<details><summary>The rest of the class</summary>

```python
{source}
```

</details>"""

NOTEBOOK = """# {title}

Your code is in `{name}.py`, beside this notebook: open it in a second tab, save it, and run a cell here. (Or write a
part in a cell, and check that: `labs.check("{first}", my_part)`.)"""

TEST = '''"""The checks of lab {lab}, for pytest."""

import pytest

from minibatch import labs


@pytest.mark.parametrize("exercise", labs.ids("{lab}"))
def test_exercise(exercise, request):
    __tracebackhide__ = True
    labs.demand(exercise, request.path.with_name("{lab}.py"))
'''


def new(lab: Lab, directory: Path) -> list[Path]:
    """Writes the student's module, a notebook, a README and a file for pytest; returns their paths.

    Raises ValueError if one of them is there already: it may be somebody's work.
    """
    contents = {
        f"{lab.name}.py": sources.student_module(lab),
        f"{lab.name}.ipynb": notebook(lab),
        "README.md": readme(lab),
        f"test_{lab.name}.py": TEST.format(lab=lab.name),
    }
    paths = [directory / name for name in contents]
    if there := [path for path in paths if path.exists()]:
        raise ValueError(f"{there[0]} is there already: give the lab a directory of its own")
    directory.mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_text(content, encoding="utf-8")
    return paths


def find(place: Path) -> list[tuple[Lab, Path]]:
    """The labs whose files lie in a directory, or that a file is for. Raises ValueError if there is none."""
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    found = [(LABS[path.stem], path) for path in files if path.stem in LABS and path.is_file()]
    if not found:
        names = ", ".join(f"{name}.py" for name in LABS)
        raise ValueError(f"no lab in {place}: there would be one of {names} (minibatch lab new LAB makes them)")
    return found


def chosen(names: Sequence[str]) -> list[Lab]:
    """Labs by name. Raises ValueError for one that does not exist."""
    if unknown := [name for name in names if name not in LABS]:
        raise ValueError(f"no lab {', '.join(unknown)}: there are {', '.join(LABS)}")
    return [LABS[name] for name in names]


def readme(lab: Lab) -> str:
    """The lab in words: what it is for, and each exercise with the code around it."""
    return README.format(
        title=lab.title,
        name=lab.name,
        points=lab.points,
        minutes=lab.minutes,
        goals="\n".join(f"- {goal}" for goal in lab.goals),
        exercises="\n\n".join(map(_about, lab.exercises)),
        usable="\n\n\n".join(sources.usable(lab)) or "# nothing",
    )


def _about(exercise: Exercise) -> str:
    around = sources.surroundings(exercise)
    return ABOUT.format(
        **{**vars(exercise), "task": "\n".join(textwrap.wrap(exercise.task, sources.WIDTH))},
        name=exercise.name,
        module=exercise.module,
        length=sources.length(exercise),
        signature=sources.signature(exercise),
        around=AROUND.format(source=around) if around else "",
    )


def notebook(lab: Lab) -> str:
    """To work in: an exercise is checked in a cell, and the engine runs on the parts."""
    head = NOTEBOOK.format(title=lab.title, name=lab.name, first=lab.exercises[0].id)
    cells = [_markdown(head), _code("from minibatch import labs, plots\nfrom minibatch.notebook import show")]
    for exercise in lab.exercises:
        about = f"## {exercise.id} {exercise.title}\n\n`{exercise.name}`: {exercise.task}\n\n*{words.where(exercise)}*"
        cells += [_markdown(about), _code(f'labs.check("{exercise.id}")')]
    cells += [
        _markdown("## The engine with your parts in it\n\nWhat is not done yet is the package's."),
        *map(_code, _run(lab)),
    ]
    meta = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(cells):
        cell["id"] = f"{lab.name}-{number:02}"
    return json.dumps({"cells": cells, "metadata": meta, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _run(lab: Lab) -> list[str]:
    if lab.run is None:
        return ['cards = labs.run(".")\nprint(cards)', "show(cards.figure())"]
    pictures = [f'show(plots.{name}(runs["{lab.shows}"]))' for name in ("membership", "kv_memory")]
    return ['runs = labs.run(".")\nprint(runs)', *pictures]


def _markdown(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(text: str) -> dict:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": text}
