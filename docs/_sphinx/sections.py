"""A page says by itself where it stands, so that no list of pages has to be kept.

Its first line is a comment, which no reader sees: `<!-- page: explanation 2 -->`, with the section
and, where the order of reading matters, a rank; pages without a rank follow, by name. Without that
line a page in docs/ is a tutorial if its name begins with `tutorial-`, else a how-to guide; one in
examples/ is a tutorial, and any other is about the project.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils.nodes import Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.util.typing import ExtensionMetadata

SECTIONS = ("tutorial", "how-to", "reference", "modules", "explanation", "project")
MARK = re.compile(r"<!-- page: ([\w-]+)(?: (\d+))? -->\n")
UNRANKED = 1000
UNMARKED = {
    "docs/tutorial-": "tutorial",
    "docs/": "how-to",
    "examples/": "tutorial",
    "": "project",
}
"""Section by how the name of a page without a mark begins; the first that fits."""

TITLES = {"README": "Overview"}
"""What a page is called beside others, where that is not its own title."""


def place(name: str, text: str) -> tuple[str, int]:
    """The section of a page and its rank there.

    Args:
        name: Path without suffix, relative to the repository: `docs/vllm`.
        text: What the file says.

    Raises:
        ValueError: It names a section that there is not.
    """
    mark = MARK.match(text)
    if mark is None:
        return next(s for start, s in UNMARKED.items() if name.startswith(start)), UNRANKED
    if mark[1] not in SECTIONS:
        raise ValueError(f"{name}.md: section {mark[1]!r}: expected one of {', '.join(SECTIONS)}")
    return mark[1], int(mark[2] or UNRANKED)


class Section(TocTree):
    """`{section} how-to`: a table of contents of that section's pages."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[Node]:
        """The table of contents."""
        found = []
        for name in self.env.found_docs - {self.config.root_doc}:
            path = self.env.doc2path(name)
            section, rank = place(name, Path(path).read_text(encoding="utf-8"))
            if section == self.arguments[0]:
                found.append((rank, name))
            self.env.note_dependency(path)
        self.content = StringList(
            [
                f"{TITLES[name]} </{name}>" if name in TITLES else f"/{name}"
                for _, name in sorted(found)
            ]
        )
        self.options["glob"] = None  # so that Sphinx looks again when there is a new page
        return super().run()


def setup(app: Sphinx) -> ExtensionMetadata:
    """Make the directive known."""
    app.add_directive("section", Section)
    return {"parallel_read_safe": True}
