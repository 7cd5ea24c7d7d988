"""How a prompt's KV gets from one engine to the other: what the world asks for, and is told.

`Direct` has no protocol, only its latencies: it is what the hand-over by the real machines
(`machines.py`) is compared with, and what a fit runs a thousand times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from attrs import define, field, frozen

from .fabric import Fabric, Poster
from .settings import LinkModel
from .timeline import Timeline, nanoseconds

__all__ = ["Direct", "Handover", "Told", "Transfer"]


@frozen
class Transfer:
    """One hand-over.

    Attributes:
        start: The first prompt token that is transferred.
        end: The first that is not.
    """

    name: str
    source: str
    target: str
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many tokens are transferred."""
        return self.end - self.start


@frozen
class Told:
    """Whom to tell of a transfer: its KV is in place, or never will be; its blocks are free."""

    delivered: Callable[[str], None]
    not_delivered: Callable[[str], None]
    source_free: Callable[[str], None]
    blocks_free: Callable[[str], None]


class Handover(Protocol):
    """What every design that pushes has."""

    def arrived(self, transfer: Transfer) -> None:
        """The prefill engine has the request."""

    def computed(self, transfer: Transfer, blocks: tuple[int, ...]) -> None:
        """Its prompt is computed."""

    def offered(self, transfer: Transfer, blocks: tuple[int, ...]) -> None:
        """The decode engine has blocks for it."""

    def cancelled(self, transfer: Transfer) -> None:
        """Its client has gone, or goes elsewhere."""

    def crashed(self, source: str) -> None:
        """A prefill engine is gone, and another life of it is there."""

    def proven(self, source: str, life: int) -> None:
        """Nothing that a past life of it has written can land any more."""

    def life(self, source: str) -> int:
        """The number of the life of this prefill engine."""

    def may_offer(self, target: str, blocks: int) -> bool:
        """Whether the budget of a decode engine has room for so many blocks."""

    def messages(self) -> int:
        """Control messages so far."""

    def quarantined(self) -> int:
        """Blocks that wait for a proof, in all decode engines."""


@define(eq=False)
class Direct:
    """A write begins when both sides are heard of; no message is lost, nobody dies."""

    timeline: Timeline
    fabric: Fabric
    link: LinkModel
    told: Told
    posters: dict[str, Poster]
    sent: int = 0
    _control: int = field(init=False)
    _half: set[str] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        self._control = nanoseconds(self.link.control_s)

    def arrived(self, transfer: Transfer) -> None:
        """Nothing to be done."""

    def computed(self, transfer: Transfer, blocks: tuple[int, ...]) -> None:
        """One of two halves."""
        self._meet(transfer)

    def offered(self, transfer: Transfer, blocks: tuple[int, ...]) -> None:
        """The other half, when the registration has come."""
        self.sent += 1
        self.timeline.after(self._control, lambda: self._meet(transfer))

    def _meet(self, transfer: Transfer) -> None:
        if transfer.name not in self._half:
            self._half.add(transfer.name)
            return
        self._half.discard(transfer.name)
        size = transfer.tokens * self.link.token_bytes

        def landed() -> None:
            self.told.source_free(transfer.name)
            self.sent += 1
            self.timeline.after(self._control, lambda: self.told.delivered(transfer.name))

        self.posters[transfer.source].post(
            nanoseconds(self.link.post_s(transfer.tokens)),
            lambda: self.fabric.start(transfer.source, transfer.target, size, landed),
        )

    def cancelled(self, transfer: Transfer) -> None:
        """Not simulated without the machines."""
        raise NotImplementedError

    def crashed(self, source: str) -> None:
        """Not simulated without the machines."""
        raise NotImplementedError

    def proven(self, source: str, life: int) -> None:
        """Nothing waits for it."""

    def life(self, source: str) -> int:
        """The only one."""
        return 0

    def may_offer(self, target: str, blocks: int) -> bool:
        """There is no budget."""
        return True

    def messages(self) -> int:
        """A registration and a notification each."""
        return self.sent

    def quarantined(self) -> int:
        """None."""
        return 0
