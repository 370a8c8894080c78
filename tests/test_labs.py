"""The frame of the labs: generated files, plugging in, fresh processes, grading; the exercises are in another file."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import minibatch
from minibatch import ContinuousBatching, PagedKVCache, labs, metrics, paged_kv_cache, policies
from minibatch.cli import main
from minibatch.labs import checker, folder, fresh, grade, sources, words
from minibatch.labs.exercise import Exercise
from minibatch.labs.manifest import EXERCISES, LABS
from minibatch.labs.plug import plugged
from minibatch.labs.properties import for_all
from minibatch.labs.trial import request, run

PAGING, METRICS = LABS["paging"], LABS["metrics"]
ROWS = """
class KVCache(kv_cache.KVCache):
    def rows(self, request, start, stop):
        {}
"""
RIGHT = "return np.array([self.units(request)[i // self.unit_size] * self.unit_size + i % self.unit_size\n" + (
    "            for i in range(start, stop)], dtype=int)"
)


def rows(body: str, before: str = "") -> str:
    """A student's file for lab paging in which only paging.2 is done."""
    text = sources.student_module(PAGING)
    at = text.index("class KVCache")
    after = text.index("\nclass ", at + 1)
    return f"{before}\n{text[:at]}{ROWS.format(body).strip()}\n\n{text[after:]}" if body else before


# --- the generated file ---


@pytest.mark.parametrize("lab", LABS.values(), ids=list(LABS))
def test_generated_file_compiles_and_gives_nothing_away(lab):
    """Fault: a body, or a comment of it, that is left in; a docstring that is lost; a file that cannot be read."""
    text = sources.student_module(lab)
    compile(text, lab.name, "exec")
    assert max(map(len, text.splitlines())) <= sources.WIDTH
    for exercise in lab.exercises:
        node = sources._target(exercise)
        assert exercise.not_done in text
        assert exercise.task.split()[0] in text
        body = [line.strip() for line in sources._lines(exercise.module)]
        functions = [node] if isinstance(node, sources.Function) else [f for f in node.body if hasattr(f, "args")]
        for function in functions:
            answer = sources._without_docstring(function).body
            said = [line for line in body[answer[0].lineno - 1 : answer[-1].end_lineno] if len(line) > 30]
            assert not [line for line in said if line in text], exercise.id


@pytest.mark.parametrize("lab", LABS.values(), ids=list(LABS))
def test_folder(lab, tmp_path):
    """Fault: somebody's work is overwritten; a README without the task; a notebook that is none."""
    paths = folder.new(lab, tmp_path / "mine")
    assert [path.name for path in paths] == [f"{lab.name}.py", f"{lab.name}.ipynb", "README.md", f"test_{lab.name}.py"]
    readme = (tmp_path / "mine" / "README.md").read_text()
    notebook = json.loads((tmp_path / "mine" / f"{lab.name}.ipynb").read_text())
    for exercise in lab.exercises:
        assert " ".join(exercise.task.split()) in " ".join(readme.split())
        assert any(f'labs.check("{exercise.id}")' in cell["source"] for cell in notebook["cells"])
    before = paths[0].read_text()
    paths[0].write_text(before + "# mine")
    with pytest.raises(ValueError, match="is there already"):
        folder.new(lab, tmp_path / "mine")
    assert paths[0].read_text().endswith("# mine")


def test_no_lab_gives_away_the_answer_of_another(tmp_path):
    """Fault: "the rest of the class" in a README, with the body of what another lab asks for."""
    bodies = {}
    for exercise in EXERCISES.values():
        node, source = sources._target(exercise), sources._lines(exercise.module)
        functions = [node] if isinstance(node, sources.Function) else [f for f in node.body if hasattr(f, "args")]
        for function in functions:
            answer = sources._without_docstring(function).body
            said = [line.strip() for line in source[answer[0].lineno - 1 : answer[-1].end_lineno]]
            bodies.setdefault(exercise.id, []).extend(line for line in said if len(line) > 40)
    for lab in LABS.values():
        text = folder.readme(lab)
        shown = {line.strip() for line in text.splitlines()}
        for id, lines in bodies.items():
            assert len(shown.intersection(lines)) <= len(lines) / 2, (lab.name, id, shown.intersection(lines))


