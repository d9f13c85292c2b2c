"""Opens the page of ``experiments.plan`` in a headless browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
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
# The page in a frame of a given width (a browser's window is at least 500 px wide), and what does not fit into it. Wide
# tables and code scroll in boxes of their own.
FRAME = """<iframe style="width:{width}px; height:3000px; border:0" srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const frame = document.querySelector("iframe").contentWindow;
  const all = query => [...frame.document.querySelectorAll(query)];
  const box = element => element.getBoundingClientRect();
  const outside = all("body *").filter(e => !e.closest(".wide, pre") && box(e).right > {width} + 1);
  const narrow = all(".wide td:not(.n)").filter(e => e.textContent && box(e).width < 60);
  const text = elements => elements.map(e => e.textContent.slice(0, 80));
  const result = {{outside: text(outside), narrow: text(narrow), labels: text(all(".canvas span"))}};
  document.body.innerHTML = "<pre>RESULT" + JSON.stringify(result) + "</pre>";
}};
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
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_the_page_without_overflow(width: int, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    file = tmp_path / "page.html"
    file.write_text(FRAME.format(width=width, page=escape(page.render_html(answer(), "typed"))))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,3100", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([browser, *options, profile, file.as_uri()], capture_output=True, text=True, check=True)
    result = json_of(done.stdout)
    assert (result["outside"], result["narrow"]) == ([], [])
    assert {"forward", "backward", "update"} <= {*result["labels"]}


def json_of(dom: str) -> dict[str, Any]:
    found = re.search(r"RESULT(\{.*?\})</pre>", dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(unescape(found[1]))
