"""NIXL over LIBFABRIC's tcp provider conforms, between processes."""

from __future__ import annotations

from functools import partial

import pytest

from pushkv.testing import CHECKS, Limits, ProcessEnds, check_transport
from pushkv.testing.conformance.end import LARGE_BYTES
from pushkv_nixl import NixlTransport

NOT_DECLARED = {"done_means_visible", "predecessor_stays_dead"}


@pytest.mark.timeout(120)
def test_every_check_passes_but_for_what_is_not_declared() -> None:
    transport = partial(NixlTransport, backend="LIBFABRIC", fabric="tcp")
    report = check_transport(
        lambda: ProcessEnds(transport, large_bytes=LARGE_BYTES // 4), limits=Limits(patience_s=15.0)
    )
    assert report.skipped.keys() == NOT_DECLARED
    assert set(report.passed) == CHECKS.keys() - NOT_DECLARED
