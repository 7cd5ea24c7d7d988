"""What UCX may carry WRITEs over, as far as it can be told from outside.

NIXL does not say which lane UCX chose. UCX itself logs it, with the agent's name, once it connects
(``intra-node cfg#1 rma_am(tcp/lo) am(tcp/lo cma/memory)``); before that, the settings that decide
are read here, and which RDMA devices UCX has opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

__all__ = [
    "Fabric",
    "may_share_memory",
    "may_use_rdma",
    "may_use_tcp",
    "open_rdma_devices",
    "present_rdma_devices",
    "ucx_fabric",
    "ucx_setting",
]

_SHARED_MEMORY = frozenset({"cma", "knem", "xpmem", "sysv", "posix"})
_SHARED_MEMORY_ALIASES = frozenset(
    {"all", "shm", "sm", "mm", "cuda", "cuda_ipc", "rocm", "rocm_ipc"}
)
_NOT_RDMA = _SHARED_MEMORY | {
    "shm", "sm", "mm", "self", "tcp", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm",
    "rocm_copy", "rocm_ipc", "ze_copy",
}  # fmt: skip


@frozen
class Fabric:
    """What is known of the lanes.

    Attributes:
        summary: One line for the log.
        shared_memory: Whether bytes may cross memory shared with the peer.
        warnings: What the operator probably did not mean.
    """

    summary: str
    shared_memory: bool
    warnings: tuple[str, ...] = ()


def ucx_setting(name: str, environment: Mapping[str, str], options: Mapping[str, str]) -> str:
    """UCX's setting `name` ("TLS"), "" if it is not set. The environment wins over the option."""
    for entry in options.get("engine_config", "").split(","):
        key, _, value = entry.partition("=")
        if key.strip() == name:
            return environment.get(f"UCX_{name}", value.strip())
    return environment.get(f"UCX_{name}", "")


def _names(tls: str) -> frozenset[str]:
    # Each name may be restricted ("rc_x:aux") or escaped against aliases ("\\rc").
    return frozenset(each.strip().lstrip("\\").split(":")[0] for each in tls.split(","))


def may_share_memory(tls: str) -> bool:
    """Whether UCX_TLS=`tls` allows bytes to cross memory shared with the peer."""
    if not tls:
        return True
    if tls.startswith("^"):
        excluded = _names(tls[1:])
        return not (excluded >= _SHARED_MEMORY or excluded & {"sm", "shm"})
    return bool(_names(tls) & (_SHARED_MEMORY | _SHARED_MEMORY_ALIASES))


def may_use_rdma(tls: str) -> bool:
    """Whether UCX_TLS=`tls` allows RDMA."""
    return not tls or tls.startswith("^") or bool(_names(tls) - _NOT_RDMA)


def may_use_tcp(tls: str) -> bool:
    """Whether UCX_TLS=`tls` allows TCP."""
    if tls.startswith("^"):
        return "tcp" not in _names(tls[1:])
    return not tls or bool(_names(tls) & {"all", "tcp"})


def ucx_fabric(
    environment: Mapping[str, str],
    options: Mapping[str, str],
    present: Iterable[str],
    opened: Iterable[str],
) -> Fabric:
    """What UCX may use under these settings.

    Args:
        environment: The process's environment.
        options: The backend's options (`engine_config`).
        present: RDMA devices of the host, by name.
        opened: RDMA device files that this process holds open once the backend stands.
    """
    tls = ucx_setting("TLS", environment, options)
    devices = ucx_setting("NET_DEVICES", environment, options)
    present, opened = sorted(present), sorted(opened)
    shared_memory = may_share_memory(tls)
    lanes = [f"RDMA ({', '.join(opened)})" if opened else "TCP"]
    if shared_memory:
        lanes.append("shared memory to peers of this host")
    warnings = []
    if present and not opened and may_use_rdma(tls):
        warnings.append(
            f"this host has RDMA devices ({', '.join(present)}) but UCX opened none of them: "
            "WRITEs to other hosts go over TCP; check /dev/infiniband, the provider library "
            f"(libefa, libmlx5), UCX_TLS={tls or 'unset'} and UCX_NET_DEVICES={devices or 'unset'}"
        )
    summary = (
        f"UCX_TLS={tls or 'unset'}, UCX_NET_DEVICES={devices or 'unset'}; WRITEs may go over "
        f"{' and '.join(lanes)}; UCX logs its choice when it connects"
    )
    return Fabric(summary, shared_memory, tuple(warnings))


def present_rdma_devices() -> list[str]:
    """The host's RDMA devices, by name."""
    try:
        return sorted(each.name for each in Path("/sys/class/infiniband").iterdir())
    except OSError:
        return []


def open_rdma_devices() -> list[str]:
    """The RDMA device files this process holds open, each once."""
    found = set()
    try:
        links = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return []
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("/dev/infiniband/uverbs"):
            found.add(target.rpartition("/")[2])
    return sorted(found)
