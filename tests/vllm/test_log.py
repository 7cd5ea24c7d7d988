"""Where the lines of a failure go in an engine's process."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from pushkv_vllm.log import join

pytestmark = pytest.mark.vllm


def loggers(
    monkeypatch: pytest.MonkeyPatch, own: list[logging.Handler]
) -> tuple[logging.Logger, logging.Logger]:
    """pushkv's and vLLM's as in an engine, where the root has no handlers."""
    ours, theirs = logging.getLogger("pushkv"), logging.getLogger("vllm")
    monkeypatch.setattr(ours, "propagate", False)
    monkeypatch.setattr(ours, "handlers", own)
    monkeypatch.setattr(ours, "level", logging.ERROR)
    monkeypatch.setattr(theirs, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(theirs, "level", logging.DEBUG)
    return ours, theirs


def test_pushkv_logs_where_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = loggers(monkeypatch, [])
    join()
    assert ours.handlers == theirs.handlers
    assert ours.level == logging.DEBUG


def test_what_the_user_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = logging.NullHandler()
    ours, _ = loggers(monkeypatch, [own])
    join()
    assert (ours.handlers, ours.level) == ([own], logging.ERROR)
