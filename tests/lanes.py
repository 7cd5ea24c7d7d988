"""The ways that bytes take between engines in tests: options of the NIXL transport, by name."""

from __future__ import annotations

__all__ = ["LANES", "OVER_LIBFABRIC", "OVER_UCX"]

LANES: dict[str, dict[str, object]] = {
    "default": {},
    "tcp": {"backend_options": {"engine_config": "TLS=tcp"}},
    "libfabric": {"backend": "LIBFABRIC", "fabric": "tcp", "call_timeout_s": 2.0},
}
"""UCX as it comes, which is shared memory on one host; UCX over TCP alone; libfabric's tcp."""
OVER_UCX = ("default", "tcp")
"""What every environment has."""
OVER_LIBFABRIC = "libfabric"
"""What the environment of `make libfabric` has."""
