"""Changes of the shipped decisions, made automatically: do the walks (`spec/walks.py`) or the simulation notice them?

    python -m simulation.mutants --sample 100     so many of them, drawn at random; prints those that nobody noticed

A mutant is one change of one file of `protocol/` or `quorum/`: a comparison, a constant, an operator, a guard that is
always or never true, or a statement that is missing. Each is tried in a process of its own: in a few walks through
each scene, and then in the runs of a few seeds. It is noticed by a flaw, by an error, or because a run does not end.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import resource
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

PACKAGE = Path(__file__).parents[1] / "asynclock"

SKIPPED = {"__init__.py", "fingerprint.py", "causes.py", "core.py"}
"""Without decisions: a picture of the state, messages, and a port."""

WALKS = 4
"""Through each scene."""

CPU = 60
"""Seconds of CPU for one mutant, at most."""

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

    def __str__(self) -> str:
        source = self.path.read_text().splitlines()[self.line - 1].strip()
        return f"{self.path.relative_to(PACKAGE)}:{self.line}  {self.what}:  {source}"


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
        node.value = not before if isinstance(before, bool) else 2 * before if isinstance(before, float) else before + 1
        yield node.lineno, f"{before} is {node.value}"
        node.value = before


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
    paths = sorted([*PACKAGE.glob("protocol/*.py"), *PACKAGE.glob("quorum/*.py")])
    found = dict[tuple[Path, int, str], Mutant]()
    for path in paths:
        if path.name not in SKIPPED:
            for number, (line, what) in enumerate(changed(ast.parse(path.read_text()))):
                found.setdefault((path, number, what), Mutant(path, number, line, what))
    return list(found.values())


def mutated(mutant: Mutant) -> ast.Module:
    """The changed file."""
    tree = ast.parse(mutant.path.read_text())
    for number, _ in enumerate(changed(tree)):
        if number == mutant.number:
            return copy.deepcopy(tree)
    raise LookupError(mutant)


# -- trying them -------------------------------------------------------------------------------------------------------


class Instead(MetaPathFinder, Loader):
    """Imports the changed file in place of the shipped one."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = ".".join(mutant.path.relative_to(PACKAGE.parent).with_suffix("").parts)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(mutated(self._mutant), str(self._mutant.path), "exec"), module.__dict__)  # noqa: S102


def is_noticed(mutant: Mutant, seeds: Sequence[int]) -> bool:
    """Try it in a child, which has not imported the package before."""
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
            sys.meta_path.insert(0, Instead(mutant))
            code = 1 if _fails(seeds) else 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] != 0


def _fails(seeds: Sequence[int]) -> bool:
    from simulation.plan import RUNS, plan_of
    from simulation.world import simulate
    from spec.walks import scenes, walk

    if any(walk(scene, seed).flaw is not None for seed in range(WALKS) for _, scene in scenes()):
        return True
    return any(simulate(plan_of(seed, run)).flaw is not None for seed in seeds for run in range(RUNS))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m simulation.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, help="so many, drawn at random; without it: all")
    parser.add_argument("--draw", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--seeds", type=int, default=3, help="the hours that each mutant is tried for, at most")
    given = parser.parse_args(arguments)
    found = mutants()
    chosen = found if given.sample is None else Random(given.draw).sample(found, given.sample)  # noqa: S311
    noticed = 0
    for done, mutant in enumerate(chosen, 1):
        if is_noticed(mutant, range(given.seeds)):
            noticed += 1
        else:
            print(f"not noticed: {mutant}", flush=True)
        if done % 25 == 0:
            print(f"{noticed} of {done} noticed so far", flush=True)
    print(f"{noticed} of {len(chosen)} noticed; there are {len(found)} mutants")


if __name__ == "__main__":
    main()
