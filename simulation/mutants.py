"""Changes of the shipped decisions, made automatically: do the walks (`spec/walks.py`) or the simulation notice them?

    python -m simulation.mutants --sample 100     so many of them, drawn at random; prints those that nobody noticed
    python -m simulation.mutants --only rules/decide.py --sample 40     of some files

A mutant is one change of one file of `protocol/`, `quorum/` or `rules/`: a comparison, a constant, an operator, a guard
that is always or never true, or a statement that is missing. Each is tried in a process of its own: of `rules/`, in the
unit tests of `decide` and in the models of `spec` that take a second; in a few walks through each scene; and then in
the runs of a few seeds. It is noticed by a flaw, by an error, or because a run does not end.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import math
import os
import resource
import select
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from simulation.plan import LONG_RUNS, RUNS, plan_of
from simulation.world import simulate
from spec import batches, several
from spec.explorer import explore
from spec.walks import scenes, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

PACKAGE = Path(__file__).parents[1] / "asynclock"

FOLDERS = ("protocol", "quorum", "rules")

SKIPPED = {"__init__.py", "fingerprint.py", "causes.py", "core.py"}
"""Without decisions: a picture of the state, messages, and a port."""

UNIT_TESTS = "tests/unit/test_decide_*.py"
"""Of `rules/`. They take a second."""

WALKS = 2
"""Through each scene."""

CPU = 60
"""Seconds of CPU for one trial, at most."""

_NOTICED, _NOT_TRIED = 1, 2

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change."""

    path: Path
    number: int  # of the changes of that file
    line: int
    what: str
    in_function: bool  # False: a constant of the module

    @property
    def place(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    def __str__(self) -> str:
        source = self.path.read_text().splitlines()[self.line - 1].strip()
        return f"{self.place}:{self.line}  {self.what}:  {source}"


# -- making them -------------------------------------------------------------------------------------------------------


def changed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Change the tree, once for each step; the next step begins with it as before. Yields the line, and the change."""
    for node in _decisions(tree):
        yield from _other_operator(node)
        yield from _other_constant(node)
        yield from _other_guard(node)
        yield from _missing_statement(node)


def _decisions(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs in functions, and the constants of the module; not what prints, and no annotations."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ast.walk(node.value)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name != "__repr__":
            yield function
            for statement in function.body:
                for inner in ast.walk(statement):
                    if not isinstance(inner, (ast.Raise, ast.JoinedStr)):
                        yield inner


def _other_operator(node: Any) -> Iterator[tuple[int, str]]:
    before: Any
    if isinstance(node, ast.Compare):
        operators: list[Any] = node.ops
        for index, before in enumerate(list(operators)):
            operators[index] = _SWAPPED[type(before)]()
            yield node.lineno, f"{_name(before)} is {_name(operators[index])}"
            operators[index] = before
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in _SWAPPED:
        changing: Any = node
        before = changing.op
        changing.op = _SWAPPED[type(before)]()
        yield node.lineno, f"{_name(before)} is {_name(changing.op)}"
        changing.op = before
    elif isinstance(node, ast.Name) and node.id in ("min", "max"):
        before = node.id
        node.id = "max" if before == "min" else "min"
        yield node.lineno, f"{before} is {node.id}"
        node.id = before


def _other_constant(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        before = node.value
        node.value = _other(before)
        yield node.lineno, f"{before} is {node.value}"
        node.value = before


def _other(value: bool | float) -> bool | float:
    if isinstance(value, bool):
        return not value
    return 2 * value if value and isinstance(value, float) else value + 1


def _other_guard(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, (ast.If, ast.IfExp)):
        before = node.test
        for value in (True, False):
            node.test = ast.copy_location(ast.Constant(value), before)
            yield node.lineno, f"always {value}"
        node.test = before


def _missing_statement(node: ast.AST) -> Iterator[tuple[int, str]]:
    for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
        for index, statement in enumerate(body if isinstance(body, list) else ()):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign)) and not is_text:
                body[index] = ast.copy_location(ast.Pass(), statement)  # type: ignore[index]
                yield statement.lineno, "missing"
                body[index] = statement  # type: ignore[index]


def _name(operator: ast.AST) -> str:
    return type(operator).__name__


def mutants() -> list[Mutant]:
    """All of them, each once."""
    paths = sorted(path for folder in FOLDERS for path in PACKAGE.glob(f"{folder}/*.py"))
    found = dict[tuple[Path, int, str], Mutant]()
    for path in paths:
        if path.name not in SKIPPED:
            tree = ast.parse(path.read_text())
            constants = [
                range(each.lineno, (each.end_lineno or 0) + 1) for each in tree.body if isinstance(each, ast.Assign)
            ]
            for number, (line, what) in enumerate(changed(tree)):
                in_function = not any(line in lines for lines in constants)
                found.setdefault((path, number, what), Mutant(path, number, line, what, in_function))
    return list(found.values())


def mutated(mutant: Mutant) -> ast.Module:
    """The changed file."""
    tree = ast.parse(mutant.path.read_text())
    for number, _ in enumerate(changed(tree)):
        if number == mutant.number:
            return copy.deepcopy(tree)
    raise LookupError(mutant)


# -- trying them -------------------------------------------------------------------------------------------------------


def put_in_place(mutant: Mutant) -> None:
    """Change the functions and the constants of the module that this process has imported already."""
    module = importlib.import_module(".".join(mutant.path.relative_to(PACKAGE.parent).with_suffix("").parts))
    tree = mutated(mutant)
    shipped = ast.parse(mutant.path.read_text())
    for statement, before in zip(tree.body, shipped.body, strict=True):
        if isinstance(statement, ast.Assign) and ast.dump(statement) != ast.dump(before):
            _assign(module, statement)
            return
    changed = dict(_functions_in(compile(tree, str(mutant.path), "exec")))
    functions = list(_functions_of(module))
    missing = {*changed} - {_place_of(each.__code__) for each in functions}
    if any(not name.endswith(">") for name, _ in missing):  # of a module: neither its lambdas nor its comprehensions
        raise LookupError(f"{missing} of {mutant.path.name} are not in the module")
    for function in functions:
        function.__code__ = changed[_place_of(function.__code__)]
    for each in vars(module).values():
        if hasattr(each, "cache_clear"):  # what the shipped function has returned
            each.cache_clear()


def _assign(module: ModuleType, statement: ast.Assign) -> None:
    """A constant of a module, also where others have imported it."""
    values = dict(vars(module))
    exec(compile(ast.Module([statement], []), "mutant", "exec"), values)  # noqa: S102
    for name in [each.id for each in statement.targets if isinstance(each, ast.Name)]:
        before = vars(module)[name]
        for other in [each for each in sys.modules.values() if each.__name__.startswith(PACKAGE.name)]:
            if vars(other).get(name) is before:
                setattr(other, name, values[name])


def _place_of(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _functions_in(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The code of functions of a file and of its classes; what is defined in a function is a part of it."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            is_class = not each.co_flags & inspect.CO_NEWLOCALS
            yield from _functions_in(each) if is_class else [(_place_of(each), each)]


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The same as objects, of which each caller sees the change."""
    files = [vars(module), *(vars(each) for each in vars(module).values() if isinstance(each, type))]
    for each in [each for names in files for each in names.values()]:
        for function in (each, *(getattr(each, name, None) for name in ("__func__", "__wrapped__", "fget", "func"))):
            if isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__:
                yield function


def is_noticed(mutant: Mutant, fails: Callable[[], bool], cpu: float = CPU) -> bool:
    """Whether a trial, in a child of this process, notices it: by its result, by an error, or because it does not end
    within `cpu` seconds of CPU. Raises LookupError if the change cannot be put in place."""
    child = os.fork()
    if not child:
        code = _NOTICED
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu), math.ceil(cpu)))
            try:
                put_in_place(mutant)
            except (LookupError, ValueError):  # ValueError: the change takes a variable from an inner function
                code = _NOT_TRIED
            else:
                code = _NOTICED if fails() else 0
        finally:
            os._exit(code)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], 4 * cpu)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _NOT_TRIED:
        raise LookupError(f"not tried: {mutant}")
    return status != 0


