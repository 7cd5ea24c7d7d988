"""The documentation site: `make docs`. The source directory is the repository.

So the links between README, ARCHITECTURE, docs/ and bench/ lead to the same pages on a code host
and in the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# -- what is built

project = "pushkv"
author = "The pushkv authors"
copyright = author  # noqa: A001 - Sphinx's name
root_doc = "docs/index"
extensions = [
    "docs._sphinx.accessible",
    "docs._sphinx.diagrams",
    "docs._sphinx.docstrings",
    "docs._sphinx.sections",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
include_patterns = [
    "docs/*.md",
    "docs/api/*.md",
    "*.md",
    "bench/README.md",
    "fuzz/README.md",
    "examples/**.md",
]
# Not even walked through: an environment alone has tens of thousands of files.
exclude_patterns = [
    "[!A-Zbdef]*",
    "build",
    "dist",
    "bench/results",
    "docs/_sphinx",
    "fuzz/corpus",
]
smartquotes = False  # two dashes begin an option
nitpicky = True
# Names in signatures and between backticks lead somewhere only where there is a page of them.
nitpick_ignore_regex = [("py:.*", ".*")]

# -- Markdown as a code host reads it

myst_enable_extensions = ["attrs_inline", "deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

# -- what docstrings say

for folder in ("adapters", "src", "transports"):
    sys.path.insert(0, str(ROOT / folder))
add_module_names = False
autodoc_default_options = {"imported-members": True, "members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["nixl", "torch", "vllm"]
autodoc_typehints_format = "short"
default_role = "py:obj"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

# -- how it looks

html_theme = "furo"
html_title = "pushkv"
html_extra_path = ["_sphinx/site"]
html_static_path = ["_sphinx/static"]
html_css_files = ["site.css"]
html_copy_source = False
