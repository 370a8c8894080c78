"""A student's file, made from the reference: signatures, types and docstrings stay, bodies go.

The reference in the package is the only implementation that anybody has written, and knows nothing of exercises. What a
student gets is generated from its source when it is asked for, so it cannot be out of date.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

from minibatch.labs.exercise import Exercise, Lab

WIDTH = 120
HEAD = """{title}: lab {lab} of minibatch.

Complete what raises NotImplementedError; README.md beside this file says what each part has to do. Then

    minibatch lab check .     what is right, and a counter-example for what is not
    minibatch lab run .       the engine with your parts in it

All that is not in this file is the package's. A class that derives from one of the same name in the package is only the
place for the methods below, and helpers of yours: all others are inherited, and can be used, but not changed.
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def student_module(lab: Lab, solved: bool = False) -> str:
    """The module that a student completes. ``solved``: with the reference's bodies (how the checker is checked)."""
    head = HEAD.format(title=lab.title, lab=lab.name)
    parts = [
        f'"""{head}"""',
        "from __future__ import annotations",
        _imports(lab, solved),
    ]
    parts += [_part(top, exercises, solved) for top, exercises in _by_top(lab)]
    return "\n\n".join(parts[:3]) + "\n\n\n" + "\n\n\n".join(parts[3:]) + "\n"


def lines(exercise: Exercise) -> int:
    """How long the reference's answer is: lines with code in the bodies."""
    node = _target(exercise)
    functions = [node] if isinstance(node, Function) else [n for n in node.body if isinstance(n, Function)]
    source = _lines(exercise.module)
    bodies = [source[f.body[0].lineno - 1 : f.end_lineno] for f in map(_without_docstring, functions) if f.body]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for body in bodies for line in body)


def length(exercise: Exercise) -> str:
    if exercise.open_ended:
        return "open-ended"
    count = lines(exercise)
    return "one line" if count == 1 else f"about {count} lines"


def signature(exercise: Exercise) -> str:
    """The target's definition and docstring, dedented; of a class, with those of its public methods."""
    node = _target(exercise)
    if isinstance(node, Function):
        return textwrap.dedent(_head(node, exercise.module))
    return _class(node, exercise.module, lambda _: exercise, lambda f: not _private(f.name))


def surroundings(exercise: Exercise) -> str:
    """The class that a method belongs to, without the bodies of what is an exercise of any lab; else nothing."""
    if exercise.method is None:
        return ""
    from minibatch.labs.manifest import EXERCISES

    siblings = {e.method: e for e in EXERCISES.values() if (e.module, e.top) == (exercise.module, exercise.top)}
    node = _defined(exercise.module)[exercise.top]
    return _class(node, exercise.module, lambda f: siblings.get(f.name), keep=lambda f: True)


def usable(lab: Lab) -> list[str]:
    """What a student's file imports from the package, in outline: so that nobody has to open a file in which the answer
    to another exercise may stand."""
    tops = {(exercise.module, exercise.top) for exercise in lab.exercises}
    _, origins = _imported(lab, solved=False)
    ours = [(m, name) for m in sorted(origins) if m.startswith("minibatch.") for name in sorted(origins[m])]
    found = [(m, _defined(m).get(name)) for m, name in ours if (m, name) not in tops]
    return [f"# {m}\n{_outline(node, m)}" for m, node in found if isinstance(node, (ast.ClassDef, Function))]


def _outline(node: ast.ClassDef | Function, module: str) -> str:
    """Definition and docstring; of a class its fields too, and what its public methods take and give."""
    pieces = [_head(node, module)]
    for child in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(child, (ast.AnnAssign, ast.Assign)):
            pieces.append(f"    {ast.unparse(child)}")
        elif isinstance(child, Function) and (child.name == "__init__" or not child.name.startswith("_")):
            kind = "    @property\n" if any(getattr(d, "id", "") == "property" for d in child.decorator_list) else ""
            gives = f" -> {ast.unparse(child.returns)}" if child.returns else ""
            pieces.append(f"{kind}    def {child.name}({ast.unparse(child.args)}){gives}: ...")
    return "\n".join(pieces)


