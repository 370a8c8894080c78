"""The exercises: the reference passes, nothing done fails, other right answers pass, wrong ones are told why."""

from __future__ import annotations

import importlib

import pytest
from matplotlib.figure import Figure

from minibatch.labs import checker, pictures, sources
from minibatch.labs.manifest import EXERCISES, LABS

SOLUTIONS = {name: importlib.import_module(f"lab_solutions.{name}") for name in LABS}
WRONG = {id: wrong for module in SOLUTIONS.values() for id, wrong in module.WRONG.items()}
RIGHT = {id: right for module in SOLUTIONS.values() for id, right in module.RIGHT.items()}


def each(solutions):
    return [
        pytest.param(EXERCISES[id], s, id=f"{id}-{n}") for id, many in solutions.items() for n, s in enumerate(many)
    ]


@pytest.mark.parametrize("lab", LABS.values(), ids=list(LABS))
@pytest.mark.parametrize("solved", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["untouched", "reference"])
def test_student_file(lab, solved, tmp_path):
    """Fault: a file that passes although nothing is done; an exercise that its own reference does not pass."""
    path = tmp_path / f"{lab.name}.py"
    path.write_text(sources.student_module(lab, solved), encoding="utf-8")
    found = [checker.check_file(exercise, lab, path)[0] for exercise in lab.exercises]
    want = checker.PASSED if solved else checker.NOT_DONE
    assert [(o.id, o.status, o.idea) for o in found if o.status != want] == []


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "wrong"), each(WRONG))
def test_wrong_solutions_are_told_what_is_wrong(exercise, wrong):
    """Fault: a wrong answer passes, or is rejected without a word on what was misunderstood."""
    outcome, picture = checker.check_part(exercise, wrong.part)
    assert outcome.status == checker.FAILED, f"{exercise.id} passes: {wrong.name}"
    assert wrong.says in outcome.idea, f"{wrong.name}: {outcome}"
    assert outcome.case and outcome.expected and outcome.happened
    assert isinstance(pictures.draw(picture, exercise.title), Figure)


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "right"), each(RIGHT))
def test_other_right_solutions_pass(exercise, right):
    """Fault: correct code is rejected because it is not the reference."""
    outcome, _ = checker.check_part(exercise, right)
    assert outcome.status == checker.PASSED, outcome


def test_every_exercise_has_wrong_and_other_right_solutions():
    assert list(EXERCISES) == [id for lab in LABS.values() for id in (e.id for e in lab.exercises)]
    for id in EXERCISES:
        assert 2 <= len(WRONG[id]) <= 5, id
        assert len(RIGHT[id]) >= 1, id