def test_the_manifest():
    """Fault: an id used twice or changed, a target or notebook that is not there, a task that was forgotten."""
    notebooks = {path.stem for path in (Path(__file__).parents[1] / "notebooks").glob("*.py")}
    assert len({e.target for e in EXERCISES.values()}) == len(EXERCISES) >= 30
    for name, lab in LABS.items():
        assert lab.name == name and lab.goals and lab.minutes >= 30
        assert lab.run is None or lab.look  # a run says what to look at
        assert [e.id.split(".")[0] for e in lab.exercises] == [name] * len(lab.exercises)
    for exercise in EXERCISES.values():
        assert exercise.notebook in notebooks
        assert exercise.points >= 1 and len(exercise.task) > 60
        assert sources.lines(exercise) >= 1
        assert callable(exercise.check)


def is_self(attribute):
    return getattr(attribute.value, "id", "") == "self"


def test_checks_use_no_private_names():
    """Fault: correct code is rejected because it keeps something else, or under another name."""
    targets = {exercise.name.rpartition(".")[2] for exercise in EXERCISES.values()}  # to be called, of course
    targets |= {"_fields", "_replace", "_asdict"}  # of every named tuple, and public in spite of their names
    for path in sorted((Path(checker.__file__).parent / "checks").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        private = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr[0] == "_" and n.attr[:2] != "__"]
        assert [ast.unparse(n) for n in private if n.attr not in targets and not is_self(n)] == [], path
        assert not [n.value for n in nodes if isinstance(n, ast.Constant) and re.fullmatch(r"_[a-z]\w*", str(n.value))]


# --- plugging in ---


def test_a_function_is_replaced_everywhere_and_put_back():
    exercise, old = EXERCISES["metrics.1"], metrics.gaps
    with plugged(exercise, len):
        assert metrics.gaps is len
    assert metrics.gaps is old


def test_a_class_is_replaced_in_tables_too():
    """Fault: a command line that still finds the reference's policy by its name."""
    exercise = Exercise("x.1", "", "minibatch.policies.queueing:Fair", "", 1, "", "")
    mine, old = type("Fair", (policies.Order,), {}), policies.Fair
    with plugged(exercise, mine):
        assert policies.ORDERS["fair"] is policies.Fair is policies.queueing.Fair is mine
    assert policies.ORDERS["fair"] is policies.Fair is policies.queueing.Fair is old


def test_a_method_is_replaced_in_derived_classes_with_helpers_and_super():
    """Fault: a part that the engine's own subclasses do not use; a super() that breaks or means the reference."""
    from minibatch.policies.queueing import Fair, RoundRobin

    calls = []

    class Mine(Fair):
        def add(self, request):
            self.helper(request)
            super().add(request)  # of ByClient, as in the reference: not the reference's own

        def helper(self, request):
            calls.append(request.label)

        def take(self, request):
            raise AssertionError("another exercise's method has been plugged in as well")

    old = vars(Fair)["add"]
    exercise = Exercise("x.1", "", "minibatch.policies.queueing:Fair.add", "", 1, "", "")
    with plugged(exercise, Mine):
        run([request(3, 2), request(4, 2)], ContinuousBatching(), PagedKVCache(8, 4), order=Fair())
        assert calls == ["a", "b"]
    assert vars(Fair)["add"] is old and not hasattr(Fair, "helper") and "helper" not in vars(RoundRobin)
    Mine()  # what its super() means is its own again
    assert Mine.add.__closure__[0].cell_contents is Mine


def test_what_is_plugged_in_is_put_back_after_an_error():
    old = paged_kv_cache.BlockPool
    with pytest.raises(RuntimeError), plugged(EXERCISES["paging.1"], type("BlockPool", (), {})):
        raise RuntimeError
    assert paged_kv_cache.BlockPool is old


def test_what_the_package_has_already_is_put_back_too():
    """Fault: a part that is somebody else in the package; afterwards both names mean the reference."""

    def everything():
        modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "minibatch"]
        tables = [*map(vars, modules), *(t for m in modules for t in vars(m).values() if isinstance(t, dict))]
        return [(id(table), key, id(value)) for table in tables for key, value in table.items()]

    labs.check("fairness.1", policies.FCFS)
    before = everything()
    labs.check("fairness.1", policies.FCFS)
    assert everything() == before


# --- checks ---


