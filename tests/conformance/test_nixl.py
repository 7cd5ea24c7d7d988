"""NIXL over UCX conforms, between processes."""

from __future__ import annotations

import pytest

from pushkv.testing import CHECKS, ProcessEnds, check_transport
from pushkv.testing.conformance.end import LARGE_BYTES
from pushkv_nixl import NixlTransport

from .memory_ends import HASTY

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(90)]


@pytest.mark.parametrize(
    ("environment", "large_bytes"),
    [
        pytest.param({}, LARGE_BYTES, id="default"),
        pytest.param({"UCX_TLS": "tcp"}, LARGE_BYTES // 4, id="tcp"),
    ],
)
def test_every_check_passes(environment: dict[str, str], large_bytes: int) -> None:
    report = check_transport(
        lambda: ProcessEnds(NixlTransport, environment, large_bytes), limits=HASTY
    )
    assert report.passed == tuple(CHECKS)
