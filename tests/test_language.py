"""Tests the language of pages, docstrings, comments and messages, and the length of module docstrings and pages."""

import ast
import re

from tests.test_budget import ROOT, tracked

BETTER = {  # a regular expression, and what to write instead
    r"\b(?:runs?|running|ran|made|makes) again\b": "recomputed",
    r"\b(?:is|are|be|being|has|have) away\b": "evicted, swapped out",
    r"\b(?:comes?|came|coming) back\b": "swapped in, restored, returns",
    r"\b(?:goes|going|go|went) on\b": "continues",
    r"\banew\b": "again",
    r"\bnobody\b": "no caller, or the passive voice",
    r"\bwho(?:ever)? (?:asks|has|runs|wants|needs|holds)\b": "name the caller",
    r"\bto the bit\b": "bit-identical, bit by bit",
    r"\bto the byte\b": "exactly",
    r"\bthe card\b": "device memory",
    r"\b(?:is|are) (?:said|told)\b|\bsa(?:ys|id|y) so\b": "name what reports it",
    r"\bwhere there (?:is|are) (?:none|no)\b|\bthat there (?:is|are)\b": "if no … is given",
    r"\bone's own\b": "your own",
    r"\bas ever\b": "as usual",
    r"\bfor ever\b": "indefinitely",
}
WORDS = 1_200  # of a page, table pipes included
LONGER = {  # pages with long tables or lists that comments cite
    "CHANGELOG.md": 1_700,
    "experiments/figures/home.md": 1_350,
    "experiments/figures/own.md": 2_060,
    "experiments/figures/smartpool.md": 1_850,
    "experiments/figures/superneurons.md": 1_850,
    "experiments/results/README.md": 2_780,  # generated, as are the next six
    "experiments/results/dqn.md": 1_350,
    "experiments/results/home.md": 1_850,
    "experiments/results/own.md": 4_490,
    "experiments/results/smartpool.md": 2_100,
    "experiments/results/superneurons.md": 2_400,
    "experiments/results/tensile.md": 2_390,
}
GENERATED = [path.relative_to(ROOT).as_posix() for path in (ROOT / "experiments" / "results").glob("*.md")]
# What asserts phrases as data, a text in the digests of random cases, an axis of a committed picture.
KEEP = (
    *GENERATED,
    "tests/test_language.py",
    "tests/experiments/figures/test_figure.py",
    "tests/experiments/test_interrupt.py",
    "simulator/rules.py",
    "experiments/figures/home.py",
)
PAGES = [path.relative_to(ROOT).as_posix() for path in tracked("*.md")]
MODULES = [path.relative_to(ROOT).as_posix() for path in tracked("*.py")]


def test_no_phrase_is_banned() -> None:
    found: dict[str, dict[str, str]] = {}
    for name in (*PAGES, *MODULES):
        if name not in KEEP:
            text = " ".join((ROOT / name).read_text().split())
            here = {match[0]: better for phrase, better in BETTER.items() for match in re.finditer(phrase, text)}
            found |= {name: here} if here else {}
    assert not found


def test_module_docstrings_have_at_most_twelve_lines() -> None:
    lines = {
        name: len((ast.get_docstring(ast.parse((ROOT / name).read_text())) or "").splitlines()) for name in MODULES
    }
    assert not {name: count for name, count in lines.items() if count > 12}


def test_pages_are_within_their_words() -> None:
    words = {name: len((ROOT / name).read_text().split()) for name in PAGES}
    assert not {name: count for name, count in words.items() if count > LONGER.get(name, WORDS)}
