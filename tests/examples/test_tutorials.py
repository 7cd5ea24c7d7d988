"""The code in a tutorial is the code of its example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = {
    "tutorial-engine.md": "engine/tiny_engine.py",
    "tutorial-transport.md": "tcp_transport/pushkv_tcp.py",
}


@pytest.mark.parametrize("page", TUTORIALS)
def test_each_block_of_python_is_in_the_example(page: str) -> None:
    example = (ROOT / "examples" / TUTORIALS[page]).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert len(blocks) >= 3
    assert [block for block in blocks if block not in example] == []
