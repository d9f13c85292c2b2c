"""Tests templates of a figure's texts: filling, and repeated rows, columns and notes."""

from typing import Any

import pytest

from experiments.figures import verdicts
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

- ResNets are like {{first}}.
- VGG16 is not among the rows.

### Claims

| all are even | always | {{even}} of {{count}} | {{holds(even, count)}} |
| larger than the rival's | larger | {{ahead}}, {{behind}} | {{leads(ahead, behind, count)}} |
| nobody is there | – | {{nobody}} | {{holds(count, count)}} |
| no case | – | 0 | {{holds(0, 0)}} |
| VGG16 is larger | – | yes | {{holds(count, count)}} |

### Choices

1. Not filled: {{unknown}}.
"""


def figure(**numbers: Any) -> Figure:
    lines = [{"x": 2, "y": 4.0, "more": ["a", "b"]}, {"x": 3, "y": None, "more": ["c", "d"]}]
    values = {"lines": lines, "heads": ["p", "q"], "sum": 1300, "count": 2, "nobody": None, "first": "it", **numbers}
    values = {"even": 2, "ahead": 2, "behind": 0, **values}
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


def test_choices_are_published_as_written() -> None:
    assert figure().choices == "1. Not filled: {{unknown}}."


def verdicts_of(rows: list[dict[str, Any]], **numbers: Any) -> list[str]:
    return [claim.verdict for claim in figure(**numbers).claims(rows)]


def test_a_verdict_follows_the_numbers() -> None:
    assert verdicts_of([]) == ["reproduced", "reproduced"]
    assert verdicts_of([], even=1, ahead=1) == ["partly", "partly"]
    assert verdicts_of([], even=0, ahead=0) == ["not reproduced", "tie"]
    assert verdicts_of([], count=5, ahead=1, behind=2) == ["not reproduced", "not reproduced"]
    assert verdicts_of([], ahead=0, behind=2) == ["reproduced", "refuted"]
    assert verdicts_of([], nobody=3) == ["reproduced"] * 3


def test_what_names_an_absent_network_is_left_out() -> None:
    resnet = [{"found": {"resnet50": 1}}]
    assert "ResNets are like it." in figure().format_text(resnet)[2]
    assert "ResNets are like it." not in figure().format_text([{"network": "vgg11"}])[2]
    assert figure().format_text([{"network": "vgg16_imagenet"}])[2][-1] == "VGG16 is not among the rows."
    assert len(verdicts_of([{"network": "vgg16"}])) == 1 + len(verdicts_of(resnet))


def test_a_claim_without_a_rule_is_refused() -> None:
    text = TEXT.replace("{{holds(even, count)}}", "holds")
    squares = type("Squares", (type(figure()),), {"text": text})()
    with pytest.raises(ValueError, match="expected a claim of"):
        squares.claims([])


def test_rules_for_numbers() -> None:
    assert verdicts.agrees([1.05, 2.0], [1.0, 2.0]) == "reproduced"
    assert verdicts.agrees([1.05, 3.0], [1.0, 2.0]) == "partly"
    assert verdicts.agrees([1.5, 3.0, 9.0], 1.0) == "not reproduced"
    assert verdicts.agrees([1.0, 5.0], [1.0, None]) == "reproduced" and verdicts.agrees(None, 1.0) is None
    assert verdicts.at_least(Range([1, 3]), 2) == "partly" and verdicts.at_most(2, 2) == "reproduced"
    assert verdicts.at_most([3], 2) == "not reproduced"


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
