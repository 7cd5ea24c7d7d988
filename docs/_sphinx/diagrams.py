"""Mermaid diagrams, drawn when the site is built: no reader needs a script or a network.

Mermaid itself draws them, in the JavaScript engine that `mermaidx` brings. That takes a second for
each, so processes do it while all pages are read. A fence is written as for a code host. What a
screen reader says is the diagram's own `accTitle` and `accDescr`, or else the heading above it.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

CONFIG = Path(__file__).with_name("mermaid.json")
"""Letters as wide as those that mermaidx measures boxes with."""

OWN_ID = "my-svg"
"""What mermaidx calls every diagram, and begins most of the names in it with."""

OTHER_ID = re.compile(rf' id="(?!{OWN_ID})')
WIDTH = re.compile(r"max-width: ([\d.]+px)")

logger = logging.getLogger(__name__)
drawers = ThreadPoolExecutor(os.cpu_count())


class diagram(nodes.General, nodes.Element):  # noqa: N801 - docutils names nodes so
    """A diagram's text, in `code`."""


class Mermaid(SphinxDirective):
    """A fence of `mermaid`."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The node; who writes its page waits for the drawing."""
        node = diagram(code="\n".join(self.content))
        drawing(node["code"])
        self.set_source_info(node)
        return [node]


@cache
def drawing(code: str) -> Future[str]:
    """The SVG of a diagram, once it is drawn."""
    return drawers.submit(draw, code)


def draw(code: str) -> str:
    """The SVG as Mermaid makes it; blocks for a second.

    Raises:
        RuntimeError: Mermaid cannot read `code`; says where.
    """
    command = [sys.executable, "-m", "mermaidx", "--quiet", "-c", str(CONFIG), "-i", "-"]
    ran = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    if ran.returncode or not ran.stdout.startswith("<svg"):
        raise RuntimeError(ran.stderr.rpartition("RuntimeError: ")[2].strip())
    return ran.stdout


def named(svg: str, code: str, label: str) -> str:
    """The SVG under names that no other diagram on the page has.

    Args:
        svg: What was drawn.
        code: Mermaid's text.
        label: What it is called where it has no `accTitle`.
    """
    name = f"diagram-{hashlib.sha256(code.encode()).hexdigest()[:12]}"
    svg = OTHER_ID.sub(f' id="{name}-', svg).replace(OWN_ID, name)
    if "aria-labelledby" not in svg:
        svg = svg.replace("<svg ", f'<svg aria-label="{html.escape(label)}" ', 1)
    return WIDTH.sub(r"--natural: \1; max-width: \1", svg, count=1)


def visit(writer: Any, node: diagram) -> None:
    """Write it, in a frame that scrolls where the screen is narrow."""
    section: Any = node.parent
    while not isinstance(section, nodes.section):
        section = section.parent
    label = f"Diagram: {section.next_node(nodes.title).astext()}"
    try:
        svg = named(drawing(node["code"]).result(), node["code"], label)
    except RuntimeError as error:
        logger.warning("%s", error, location=node)
        raise nodes.SkipNode from error
    writer.body.append(
        f'<div class="diagram" role="group" tabindex="0" aria-label="{html.escape(label)}">'
        f"{svg}</div>\n"
    )
    raise nodes.SkipNode


def setup(app: Sphinx) -> ExtensionMetadata:
    """Make the directive known."""
    app.add_directive("mermaid", Mermaid)
    app.add_node(diagram, html=(visit, None))
    # Threads that wait for drawings do not live on in a fork.
    return {"parallel_read_safe": False, "parallel_write_safe": False}