def _by_top(lab: Lab) -> list[tuple[str, list[Exercise]]]:
    groups: dict[tuple[str, str], list[Exercise]] = {}
    for exercise in lab.exercises:
        groups.setdefault((exercise.module, exercise.top), []).append(exercise)
    return [(top, exercises) for (_, top), exercises in groups.items()]


def _part(top: str, exercises: list[Exercise], solved: bool) -> str:
    first = exercises[0]
    if first.method is None:
        node = _target(first)
        if isinstance(node, Function):
            return _function(node, first.module, None if solved else first)
        text = _class(node, first.module, lambda f: None if solved else first, lambda f: solved or not _private(f.name))
        return text if solved else f"{_task(first, '')}\n{text}"
    owner = _defined(first.module)[top]
    head = f"class {top}({first.module.rpartition('.')[2]}.{top}):"
    if docstring := ast.get_docstring(owner):
        head += "\n" + textwrap.indent(f'"""{docstring}\n"""' if "\n" in docstring else f'"""{docstring}"""', "    ")
        head = "\n".join(line.rstrip() for line in head.splitlines())
    methods = [_function(_target(e), e.module, None if solved else e) for e in exercises]
    return "\n\n".join([head, *methods])


def _class(
    node: ast.ClassDef,
    module: str,
    exercise_of: Callable[[Function], Exercise | None],
    keep: Callable[[Function], bool],
) -> str:
    """A class with the bodies of some methods taken out, and those methods left out that are not to be kept."""
    source, pieces = _lines(module), [_head(node, module)]
    for child in node.body[1 if ast.get_docstring(node) is not None else 0 :]:
        if not isinstance(child, Function):
            pieces.append("\n".join(source[child.lineno - 1 : child.end_lineno]))
        elif keep(child):
            pieces.append(_function(child, module, exercise_of(child), whole_class=True))
    text = pieces[0]
    for before, piece in pairwise(pieces):
        tight = "def " not in before and "def " not in piece and before is not pieces[0]
        text += ("\n" if tight else "\n\n") + piece
    return text


def _function(node: Function, module: str, exercise: Exercise | None, whole_class: bool = False) -> str:
    """Its source; for an exercise, with an error in place of its body."""
    if exercise is None:
        return "\n".join(_lines(module)[_first(node) - 1 : node.end_lineno])
    indent = " " * (node.col_offset + 4)
    body = [] if whole_class else [_task(exercise, indent)]
    what = f"{exercise.top}.{node.name}" if exercise.method or whole_class else node.name
    message = f"{exercise.not_done}: {what} ({exercise.title.lower()})"
    line = f'{indent}raise NotImplementedError("{message}")'
    if len(line) > WIDTH:
        line = f'{indent}raise NotImplementedError(\n{indent}    "{message}"\n{indent})'
    return "\n".join([_head(node, module), *body, line])


