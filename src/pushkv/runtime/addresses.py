"""What an address says: whether it is this machine, and who counts as one neighbour."""

from __future__ import annotations

import ipaddress

import anyio
import anyio.abc

__all__ = ["innermost", "is_loopback", "neighbourhood", "remote"]

PREFIX_BITS = 64
"""What one host of IPv6 can choose freely behind."""


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def neighbourhood(host: str) -> str:
    """What connections from `host` are counted under: its address, or its IPv6 prefix."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4 or address.ipv4_mapped is not None:
        return str(address)
    return str(ipaddress.ip_network((address, PREFIX_BITS), strict=False))


def remote(stream: anyio.abc.ByteStream) -> str:
    """The address at the other end of `stream`; "" where it is gone already, or not told."""
    try:
        address = stream.extra(anyio.abc.SocketAttribute.remote_address)  # noqa: S610 (not Django)
    except (OSError, anyio.TypedAttributeLookupError):
        return ""
    return str(address[0])


def innermost(error: BaseException) -> str:
    """What began it, of an error that others wrapped."""
    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    if inner is not None:
        return innermost(inner)
    if isinstance(error, anyio.EndOfStream):
        return "closed by the peer"
    return str(error) or type(error).__name__
