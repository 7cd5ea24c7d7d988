"""Skips what cannot run here, and says why; has a profile of hypothesis for long runs."""

from __future__ import annotations

import signal
from importlib.util import find_spec

import pytest
from hypothesis import settings

settings.register_profile("long", deadline=None, max_examples=5_000, stateful_step_count=100)

NEEDS = {"nixl": ("nixl_cu13", "nixl_cu12"), "vllm": ("vllm",)}


def pytest_configure() -> None:
    """Hear of Ctrl-C and of a hang-up also in the background and under ``nohup``.

    They are ignored there, and what is ignored is inherited by the commands that the tests signal.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked with a library of which no build is installed."""
    missing = {
        marker: pytest.mark.skip(reason=f"{marker} is not installed")
        for marker, modules in NEEDS.items()
        if not any(find_spec(module) for module in modules)
    }
    for item in items:
        for marker, skip in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)
