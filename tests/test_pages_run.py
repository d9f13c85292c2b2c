"""Runs the code of docs/ and of the README, compares printed output, and finds quoted messages in the source.

Fenced blocks of one page share a namespace and a working directory. ``python`` runs; if it begins with ``# name.py``,
it is written to that file. ``console``: a line after ``$`` is a command, the lines below are its output. ``text`` is
what the block before prints. ``…`` in output stands for any text. ``sh``: commands that install, only checked.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_budget import ROOT, tracked

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "text", "sh", "{toctree}", "{eval-rst}"}
LONG = {
    "README.md",
    "docs/install.md",
    "docs/tutorials/model.md",
    "docs/tutorials/agent.md",
    "docs/tutorials/figure.md",
}


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def pattern_of(expected: str) -> str:
    """Returns a regular expression in which ``…`` stands for any text, and a run of spaces for another."""
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in expected.strip().split("…")]
    return r"[\s\S]*?".join(parts) + r"\s*"


def assert_printed(expected: str, printed: str) -> None:
    assert re.fullmatch(pattern_of(expected), printed.strip()), f"expected\n{expected}\ngot\n{printed}"


def run_command(words: list[str], folder: Path) -> str:
    if words[0] == "headroom":
        words = ["python", "-m", "experiments", *words[1:]]
    if words[0] != "python":
        raise AssertionError(f"a page has the command {words[0]!r}, which no test runs")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_console(text: str, folder: Path) -> None:
    for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, expected = command.partition("\n")
        assert_printed(expected, run_command(shlex.split(line), folder))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.nightly] if name_of(page) in LONG else [])
        for page in PAGES
        if any(block.language in ("python", "console") for block in blocks(page))
    ],
)
def test_the_code_of_a_page_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, object] = {}
    printed = ""
    for block in blocks(page):
        if block.language == "python":
            if file := re.match(r"# (\w+\.py)\n", block.text):
                (tmp_path / file[1]).write_text(block.text)
                continue
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, name_of(page), "exec"), namespace)
            printed = output.getvalue()
        elif block.language == "text":
            assert_printed(block.text, printed)
        elif block.language == "console":
            run_console(block.text, tmp_path)
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def test_every_block_has_a_language_that_is_run_or_marked() -> None:
    for page in PAGES:
        text = page.read_text()
        assert {block.language for block in blocks(page)} <= LANGUAGES, name_of(page)
        assert text.count("\n```") == 2 * len(blocks(page)), name_of(page)
        assert not re.search(r"\n\n    \S", BLOCK.sub("", text)), f"{name_of(page)}: indented code does not run"


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_commands_that_install_name_targets_and_extras_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = 0
    for page in PAGES:
        for command in [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]:
            words = shlex.split(command, comments=True)
            assert words[0] in ("git", "python3", "pip", "make"), command
            assert words[0] != "make" or words[1] in targets, command
            assert ".whl" not in command or f"headroom-{version}-" in command, command
            found += 1
        for extras in re.findall(r"pip install '\.\[([\w,]+)\]'", page.read_text()):
            assert set(extras.split(",")) <= EXTRAS.keys(), extras
    assert found >= 5


def test_the_table_of_extras_has_all_of_them() -> None:
    table = (ROOT / "docs" / "install.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    named = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    ]
    assert sorted(named) == sorted(EXTRAS)


def test_a_user_who_plans_installs_no_trainer() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", entry)[0] for entry in dependencies}
    assert not names & {"ray", "lightning", "mlflow-skinny", "mlflow", "wandb", "transformers", "stable-baselines3"}
    makefile = (ROOT / "Makefile").read_text()
    assert (
        "\ntrain: $(BASE)" in makefile and "--editable .\n" in makefile.partition("\n$(BASE):")[2].partition("\n\n")[0]
    )


def strings(path: Path) -> list[str]:
    """Returns a file's string literals with … for the fields of f-strings; a conditional part is one, too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def messages() -> list[str]:
    rows = [line for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    return [re.match(r"\| `(.*?)` \|", row)[1] for row in rows]


def test_quoted_messages_are_in_the_source() -> None:
    packages = ("simulator", "envs", "agents", "executor", "experiments")
    source = [text for path in tracked("*.py") if name_of(path).startswith(packages) for text in strings(path)]
    assert len(messages()) > 30
    missing = []
    for message in messages():
        parts = [part for part in message.split("…") if part.strip(" :,(")]
        pattern = re.compile("[\\s\\S]*".join(map(re.escape, parts)))
        missing += [message] if not any(pattern.search(text) for text in source) else []
    assert not missing
