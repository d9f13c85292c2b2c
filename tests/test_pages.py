"""Pages whose rows name a test: what works in a step, which test a feature has. All that they name is there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
STEP = TESTS.parent / "executor" / "training" / "README.md"


def rows(page: Path, heading: str) -> list[str]:
    text = page.read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("|") and not re.match(r"\|-|.*\| test \|$", line)]


IN_A_STEP = rows(STEP, "What works, what does not")
FEATURES = [row for row in rows(TESTS / "README.md", "Which test a feature has") if "](" not in row]


def test_there_are_rows() -> None:
    assert len(IN_A_STEP) > 30 and len(FEATURES) > 35


@pytest.mark.parametrize(
    ("row", "folder"),
    [*((row, TESTS / "executor" / "training") for row in IN_A_STEP), *((row, TESTS) for row in FEATURES)],
    ids=lambda one: one.split("|")[1].strip() if isinstance(one, str) else "",
)
def test_a_row_names_a_test_that_runs(row: str, folder: Path) -> None:
    named = re.search(r"\| `([\w/]+\.py)::(test_\w+)(?:\[(\w+)\])?` \|$", row)
    assert named is not None
    file, function, case = named.groups()
    text = (folder / file).read_text()
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function)
    assert not any("skip" in ast.unparse(mark) for mark in found.decorator_list)
    assert case is None or re.search(rf"def {case}\(", text)
