"""Whether two ends fit together: the first difference between their HELLOs, both values named."""

from __future__ import annotations

from pushkv.core.messages import Hello, Refused
from pushkv.layout import difference

__all__ = ["ABSENT", "compare"]

ABSENT = "(absent)"
"""What stands for the value of a key that one end does not have."""

_Pairs = tuple[tuple[str, str], ...]


def compare(ours: Hello, theirs: Hello) -> Refused | None:
    """The first of `ours` that disagrees with `theirs`, or None where the two fit together.

    Protocols fit where they are equal or neighbours: an end of protocol N speaks N - 1 too. Model
    and layout must agree in every key (what may differ between layouts is no part of what HELLO
    says of them); transport, its version and the lease must be equal, for the
    permit of R4 and the fence of R6 are counted with one lease.

    Returns:
        A refusal whose field reads like ``layout.block_tokens[0]``; `ours` is our value.
    """
    if abs(ours.protocol - theirs.protocol) > 1 or theirs.protocol < 1:
        return Refused("protocol", str(ours.protocol), str(theirs.protocol))
    return (
        _pairs("model", ours.model, theirs.model, _first(ours.model, theirs.model))
        or _pairs("layout", ours.layout, theirs.layout, difference(ours.layout, theirs.layout))
        or _value("transport", ours.transport, theirs.transport)
        or _value("transport_version", ours.transport_version, theirs.transport_version)
        or _value("lease", f"{ours.lease} ns", f"{theirs.lease} ns")
    )


def _value(field: str, ours: str, theirs: str) -> Refused | None:
    return None if ours == theirs else Refused(field, ours, theirs)


def _first(ours: _Pairs, theirs: _Pairs) -> str | None:
    here, there = dict(ours), dict(theirs)
    return next(
        (key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)), None
    )


def _pairs(field: str, ours: _Pairs, theirs: _Pairs, key: str | None) -> Refused | None:
    if key is None:
        return None
    here, there = dict(ours), dict(theirs)
    return Refused(f"{field}.{key}", here.get(key, ABSENT), there.get(key, ABSENT))