def fails_in_units() -> bool:
    """In a process that only tries this mutant: pytest imports the tests."""
    import pytest

    root = PACKAGE.parent
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={root}"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return pytest.main([*options, *map(str, sorted(root.glob(UNIT_TESTS)))]) != pytest.ExitCode.OK


def fails_in_models() -> bool:
    """In all orders of events of those small worlds that are the fastest."""
    return any(
        explore(module.scene(name), cycles=True).flaw is not None
        for module in (several, batches)
        for name in module.SCENES
    )


def fails_in_walks() -> bool:
    return any(walk(scene, seed).flaw is not None for seed in range(WALKS) for _, scene in scenes())


def fails_in_simulation(seeds: Sequence[int]) -> bool:
    return any(simulate(plan_of(seed, run)).flaw is not None for seed in seeds for run in (*LONG_RUNS, *range(RUNS)))


def judges_of(mutant: Mutant) -> tuple[Callable[[], bool], ...]:
    """The fastest first."""
    is_rule = mutant.place.startswith("rules")
    return (fails_in_units, fails_in_models, fails_in_walks) if is_rule else (fails_in_walks,)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m simulation.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, help="so many, drawn at random; without it: all")
    parser.add_argument("--draw", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--seeds", type=int, default=2, help="the seeds for each mutant; each is two hours")
    parser.add_argument("--only", default="", help="how their paths begin, such as 'rules' or 'rules/decide.py'")
    given = parser.parse_args(arguments)
    found = [each for each in mutants() if each.place.startswith(given.only)]
    chosen = found if given.sample is None else Random(given.draw).sample(found, given.sample)  # noqa: S311
    noticed = 0
    for done, mutant in enumerate(chosen, 1):
        seeds = range(given.seeds)
        try:
            if any(is_noticed(mutant, fails) for fails in (*judges_of(mutant), lambda: fails_in_simulation(seeds))):  # noqa: B023
                noticed += 1
            else:
                print(f"not noticed: {mutant}", flush=True)
        except LookupError as error:
            print(error, flush=True)
        if done % 25 == 0:
            print(f"{noticed} of {done} noticed so far", flush=True)
    print(f"{noticed} of {len(chosen)} noticed; there are {len(found)} mutants")


if __name__ == "__main__":
    main()
