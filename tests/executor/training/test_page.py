"""The page "What works, what does not": every test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "executor" / "training" / "README.md"
ROWS = [line for line in PAGE.read_text().partition("## What works")[2].partition("\n## ")[0].splitlines()
        if line.startswith("|") and not re.match(r"\|-|\| [^|]+ \| \| test \|", line)]  # fmt: skip


def test_there_are_rows() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test_that_runs(row: str) -> None:
    named = re.search(r"\| `(test_\w+\.py)::(test_\w+)(?:\[(\w+)\])?` \|$", row)
    assert named is not None
    file, function, case = named.groups()
    text = (HERE / file).read_text()
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function)
    assert not any("skip" in ast.unparse(mark) for mark in found.decorator_list)
    assert case is None or re.search(rf"def {case}\(", text)
