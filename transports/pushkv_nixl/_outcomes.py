"""What NIXL's statuses and exceptions mean for a WRITE, as a table.

The rule is R14: an error is UNKNOWN unless shown otherwise. What is shown otherwise is one thing
alone: `createXferReq` posts nothing, whatever it raises, so after it nothing lands. Errors of
`postXferReq` and `getXferStatus` prove nothing about bytes: over shared memory all bytes of a WRITE
have been seen in place after its error, and over TCP bytes land after a handle is released.

An error that `getXferStatus` or `postXferReq` raises ends the handle: NIXL will not look at it
again, and `Completion.source_idle` is true. NIXL reports the first failed request of a handle while
others of it may be on their way out of a failing endpoint; what those still read of the source goes
to a part whose outcome is UNKNOWN, which is never delivered, from memory that stays registered
until the transport is closed.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from pushkv.transport import WriteOutcome

__all__ = ["ERRORS", "OTHER_ERRORS", "Meaning", "Phase", "meaning"]


class Phase(StrEnum):
    """Which call raised."""

    PREPARE = "prepare"
    """Making the handle: nothing is posted."""
    POST = "post"
    """Posting it: anything between nothing and all may be on its way."""
    CHECK = "check"
    """Asking about a posted handle."""


@frozen
class Meaning:
    """What an exception means.

    Attributes:
        outcome: Of the WRITE.
        peer_lost: Whether the connection to the peer must be made anew before the next WRITE.
    """

    outcome: WriteOutcome
    peer_lost: bool = False


_NOTHING_POSTED = Meaning(WriteOutcome.FAILED)
_NOTHING_POSTED_LOST = Meaning(WriteOutcome.FAILED, peer_lost=True)
_UNPROVEN = Meaning(WriteOutcome.UNKNOWN)
_UNPROVEN_LOST = Meaning(WriteOutcome.UNKNOWN, peer_lost=True)

ERRORS: dict[Phase, dict[str, Meaning]] = {
    Phase.PREPARE: {
        "nixlNotFoundError": _NOTHING_POSTED,
        "nixlInvalidParamError": _NOTHING_POSTED,
        "nixlNotAllowedError": _NOTHING_POSTED,
        "nixlNotSupportedError": _NOTHING_POSTED,
        "nixlMismatchError": _NOTHING_POSTED,
        "nixlRemoteDisconnectError": _NOTHING_POSTED_LOST,
        "nixlBackendError": _NOTHING_POSTED_LOST,
    },
    Phase.POST: {
        "nixlRemoteDisconnectError": _UNPROVEN_LOST,
        "nixlBackendError": _UNPROVEN_LOST,
        "nixlCancelledError": _UNPROVEN_LOST,
        "nixlUnknownError": _UNPROVEN_LOST,
    },
    Phase.CHECK: {
        "nixlRemoteDisconnectError": _UNPROVEN_LOST,
        "nixlBackendError": _UNPROVEN_LOST,
        "nixlCancelledError": _UNPROVEN_LOST,
        "nixlUnknownError": _UNPROVEN_LOST,
    },
}
"""By phase and the exception's class name: the classes themselves differ between the packages."""

OTHER_ERRORS: dict[Phase, Meaning] = {
    Phase.PREPARE: _NOTHING_POSTED,
    Phase.POST: _UNPROVEN,
    Phase.CHECK: _UNPROVEN,
}
"""What every other exception means."""


def meaning(phase: Phase, kind: str) -> Meaning:
    """What an exception of class name `kind`, raised in `phase`, means for WRITE and peer."""
    return ERRORS[phase].get(kind, OTHER_ERRORS[phase])
