"""The contract between pushkv and whatever moves the bytes.

A transport is the data plane alone: it makes memory writable by peers, WRITEs, and reports what
became of each WRITE and which arrivals it has seen. It decides nothing. What it can and cannot
promise it declares as data (`Capabilities`), and the machines of the core read that.

Transports are found by name through the entry point group ``pushkv.transports``; each entry is a
callable that returns a `Transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from pushkv.core import rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import AttemptId, Instant, Worker

__all__ = [
    "Arrival",
    "Capabilities",
    "Completion",
    "Permit",
    "Region",
    "Segments",
    "Transport",
    "Write",
    "WriteOutcome",
    "load_transport",
]

Segments = NDArray[np.uint64]
"""Memory as an array of shape (n, 2), dtype uint64: address and length in bytes of each segment."""


class WriteOutcome(StrEnum):
    """What became of a WRITE."""

    DONE = "done"
    """All bytes were written; whether they are visible at the target is a declared capability."""
    FAILED = "failed"
    """The WRITE is over and incomplete: nothing more of it will land."""
    REFUSED = "refused"
    """The permit did not last (R5): nothing was posted."""
    UNKNOWN = "unknown"
    """Bytes may still land. The honest answer to every error that proves nothing (R14)."""


class Permit:
    """How long WRITEs may be posted over one link; one writer, read from any thread.

    The runtime moves `until_ns` when a GRANT comes and sets it to 0 when the link ends (R11).
    Whoever posts asks `allows` immediately before each post (R5).
    """

    __slots__ = ("until_ns",)

    def __init__(self) -> None:
        self.until_ns: int = 0

    def allows(self, now: Instant, capabilities: Capabilities) -> bool:
        """Whether a WRITE may be posted at `now` (R3, R5). Thread-safe; never blocks."""
        return rules.may_post(now, Instant(self.until_ns), capabilities.write_bound)


@frozen
class Region:
    """A range of this process's memory that peers may WRITE into and that is WRITten from.

    Attributes:
        address: First byte.
        length_bytes: Length in bytes.
        device: -1 for host memory, else the accelerator's index.
    """

    address: int
    length_bytes: int
    device: int = -1


@frozen(eq=False)
class Write:
    """One WRITE to post: `source` and `destination` are equally long in bytes, segment by segment.

    `ready` says whether the source bytes exist yet (a device event, say); a transport posts nothing
    before it is true. None means that they do. While it is false others overtake this WRITE; one
    whose permit ends meanwhile is REFUSED, and one whose `ready` raises FAILED.
    """

    peer: Worker
    attempt: AttemptId
    part: int
    arrival_token: int
    source: Segments
    destination: Segments
    permit: Permit
    ready: Callable[[], bool] | None = None

    @property
    def length_bytes(self) -> int:
        """The bytes this WRITE moves."""
        return int(self.source[:, 1].sum()) if len(self.source) else 0


@frozen
class Completion:
    """A WRITE is over, or will never be known to be. Exactly one follows each `Transport.post`.

    Attributes:
        cause: The transport's own words for anything but DONE, for the log.
        source_idle: Whether this WRITE has stopped reading the source. True except for an UNKNOWN
            whose handle never reached a terminal state.
    """

    attempt: AttemptId
    part: int
    outcome: WriteOutcome
    length_bytes: int = 0
    cause: str = ""
    source_idle: bool = True


@frozen
class Arrival:
    """All bytes of one part are visible here. May repeat; is never counted, only kept as a set."""

    attempt: AttemptId
    part: int
    token: int
    length_bytes: int = field(default=0)


class Transport(Protocol):
    """What every transport does. The runtime's thread alone calls it, except where noted.

    No method blocks on a peer. `post` may be slow in a transport's own thread, not in the caller's.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this transport promises; constant for its life."""

    @property
    def version(self) -> str:
        """Compared at HELLO; unequal versions are refused."""

    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """Make `regions` writable and begin.

        Args:
            worker: Who we are; a transport's own name for us is unique per incarnation.
            regions: Memory to register; one large region per layer or pool, never one per block.
            clock: The monotonic clock in nanoseconds that permits are checked against.
            wake: Called from any thread when `poll` has something to give.

        Raises:
            TransportError: The transport cannot start; the message says what to do.
        """

    def memory(self) -> bytes:
        """What a peer needs to WRITE here; opaque, asked anew for each HELLO.

        What was told before stays good.
        """

    def add_peer(self, peer: Worker, memory: bytes) -> None:
        """Learn how to WRITE to `peer`. A failure shows as the outcome of later WRITEs."""

    def remove_peer(self, peer: Worker) -> None:
        """Forget `peer`; WRITEs to it that are open still report exactly once."""

    def post(self, write: Write) -> None:
        """Order a WRITE. Its permit is checked immediately before each post (R5).

        What is wrong with it (an unknown peer, memory that is not registered, a closed transport)
        is its outcome: FAILED, with a cause.

        Raises:
            TransportError: The transport was not started.
        """

    def look_for_arrivals(self, active: bool) -> None:
        """Look for arrivals from now on (at least once), or stop looking.

        Those that came while nobody looked are told once somebody does.
        """

    def poll(self) -> Sequence[Completion | Arrival]:
        """What has happened since the last call. Never blocks."""

    def close(self, timeout_s: float) -> bool:
        """Stop. Returns whether every open WRITE had ended; memory may be freed only then.

        WRITEs that are not posted FAIL; others are waited for up to `timeout_s` seconds. `poll`
        gives the remaining completions afterwards, and `close` may be called again.
        """


def load_transport(name: str, options: Mapping[str, object]) -> Transport:
    """The transport registered under `name`, built with `options`.

    Raises:
        ConfigurationError: No transport of that name is installed.
    """
    found = {entry.name: entry for entry in entry_points(group="pushkv.transports")}
    if name not in found:
        raise ConfigurationError("transport", name, f"one of {sorted(found)}")
    factory: Callable[..., Transport] = found[name].load()
    return factory(**options)
