"""Configuration of the site (`make docs`): the repository's Markdown files, where they lie, and a reference."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "Headroom"
author = "The Headroom authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/**", *(f"{package}/**" for package in ("simulator", "envs", "agents", "executor"))]
include_patterns += ["experiments/**", "tests/README.md", "tests/data/*/README.md"]
# The templates of the results page, which stands there whole.
exclude_patterns = [f"experiments/figures/{name.name}" for name in (ROOT / "experiments" / "figures").glob("[a-z]*.md")]
exclude_patterns += ["**/__pycache__", "**/*.py"]

myst_heading_anchors = 4
myst_enable_extensions = ["fieldlist"]
highlight_language = "default"
suppress_warnings = ["myst.header", "misc.highlighting_failure"]  # pages of templates begin below the first level

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autoclass_content = "both"

html_theme = "furo"
html_title = f"Headroom {release}"
linkcheck_timeout = 20
linkcheck_retries = 2


def setup(app: Any) -> None:
    """Makes the pages' ``<a id="name"></a>`` targets of MyST, which only knows its own."""

    def convert(_: Any, __: str, source: list[str]) -> None:
        source[0] = re.sub(r'^<a id="(\w+)"></a>$', r"(\1)=", source[0], flags=re.MULTILINE)

    app.connect("source-read", convert)
