"""What the machine has and allows."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Verdict

__all__ = ["clocks", "devices", "drivers", "limits"]

DESCRIPTORS_LEAST = 4_096
"""A link costs a socket and, over UCX, up to two descriptors for each connection ever made; an
engine's API server needs one for each client."""
MIB = 1 << 20
LOCKED_LEAST_BYTES = 1 << 30
SUSPENDED_LEAST_S = 1.0
EFA = "efa"
RDMA = Path("/sys/class/infiniband")
NVIDIA = Path("/proc/driver/nvidia/version")
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


def limits() -> Iterator[Finding]:
    """Descriptors and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS_LEAST:
        yield Finding("file descriptors", Verdict.OK, f"{_count(soft)} may be open")
    else:
        yield Finding(
            "file descriptors",
            Verdict.WARNING,
            f"{soft} may be open: links, UCX and an engine's clients share them",
            f"ulimit -n {min(65_536, hard) if hard > 0 else 65_536}",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY or locked >= LOCKED_LEAST_BYTES or not _rdma():
        said = "without bound" if locked == resource.RLIM_INFINITY else f"{locked // MIB} MiB"
        yield Finding("locked memory", Verdict.OK, f"{said} may be locked")
    else:
        yield Finding(
            "locked memory",
            Verdict.WARNING,
            f"{locked // MIB} MiB may be locked, and RDMA locks the whole KV cache",
            "ulimit -l unlimited; in a container --ulimit memlock=-1, or CAP_IPC_LOCK",
        )


def clocks() -> Iterator[Finding]:
    """Leases are counted on CLOCK_MONOTONIC (R4), which stands still while a host is suspended."""
    suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    source = _text(CLOCK_SOURCE) or "unknown"
    if suspended_s < SUSPENDED_LEAST_S:
        yield Finding("clock", Verdict.OK, f"monotonic, source {source}, never suspended")
        return
    yield Finding(
        "clock",
        Verdict.WARNING,
        f"this host was suspended for {suspended_s:.0f} s since it started, and its leases with it",
        "do not declare write_bound_s on hosts that are suspended, or live-migrated for longer",
    )


def devices() -> Iterator[Finding]:
    """RDMA devices, EFA among them, and GPUs whose memory they may reach."""
    names = _rdma()
    efa = [name for name in names if _driver(name) == EFA]
    if not names:
        yield Finding(
            "RDMA devices", Verdict.NOTE, "none: WRITEs to other hosts go over TCP, through the CPU"
        )
    else:
        kinds = ", ".join(f"{name} ({_driver(name) or 'unknown driver'})" for name in names)
        yield Finding("RDMA devices", Verdict.OK, kinds)
    if efa:
        yield Finding(
            "EFA",
            Verdict.NOTE,
            f"{', '.join(efa)}: NIXL's backend for them is LIBFABRIC",
            'transport_options {"backend": "LIBFABRIC", "fabric": "efa"}',
        )
    driver = _text(NVIDIA)
    if not driver:
        yield Finding("GPU", Verdict.SKIPPED, "no NVIDIA driver: KV is in host memory")
        return
    yield Finding("GPU", Verdict.OK, driver.splitlines()[0])
    if names and "nvidia_peermem" not in _modules() and "Open Kernel Module" not in driver:
        yield Finding(
            "GPU peer memory",
            Verdict.WARNING,
            "neither nvidia_peermem is loaded nor is the driver the open one, which has dma-buf: "
            "RDMA cannot read or write GPU memory directly",
            "modprobe nvidia_peermem, or install the open kernel modules",
        )


def drivers() -> frozenset[str]:
    """The drivers of this host's RDMA devices, such as ``mlx5_core`` and ``efa``."""
    return frozenset(map(_driver, _rdma()))


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _rdma() -> list[str]:
    try:
        return sorted(each.name for each in RDMA.iterdir())
    except OSError:
        return []


def _driver(name: str) -> str:
    try:
        return (RDMA / name / "device" / "driver").resolve(strict=True).name
    except OSError:
        return ""


def _modules() -> frozenset[str]:
    lines = _text(Path("/proc/modules")).splitlines()
    return frozenset(line.split(" ", 1)[0] for line in lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
