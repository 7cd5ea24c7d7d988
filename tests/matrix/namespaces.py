"""Two engines on two hosts, for all that the kernel's network knows: namespaces and a veth pair.

The namespaces belong to the engines' processes and end with them. UCX finds network devices below
/sys, which shows those of the namespace that mounted it: so each process mounts its own.

A cut is a neighbour's wrong address: what is sent into that direction leaves, and is dropped by
whoever gets it. Nobody is told, and the other direction goes on.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from tests.lanes import OVER_LIBFABRIC
from tests.runtime.nixl_node import NixlNode

from pushkv.core.ids import Duration, seconds

from .reference import Stage

__all__ = ["FAR_D", "FAR_P", "cut", "down", "far_apart", "heal", "impossible", "slow"]

FAR_P, FAR_D = "P on another host", "D on another host"
_DEVICES = {FAR_P: "veth0", FAR_D: "veth1"}
_ADDRESSES = {FAR_P: "10.99.0.1", FAR_D: "10.99.0.2"}
_NOWHERE = "02:00:00:00:00:99"
_CHANGES = {"settle": seconds(2)}
"""Over LIBFABRIC a WRITE is done when its bytes are with the socket, and P says so: what sockets
hold takes another second on a link of 8 Mbit/s that three clients share."""
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000


@cache
def impossible() -> str:
    """Why there can be no namespaces here; "" where there can."""
    probe = "mount -t sysfs sysfs /sys && ip link add veth0 type veth peer name veth1 && tc qdisc"
    try:
        tried = subprocess.run(
            ["unshare", "--net", "--mount", "sh", "-c", probe],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"network namespaces need unshare, mount, ip and tc: {error}"
    if tried.returncode:
        return f"network namespaces are not permitted here: {tried.stderr.strip()}"
    return ""


def far_apart(stage: Stage) -> None:
    """The engines `FAR_P` and `FAR_D` of this stage are on hosts of their own."""
    changes = _CHANGES if stage.lane == OVER_LIBFABRIC else {}
    stage.special[FAR_P] = lambda _: _options(FAR_P, None, changes)
    stage.special[FAR_D] = lambda stage: _options(FAR_D, stage.node(FAR_P).process.pid, changes)


def cut(stage: Stage, *towards: str) -> None:
    """What is sent towards these engines does not arrive; nobody is told."""
    for name in towards:
        sender = FAR_P if name == FAR_D else FAR_D
        place = ("lladdr", _NOWHERE, "dev", _DEVICES[sender], "nud", "permanent")
        _in(stage.node(sender), "ip", "neigh", "replace", _ADDRESSES[name], *place)


def down(stage: Stage, name: str) -> None:
    """Both ends' devices go down, as when a cable is pulled."""
    _in(stage.node(name), "ip", "link", "set", _DEVICES[name], "down")


def slow(stage: Stage, bits_per_s: int) -> None:
    """Both ends send no faster than that."""
    for name, device in _DEVICES.items():
        how = ("rate", f"{bits_per_s}bit", "burst", "16k", "latency", "2s")
        _in(stage.node(name), "tc", "qdisc", "replace", "dev", device, "root", "tbf", *how)


def heal(stage: Stage) -> None:
    """The network is whole, and as fast as it can be."""
    for name, device in _DEVICES.items():
        node = stage.node(name)
        _in(node, "ip", "link", "set", device, "up")
        for order in (("ip", "neigh", "flush", "nud", "all", "dev"), ("tc", "qdisc", "del", "dev")):
            more = ("root",) if order[0] == "tc" else ()
            _in(node, *order, device, *more, may_fail=True)


# -- inside


def _options(name: str, other: int | None, changes: Mapping[str, Duration]) -> dict[str, Any]:
    return {
        "changes": changes,
        "prepare": partial(_move_out, name, other),
        "environment": {"UCX_NET_DEVICES": _DEVICES[name]},
        "listen_host": _ADDRESSES[name],
        "plaintext": True,
    }


def _move_out(name: str, other: int | None) -> None:
    """In the engine's process: into namespaces of its own; the second one takes an end along."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("ip", "link", "set", "lo", "up")
    mine, theirs = (
        _DEVICES[name],
        next(each for each in _DEVICES.values() if each != _DEVICES[name]),
    )
    if other is None:
        _run("ip", "link", "add", mine, "type", "veth", "peer", "name", theirs)
        _run("ip", "link", "set", theirs, "up")
    else:
        there = ("nsenter", "-t", str(other), "-n")
        _run(*there, "ip", "link", "set", mine, "netns", str(os.getpid()))
    _run("ip", "addr", "add", f"{_ADDRESSES[name]}/24", "dev", mine)
    _run("ip", "link", "set", mine, "up")


def _in(node: NixlNode, *order: str, may_fail: bool = False) -> None:
    _run("nsenter", "-t", str(node.process.pid), "-n", *order, may_fail=may_fail)


def _run(*order: str, may_fail: bool = False) -> None:
    done = subprocess.run(order, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise OSError(f"{' '.join(order)}: {done.stderr.strip()}")
