"""README.md of this folder: every test it names exists, and every test here stands in the rows of its cases."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent


def rows() -> dict[str, set[str]]:
    """Case -> tests as `path::name`, as the table has them."""
    found = {}
    for line in (HERE / "README.md").read_text(encoding="utf-8").splitlines():
        if case := re.match(r"\| (B\d\d) \|", line):
            assert case[1] not in found, f"{case[1]} stands twice"
            found[case[1]] = set(re.findall(r"`([\w/.]+::\w+)`", line))
    return found


def functions(path: Path) -> dict[str, str]:
    """Test name -> docstring, methods of classes included."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name: ast.get_docstring(node) or "" for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists():
    table = rows()
    assert len(table) == 44 and all(table.values())
    for case, tests in table.items():
        for test in tests:
            path, _, name = test.partition("::")
            assert name.startswith("test_") and name in functions(TESTS / path), f"{case}: {test}"


def test_every_test_here_is_in_its_rows():
    table = rows()
    for path in sorted(HERE.glob("test_*.py")):
        if path == Path(__file__):
            continue
        for name, text in functions(path).items():
            if not name.startswith("test_"):
                continue
            head = re.match(r"(?:B\d\d(?:, )?)+(?=: )", text)
            assert head, f"{path.name}: the docstring of {name} does not start with its cases"
            for case in re.findall(r"B\d\d", head[0]):
                assert f"field/{path.name}::{name}" in table[case], f"{case}: {name} is missing"
