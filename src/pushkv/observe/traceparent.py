"""Which trace a transfer belongs to: both engines come to the same one without asking.

A transfer's id is all that prefill and decode engine share of a request. So a router that traces
names the transfer by its W3C `traceparent`, with something after it that makes it unique; from any
other id the trace's id is derived.
"""

from __future__ import annotations

import hashlib
import re

from attrs import frozen

from pushkv.core.ids import TransferId

__all__ = ["TraceParent", "read_traceparent", "trace_of"]

_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?![^-/])")
_DERIVED = b"pushkv trace of transfer "


@frozen
class TraceParent:
    """A place in a trace.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits: the span that others are children of; 0 where there is none.
        flags: 1 where the trace is sampled.
    """

    trace_id: int
    span_id: int = 0
    flags: int = 1

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


def read_traceparent(text: str | None) -> TraceParent | None:
    """The W3C Trace Context header `traceparent`; None where `text` is none, or does not begin so.

    Versions above 0 may have more fields, which are ignored, as the recommendation has it.
    """
    match = _PATTERN.match(text or "")
    if match is None:
        return None
    parent = TraceParent(int(match[1], 16), int(match[2], 16), int(match[3], 16) & 1)
    return parent if parent.trace_id and parent.span_id else None


def trace_of(transfer: TransferId) -> TraceParent:
    """The trace that this id names, or the one that is derived from it, which has no parent."""
    named = read_traceparent(transfer)
    if named is not None:
        return named
    digest = hashlib.sha256(_DERIVED + transfer.encode("utf-8", "surrogatepass")).digest()
    return TraceParent(int.from_bytes(digest[:16], "big") or 1)
