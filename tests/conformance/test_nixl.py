"""NIXL over UCX conforms, between processes."""

from __future__ import annotations

import pytest

from pushkv.testing import CHECKS, ProcessEnds, check_transport
from pushkv_nixl import NixlTransport

from .memory_ends import HASTY

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(90)]


@pytest.mark.parametrize(
    "environment", [pytest.param({}, id="default"), pytest.param({"UCX_TLS": "tcp"}, id="tcp")]
)
def test_every_check_passes(environment: dict[str, str]) -> None:
    report = check_transport(lambda: ProcessEnds(NixlTransport, environment), limits=HASTY)
    assert report.passed == tuple(CHECKS)