def test_for_all_finds_a_small_input_and_its_own_errors_are_not_hidden():
    """Fault: a check that cannot fail, because what goes wrong in it is swallowed."""
    from hypothesis import strategies as st

    def check(numbers):
        assert sum(numbers) < 100, numbers

    with pytest.raises(AssertionError, match=r"\[100\]"):
        for_all(check, numbers=st.lists(st.integers(0, 1000)))
    with pytest.raises(Exception, match=r"[Ss]trateg"):
        for_all(check, numbers=3)


def test_run_says_what_is_wrong_with_a_cache():
    """Fault: two requests that share rows without a word (the laws of trial.py)."""

    class Same(PagedKVCache):
        def rows(self, request, start, stop):
            return super().rows(request, start, stop) * 0

    with pytest.raises(AssertionError, match="somebody has overwritten them") as raised:
        run([request(3, 3)], ContinuousBatching(), Same(4, 4))
    assert raised.value.iteration == 1 and raised.value.picture.num_steps == 1


def test_the_reference_is_not_there_while_a_student_is_checked(tmp_path):
    """Fault: a grader that runs the reference instead of the student's file."""
    path = tmp_path / "metrics.py"
    for cheat in ("from minibatch.metrics import gaps", "import minibatch.metrics as m\ndef gaps(t): return m.gaps(t)"):
        path.write_text(cheat)
        outcome, _ = checker.check_file(EXERCISES["metrics.1"], METRICS, path)
        assert outcome.status == checker.FAILED, cheat


def test_exercises_do_not_need_each_other(tmp_path):
    """Fault: a right answer that is rejected because another exercise of the file is not done."""
    path = tmp_path / "paging.py"
    path.write_text(rows(RIGHT))
    outcomes = fresh.check(path, PAGING.exercises)
    assert [o.status for o in outcomes] == [checker.NOT_DONE, checker.PASSED, checker.NOT_DONE, checker.NOT_DONE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "before", "says"),
    [
        ("while True: pass", "", "Stopped after 3 s"),
        ("import os; os._exit(0)", "", "ended in the middle of the check, with code 0"),
        ("import os; os.kill(os.getpid(), 9)", "", "killed by signal 9"),
        ("exit()", "", "raises an exception"),
        ("return np.zeros(10**12)", "", "breaks|raises"),
        ("return unknown", "", "raises an exception"),
        ("return 1", "import nothing_there", "cannot be imported"),
        ("return 1", "raise SystemExit", "cannot be imported"),
        ("return 1", "def broken(:", "cannot be imported"),
        ("", "KVCache = 3", "no rows of its own"),
        ("", "x = 1", "There is no KVCache"),
    ],
)
def test_whatever_a_student_writes_is_told(body, before, says, tmp_path):
    """Fault: a check that hangs, dies without a word, or loses the other exercises' points."""
    path = tmp_path / "paging.py"
    path.write_text(rows(body, before))
    outcomes = fresh.check(path, PAGING.exercises, limits=fresh.Limits(seconds=3.0), quiet=True)
    assert [o.id for o in outcomes] == [e.id for e in PAGING.exercises]
    outcome = outcomes[1]
    assert outcome.status == checker.FAILED and outcome.points == 0
    assert re.search(says, outcome.idea), outcome
    if body and not before:
        assert {outcomes[i].status for i in (0, 2, 3)} == {checker.NOT_DONE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("os.fork()", True),  # and both would report
        ("open(sys.argv[2], 'a').write('garbage')", False),
        ("json.dump({'id': 'metrics.1', 'status': 'passed', 'points': 99}, open(sys.argv[2], 'a'))", False),
        ("os.remove(sys.argv[2])", False),
    ],
)
def test_only_what_was_asked_for_counts(line, passes, tmp_path):
    """Fault: outcomes twice, points that nobody can have, everybody's grades lost for one file."""
    path = tmp_path / "metrics.py"
    text = sources.student_module(METRICS, solved=True)
    path.write_text(text.replace("import math", "import json\nimport math\nimport os\nimport sys") + f"\n{line}\n")
    outcomes = fresh.check(path, METRICS.exercises, quiet=True)
    assert [o.id for o in outcomes] == [e.id for e in METRICS.exercises]
    assert all(o.points <= o.max_points for o in outcomes)
    assert all(o.status == checker.PASSED for o in outcomes) or not passes