def _task(exercise: Exercise, indent: str) -> str:
    """The task as a comment."""
    text = f"{exercise.id}, {exercise.points} points, {length(exercise)}. {exercise.task}"
    return "\n".join(textwrap.wrap(text, WIDTH - 2, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "))


def _imports(lab: Lab, solved: bool) -> str:
    """The import statements of a student's file."""
    plain, origins = _imported(lab, solved)
    froms = [_from(module, names) for module, names in sorted(origins.items())]
    standard = [line for line in froms if not line.startswith("from minibatch")]
    ours = [line for line in froms if line.startswith("from minibatch")]
    libraries = sorted(line for line in plain if line.split()[1] in ("numpy", "pandas", "torch"))
    others = [*sorted(plain.difference(libraries)), *standard]
    return "\n\n".join("\n".join(group) for group in (others, libraries, ours) if group) or "# nothing to import"


def _imported(lab: Lab, solved: bool) -> tuple[set[str], dict[str, set[str]]]:
    """What the targets use of what their modules import, and of what else these modules define: whole modules, as
    statements; and by module, names.

    What only the answer uses gives it away if it is a helper of its own or from the standard library: then it is left
    out, unless the task speaks of it.
    """
    own = {exercise.top for exercise in lab.exercises}
    plain: set[str] = set()
    origins: dict[str, set[str]] = {}
    for exercise in lab.exercises:
        node, tree = _target(exercise), _tree(exercise.module)
        stays = _names(node) if solved else _names_of_heads(node)
        stays |= {name for name in _names(node) if name in exercise.task}
        for statement in _import_statements(tree):
            for alias in statement.names:
                name = (alias.asname or alias.name).partition(".")[0]
                said = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
                module = getattr(statement, "module", None)
                helps = module is None or (module.startswith("minibatch") and not exercise.open_ended)
                wanted = _names(node) if helps else stays
                if name not in wanted or name in own:
                    continue
                if module is None:
                    plain.add(f"import {said}")
                else:
                    origins.setdefault(module, set()).add(said)
        for name in _names(node).intersection(_defined(exercise.module)) - own:
            if name in stays or not _private(name):
                origins.setdefault(exercise.module, set()).add(name)
        if exercise.method is not None:
            package, _, module = exercise.module.rpartition(".")
            origins.setdefault(package, set()).add(module)
    origins.pop("__future__", None)
    return plain, origins


def _names(node: ast.AST) -> set[str]:
    """All names that are used, in annotations too."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _names_of_heads(node: ast.ClassDef | Function) -> set[str]:
    """Those in signatures, decorators, and what a class has beside its methods."""
    if isinstance(node, Function):
        return {name for part in (node.args, node.returns, *node.decorator_list) if part for name in _names(part)}
    rest = [n for n in node.body if not isinstance(n, Function)]
    methods = [n for n in node.body if isinstance(n, Function) and not _private(n.name)]
    names = {name for part in (*rest, *node.bases, *node.decorator_list) for name in _names(part)}
    return names.union(*map(_names_of_heads, methods))


def _from(module: str, names: Iterable[str]) -> str:
    line = f"from {module} import {', '.join(sorted(names))}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"


def _import_statements(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those at the top of a module, and those that are there for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            yield from (n for n in node.body if isinstance(n, (ast.Import, ast.ImportFrom)))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def _defined(module: str) -> dict[str, ast.stmt]:
    """What a module defines at its top level, by name."""
    found: dict[str, ast.stmt] = {}
    for node in _tree(module).body:
        if isinstance(node, (ast.ClassDef, *Function.__args__)):
            found[node.name] = node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def _target(exercise: Exercise) -> ast.ClassDef | Function:
    node = _defined(exercise.module)[exercise.top]
    if exercise.method is not None:
        node = next(n for n in node.body if isinstance(n, Function) and n.name == exercise.method)
    return node


def _without_docstring(node: Function) -> Function:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.FunctionDef(node.name, node.args, body, [], end_lineno=node.end_lineno)


def _first(node: ast.ClassDef | Function) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _head(node: ast.ClassDef | Function, module: str) -> str:
    """Decorators, definition and docstring."""
    source, last = _lines(module), node.body[0].end_lineno
    if ast.get_docstring(node) is None:
        ends = (n for n in range(node.lineno, node.end_lineno + 1) if source[n - 1].partition("  #")[0].endswith(":"))
        last = next(ends)
    return "\n".join(source[_first(node) - 1 : last])


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@lru_cache
def _lines(module: str) -> list[str]:
    return inspect.getsource(importlib.import_module(module)).splitlines()


@lru_cache
def _tree(module: str) -> ast.Module:
    return ast.parse("\n".join(_lines(module)))
