"""Each check is seen to fail: on a transport with just the mistake that it is there for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pushkv.core.errors import ConfigurationError
from pushkv.testing import CHECKS, ConformanceError, Limits, check_transport

from .broken import BROKEN, LeaksAThread
from .memory_ends import memory_ends

IMPATIENT = Limits(patience_s=0.4, quiet_s=0.02, call_s=0.2, idle_s=0.2)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    LeaksAThread.end.clear()
    yield
    LeaksAThread.end.set()


def test_there_is_a_broken_transport_for_every_check() -> None:
    assert list(BROKEN) == list(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_finds_its_mistake_and_says_what_it_saw(name: str) -> None:
    broken = BROKEN[name]
    with pytest.raises(ConformanceError) as raised:
        check_transport(
            lambda: memory_ends(broken.faults, broken.capabilities, broken.transport),
            [name],
            IMPATIENT,
        )
    assert raised.value.check == name
    assert str(raised.value).startswith(f"{name}: expected ")
    assert broken.said in str(raised.value)


def test_an_unknown_check_is_refused_before_anything_begins() -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_transport(memory_ends, ["bytes_arrive", "bytes_leave"])
    assert raised.value.field == "checks"
    assert raised.value.value == "bytes_leave"
