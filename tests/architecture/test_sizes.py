"""Files of at most 500 lines, functions of at most 80: what does not fit is split by noun or verb."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "sparkchat").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
MOST_LINES, MOST_FUNCTION_LINES, MOST_KERNEL_LINES = 500, 80, 150


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function; a docstring, a signature's options and their defaults count as well."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            yield node.name, node.end_lineno - node.lineno + 1


def test_there_is_something_to_measure() -> None:
    assert len(FILES) > 50


def test_files_stay_readable() -> None:
    sizes = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}


def test_functions_stay_readable() -> None:
    long = {}
    for file in FILES:
        limit = (
            MOST_KERNEL_LINES if "kernels" in file.parts or file.name == "triton_kernels.py" else MOST_FUNCTION_LINES
        )
        for name, size in functions(file):
            if size > limit:
                long[f"{file.relative_to(ROOT)}:{name}"] = size
    assert long == {}


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "common.py", "misc.py"])
def test_every_file_is_named_after_what_it_holds(name: str) -> None:
    assert [str(file) for file in FILES if file.name == name] == []


def test_errors_are_caught_by_name_except_at_the_boundaries() -> None:
    """Those of processes, and of the screen."""
    boundaries = {f"sparkchat/{name}.py" for name in ("cli/main", "engine/worker", "engine/rank_process", "ui/app")}
    caught = set()
    for file in (ROOT / "sparkchat").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
            ):
                caught.add(str(file.relative_to(ROOT)))
    assert caught - boundaries == set()