@pytest.mark.slow
def test_a_helper_file_has_no_memory(tmp_path):
    """Fault: a file that was imported while one exercise was checked keeps what was there then."""
    (tmp_path / "helper.py").write_text("from minibatch.metrics import gaps, makespan")
    text = sources.student_module(METRICS, solved=True)
    (tmp_path / "metrics.py").write_text(text.replace("import math", "import helper\nimport math"))
    assert [o.status for o in fresh.check(tmp_path / "metrics.py", METRICS.exercises)] == ["passed"] * 3
    forward = text[: text.index("def gaps")].replace("import math", "import helper\nimport math")
    (tmp_path / "metrics.py").write_text(f"{forward}\ndef makespan(trace):\n    return helper.makespan(trace)\n")
    assert fresh.check(tmp_path / "metrics.py", METRICS.exercises)[1].status == checker.FAILED


def test_limits_that_make_no_sense_are_refused():
    for bad in ({"seconds": 0}, {"seconds": float("nan")}, {"mebibytes": 50}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            fresh.Limits(**bad)


@pytest.mark.slow
def test_files_beside_a_students_shadow_nothing(tmp_path):
    """Fault: a student's random.py or minibatch/ that the checker itself imports."""
    for name in ("random.py", "numpy.py", "json.py", "minibatch.py"):
        (tmp_path / name).write_text("raise RuntimeError('shadowed')")
    (tmp_path / "my_helper.py").write_text("def put(table, size, i): return table[i // size] * size + i % size")
    each = "my_helper.put(self.units(request), self.unit_size, i)"
    body = f"return np.array([{each} for i in range(start, stop)], dtype=int)"
    (tmp_path / "paging.py").write_text(
        rows(body).replace("import numpy as np", "import numpy as np\nimport my_helper")
    )
    assert fresh.check(tmp_path / "paging.py", [EXERCISES["paging.2"]])[0].status == checker.PASSED


# --- the commands ---


def test_list(capsys):
    assert main(["lab", "list"]) == 0
    said = capsys.readouterr().out
    assert all(id in said for id in EXERCISES)
    assert main(["lab", "list", "nothing"]) == 2


@pytest.mark.slow
def test_new_and_check(tmp_path, capsys):
    """The way of a student: nothing done, one wrong, all of it told, with a picture and its stepper."""
    place = tmp_path / "paging"
    assert main(["lab", "new", "paging", str(place)]) == 0
    assert main(["lab", "check", str(place)]) == 6
    assert capsys.readouterr().out.count("not done yet") == len(PAGING.exercises)
    wrong = "return np.arange(start, stop) + self.units(request)[0] * self.unit_size"
    (place / "paging.py").write_text(rows(wrong))
    assert main(["lab", "check", str(place), "--exercise", "paging.2"]) == 6
    said = capsys.readouterr().out
    assert "lab paging: 0 of 3 points" in said and "expected" in said and "04_paging" in said
    assert (place / "counterexamples" / "paging.2.png").read_bytes().startswith(b"\x89PNG")
    (place / "paging.py").write_text(rows(RIGHT))
    assert main(["lab", "check", str(place / "paging.py"), "--exercise", "paging.2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["status"], found["points"]) == ("passed", 3)
    assert not (place / "counterexamples" / "paging.2.png").exists()
    assert main(["lab", "check", str(place), "--exercise", "paging.9"]) == 2
    assert main(["lab", "check", str(tmp_path)]) == 2


def test_the_syllabus_is_current():
    """Fault: an instructor plans with points and minutes that are no longer true."""
    text = (Path(__file__).parents[1] / "notebooks" / "labs" / "README.md").read_text(encoding="utf-8")
    assert words.syllabus(LABS.values()) in text


def test_words_promise_nothing():
    assert words.SAYS[checker.PASSED] == "all public checks passed"


def test_check_in_a_notebook(monkeypatch, tmp_path):
    verdict = labs.check("metrics.1", lambda timeline: [0.0])
    assert not verdict.passed and verdict.picture.startswith(b"\x89PNG")
    assert "not right yet" in repr(verdict) and "data:image/png;base64" in verdict._repr_html_()
    assert labs.check("metrics.1", metrics.gaps).passed
    with pytest.raises(ValueError, match=r"no exercise 'metrics\.77'"):
        labs.check("metrics.77", len)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no metrics\.py"):
        labs.check("metrics.1")
    folder.new(METRICS, tmp_path)
    assert labs.check("metrics.1").outcome.status == checker.NOT_DONE


@pytest.mark.slow
def test_under_plain_pytest(tmp_path):
    folder.new(PAGING, tmp_path)
    (tmp_path / "paging.py").write_text(rows(RIGHT))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "100"})
    assert f"{len(PAGING.exercises) - 1} failed, 1 passed" in done.stdout, done.stdout
    assert "paging.1 is not done yet" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paging", "capstone"])
def test_the_notebook_runs(name, tmp_path):
    """Fault: a notebook with a cell that fails although the file beside it is right."""
    lab = LABS[name]
    folder.new(lab, tmp_path)
    (tmp_path / f"{name}.py").write_text(sources.student_module(lab, solved=True))
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    passed = sum("all public checks passed" in output.get("data", {}).get("text/html", "") for output in outputs)
    assert passed == len(lab.exercises)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1


@pytest.mark.slow
def test_run(tmp_path, capsys):
    """Fault: a run on the reference's parts that says it ran on the student's."""
    folder.new(PAGING, tmp_path)
    assert main(["lab", "run", str(tmp_path)]) == 2
    assert "nothing in" in capsys.readouterr().err
    (tmp_path / "paging.py").write_text(rows(RIGHT))
    ran = labs.run(tmp_path)
    assert set(ran.calls) == {"paging.2"} and ran.calls["paging.2"] > 100
    assert set(ran) == {"static", "continuous", "paged", "chunked"} and ran.holds
    assert "paging.2 Which row is a token in: called" in repr(ran)
    wrong = "return np.arange(start, stop)  # as if everybody had the first rows"
    (tmp_path / "paging.py").write_text(rows(wrong))
    assert not labs.run(tmp_path).holds
    assert minibatch.kv_cache.KVCache.rows.__module__ == "minibatch.kv_cache"


@pytest.mark.slow
def test_grade(tmp_path, capsys):
    """Fault: one bad submission stops the rest, or costs others their points."""
    bodies = {
        "ada": RIGHT,
        "bad": "import shutil, os; shutil.rmtree(os.getcwd()); os._exit(1)",
        "eve": "while True: pass",
        "umlaut": "raise ValueError('\\udcff \u2713')",
        "zoe": RIGHT,
    }
    for name, body in bodies.items():
        place = tmp_path / "class" / name / ("deep/down" if name == "zoe" else ".")
        place.mkdir(parents=True)
        (place / "paging.py").write_text(rows(body))
    (tmp_path / "class" / "nobody").mkdir()
    for place in ("two/a", "two/b", "old/backup", "old", "venv only/.venv"):
        (tmp_path / "class" / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / place / "paging.py").write_text(rows(RIGHT))
    (tmp_path / "class" / "link").mkdir()
    (tmp_path / "class" / "link" / "paging.py").symlink_to(tmp_path / "class" / "ada" / "paging.py")
    os.mkfifo(tmp_path / "class" / "ada" / "pipe")
    (tmp_path / "class" / "notes.txt").write_text("not a submission")
    table = tmp_path / "grades.csv"
    assert main(["lab", "grade", str(tmp_path / "class"), "--csv", str(table), "--seconds", "3"]) == 0
    with table.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    points = {row["submission"]: float(row["points"]) for row in found if row["exercise"] == "paging.2"}
    right, wrong = ("ada", "old", "zoe"), ("bad", "venv only", "eve", "link", "nobody", "two", "umlaut")
    assert points == {**dict.fromkeys(right, 3), **dict.fromkeys(wrong, 0)}
    assert len(found) == len(points) * len(PAGING.exercises)
    status = {row["submission"]: row["status"] for row in found if row["exercise"] == "paging.1"}
    missing = {name for name, what in status.items() if what == "missing"}
    assert missing == {"venv only", "link", "nobody"} and status["two"] == "failed" and status["ada"] == "not done"
    ideas = {row["submission"]: row["idea"] + row["happened"] for row in found if row["exercise"] == "paging.2"}
    assert "it was in rows, line" in ideas["eve"] and "\\udcff" in ideas["umlaut"]
    assert "2 files named paging.py" in ideas["two"]
    said = capsys.readouterr().out
    assert "not graded, because a submission is a directory: notes.txt" in said
    assert "nobody                  paging          0/17  ? ? ? ?" in said
    assert (tmp_path / "class" / "bad" / "paging.py").exists()
    with pytest.raises(ValueError, match="no directories"):
        list(grade.grade(tmp_path / "class" / "nobody"))
    assert main(["lab", "grade", str(tmp_path / "class"), "--lab", "nothing"]) == 2
