"""Lets the assertions of scenarios say what they compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(
        f"tests.faults.{module}"
        for module in ("links", "outcomes", "phases", "processes", "requests", "visibility")
    )
)
