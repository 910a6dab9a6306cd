"""FAULTS.md: every row has a test, and every known trap of Airflow's pod operator a row."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "tests" / "operators" / "kubernetes" / "FAULTS.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|") and not line.startswith(("| fault", "|---"))
]
TRAPS = (53015, 59626, 21900, 41867, 62398, 37298, 71369, 51789, 63944)


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_has_its_test(row: list[str]) -> None:
    fault, seen, left, test = row
    assert fault and seen and left
    module, _, name = test.strip("`").partition("::")
    assert name in functions_of(ROOT / "tests/operators/kubernetes" / f"{module}.py")


def test_no_row_stands_twice() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("issue", TRAPS)
def test_a_known_trap_has_a_row(issue: int) -> None:
    assert re.search(rf"#{issue}\b", "".join(row[0] for row in ROWS))
