"""Tests that every test named in a row of a page exists (supported features, tests by feature)."""

import ast
import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
STEP = TESTS.parent / "executor" / "training" / "SUPPORTED.md"


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
    named = re.search(r"\| `([\w/]+\.py)::(test_\w+)(?:\[([\w ]+)\])?` \|$", row)
    assert named is not None
    file, function, case = named.groups()
    text = (folder / file).read_text()
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function)
    assert not any("skip" in ast.unparse(mark) for mark in found.decorator_list)
    assert case is None or re.search(rf'def {case}\(|"{case}"', text)


PAPERS = TESTS.parent / "experiments" / "figures" / "README.md"
COVERED = [
    line.strip("|").split("|") for line in rows(PAPERS, "Coverage of the papers") if not line.startswith("| item")
]


def test_each_paper_is_covered() -> None:
    text = PAPERS.read_text().partition("## Coverage of the papers")[2]
    assert re.findall(r"### (\w+)", text.partition("\n## ")[0]) == [
        "DQN",
        "SmartPool",
        "SuperNeurons",
        "HOME",
        "TENSILE",
    ]
    assert len(COVERED) > 60


@pytest.mark.parametrize("row", COVERED, ids=lambda row: row[0].strip())
def test_covered_items_name_existing_files(row: list[str]) -> None:
    _, where, verdict = (cell.strip() for cell in row)
    named = re.fullmatch(r"`(?:figure=(\w+)|([\w/]+\.py))`", where)
    if named is None:
        assert where == "" and verdict.startswith("left out")
    elif named[1]:
        root = TESTS.parent
        assert (root / "configs" / "figure" / f"{named[1]}.yaml").exists()
        assert (root / "experiments" / "results" / f"{named[1]}.json").exists()
    else:
        assert (TESTS.parent / named[2]).exists()


ROOT = TESTS.parent
BENCH = json.loads((ROOT / "experiments" / "results" / "bench.json").read_text())
LEARNED = ROOT / "agents" / "learned" / "README.md"


@pytest.mark.parametrize("page", ["simulator/README.md", "experiments/README.md"])
def test_pages_state_the_committed_speed(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    (found,) = re.findall(r"(\d+) µs[^.]*?, (\d+) times less", text)
    assert [int(number) for number in found] == [
        round(BENCH["simulate_us"]["resnet50"]),
        round(BENCH["speedup_vs_simpy"]["resnet50"], -1),
    ]


def test_only_the_generated_page_states_the_time_of_all_figures() -> None:
    commands = [line for page in (PAPERS, ROOT / "README.md") for line in page.read_text().splitlines()]
    assert not [line for line in commands if re.search(r"figure=all.*\d+ minutes", line) and "quick" not in line]


def test_the_readme_has_the_overheads_of_the_page_of_learned_planners() -> None:
    """The README's table of overheads is a selection of the page's."""
    table = (ROOT / "README.md").read_text().partition("| budget | `dqn`")[2].partition("\n\n")[0]
    numbers = set(re.findall(r"\d+\.\d\d", table))
    assert len(numbers) > 10 and numbers <= set(re.findall(r"\d+\.\d\d", LEARNED.read_text()))
