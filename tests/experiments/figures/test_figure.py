"""Tests templates of a figure's texts: filling, and repeated rows, columns and notes."""

from typing import Any

import pytest

from experiments.figures.figure import MISSING, TEMPLATES, Figure, Range, span

TEXT = """## Squares

Fig. 1 of "Numbers",
section 2.

| number | square | {{heads|columns}} |
|---|---:|---:|
{%for line in lines%}
| {{line.x}} | {{line.y|f(".1f")}} | {{line.more|columns}} |
{%endfor%}
{%for line in lines|brief("x",3)%}
| {{line.x}} | only | {{line.more|columns}} |
{%endfor%}
| all | {{sum|f(",")}} | |

- There are {{count}}.
{%for line in lines%}
- {{line.x}} makes
  {{line.y|f("g")}}.
{%endfor%}
- Nobody is at {{nobody}}.

### Choices

1. Not shown: {{unknown}}.
"""


def figure(**numbers: Any) -> Figure:
    lines = [{"x": 2, "y": 4.0, "more": ["a", "b"]}, {"x": 3, "y": None, "more": ["c", "d"]}]
    values = {"lines": lines, "heads": ["p", "q"], "sum": 1300, "count": 2, "nobody": None, **numbers}
    return type("Squares", (Figure,), {"text": TEXT, "template_values": lambda self, rows: values})()


def test_texts() -> None:
    squares = figure()
    assert squares.title == "Squares" and squares.introduction == 'Fig. 1 of "Numbers", section 2.'
    heads, cells, notes = squares.format_text([], brief=True)
    assert heads == ["number", "square", "p", "q"] == squares.format_text([])[0]
    assert cells == [["2", "4.0", "a", "b"], ["3", "", "c", "d"], ["3", "only", "c", "d"], ["all", "1,300", ""]]
    assert ["2", "only", "a", "b"] in squares.format_text([])[1]
    assert notes == ["There are 2.", "2 makes 4."]
    assert figure(nobody="home").format_text([])[2][2] == "Nobody is at home."
    with pytest.raises(KeyError, match="unknown"):
        render("{{unknown}}", {})


def render(template: str, values: dict[str, Any]) -> str:
    return TEMPLATES.from_string(template).render(values)


def test_numbers_in_templates() -> None:
    values = {
        "bytes": 3 * 2**20,
        "ns": 2_500_000,
        "d": {"k": [0.5, None]},
        "none": None,
        "list": [1.0, 2.5],
        "range": Range([0.25, 0.1]),
        "one": Range([0.101, 0.099]),
        "sizes": Range([1e9, 3e9]),
    }
    sizes = '{{bytes|MiB|f(".1f")}} MiB, {{ns|ms|f("g")}} ms, {{sizes|GB|f(".0f")}} GB'
    assert render(sizes, values) == "3.0 MiB, 2.5 ms, 1 to 3 GB"
    texts = '{{d.k[0]|f(".0%")}}, {{list|f(".1f")}}, {{range|f(".0%")}}, {{one|f(".0%")}}'
    assert render(texts, values) == "50%, 1.0, 2.5, 10% to 25%, 10%"
    missing = ("{{none}}", '{{d.k[1]|f(".0f")}}', "{{none.a}}", "{{none.a[0]|MiB}}")
    assert {render(template, values) for template in missing} == {MISSING}
    assert span([None, 2.0, 1.0]) is not None and span([None]) is None
