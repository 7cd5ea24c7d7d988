"""The transport of examples/tcp_transport is what docs/transports.md asks for."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from pushkv.testing import CHECKS, Limits, ProcessEnds, check_transport

EXAMPLE = Path(__file__).parents[2] / "examples" / "tcp_transport"


def test_every_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["pushkv.transports"]["tcp"].split(":")
    transport = getattr(import_module(module), name)
    report = check_transport(lambda: ProcessEnds(transport), limits=Limits(quiet_s=0.1))
    assert report.passed == tuple(CHECKS)
