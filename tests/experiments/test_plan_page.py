"""Opens the page of ``experiments.plan`` in a headless browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.floor import floor
from experiments.plan import __main__ as command, page, planning
from experiments.plan.answer import Answer, Change, Largest
from simulator import Kernel, Machine, Program, Tensor
from tests.experiments.conftest import chain

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MACHINE = Machine.load("h100")
pytestmark = pytest.mark.usefixtures("counted")
# Widths of the page and of what does not fit into it; wide tables scroll in a box of their own.
PROBE = """<script>
const outside = [...document.querySelectorAll("body *")]
  .filter(e => !e.closest(".wide, pre") && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.className || e.tagName);
const narrow = [...document.querySelectorAll(".wide td")]
  .filter(e => e.textContent && !e.matches(".n") && e.getBoundingClientRect().width < 60).map(e => e.textContent);
const labels = [...document.querySelectorAll(".canvas span")].map(e => e.textContent);
document.body.innerHTML = "<pre>RESULT" + JSON.stringify({scroll: document.body.scrollWidth, outside, narrow, labels});
</script>"""


def answer() -> Answer:
    program = chain(8)
    update = Kernel("update", "optimizer", "optimizer", (0,), (0,), 8_000_000)
    program = replace(program, kernels=(*program.kernels, update))
    task = (program, MACHINE, program.peak_bytes * 7 // 10)
    families = [planning.best_of("swap, published", ["tensile"], task, "joint", 0)]
    size = Largest(8, 4, 16, "tensile", 0.1, True, most=8192)
    a = command.make_answer(task, None, "joint", families, floor(*task, "joint", detail=0.0), size, 0.0)
    changes = tuple(
        Change(f"change {i} of the step", 10**8 * i, 0.1 * i, "same bits, but slower", i < 3) for i in range(5)
    )
    slowest = (["slowest kernels", "where", "time"], [["mm", "model.layers.17.mlp.down_proj and 31 more", "1.00 ms"]])
    return replace(a, what_if=changes, slowest=slowest, run_code="from executor import fit\n" + "x" * 150)


def test_phases_and_the_limit_are_labeled() -> None:
    text = page.render_html(answer(), "typed")
    labels = re.findall(r'<span class="(?:limit|phase|phase left)"[^>]*>([^<]+)<', text)
    assert [label.split()[0] for label in labels] == ["limit", "forward", "backward", "update"]
    assert text.index("How to run it") < text.index("What if") < text.index("Memory over one step")


def test_short_updates_within_the_backward_pass_are_no_phase_of_their_own() -> None:
    kernels = [Kernel("f", "other", "forward", (0,), (1,), 10**6)]
    for k in range(100):
        kernels += [Kernel(f"b{k}", "other", "backward", (0, 1), (2,), 10**6)]
        kernels += [Kernel(f"u{k}", "other", "optimizer", (0, 2), (0,), 10**4)]
    tensors = (Tensor("w", 2**20, "parameter", True), Tensor("x", 2**20), Tensor("g", 2**20, "gradient"))
    program = Program("early", tensors, (*kernels, Kernel("end", "other", "optimizer", (0,), (0,), 10**7)))
    task = program, MACHINE, program.peak_bytes
    a = command.make_answer(task, None, "joint", [], floor(*task, "joint", detail=0.0), Largest(), 0.0)
    labels = re.findall(r'<span class="phase[^"]*"[^>]*>([^<]+)<', page.render_html(a, "typed"))
    assert labels == ["forward", "backward", "update"]


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 500])  # Chromium's windows have at least 500 px
def test_a_browser_shows_the_page_without_overflow(width: int, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    file = tmp_path / "page.html"
    file.write_text(page.render_html(answer(), "typed").replace("</body>", f"{PROBE}</body>"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([browser, *options, profile, file.as_uri()], capture_output=True, text=True, check=True)
    result = json_of(done.stdout)
    assert result["scroll"] <= width and result["outside"] == [] and result["narrow"] == []
    assert {"forward", "backward", "update"} <= {*result["labels"]}


def json_of(dom: str) -> dict[str, Any]:
    found = re.search(r"RESULT(\{.*?\})</pre>", dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(found[1])
