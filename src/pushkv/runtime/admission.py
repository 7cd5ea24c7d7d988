"""Who may be connected, and how much each may say: limits that a stranger cannot turn on others.

A stranger is a connection that has not said a HELLO yet. Strangers are few, each for a short time,
and a newer one takes the place of the oldest: who connects and does nothing holds up nobody. Who
was greeted is counted by address and in all, and is never sent away for another's sake.
"""

from __future__ import annotations

from collections import Counter

from attrs import define, field, fields, frozen

from pushkv.core.errors import ConfigurationError

__all__ = ["Admission", "Allowance", "Limits"]


@frozen
class Limits:
    """Bounds of one control channel, far above what peers need that keep to the protocol.

    Durations are in seconds.

    Attributes:
        connections_most: Accepted connections at once.
        connections_per_address_most: Of these, from one address.
        strangers_most: Accepted connections without a HELLO yet.
        strangers_per_address_most: Of these, from one address.
        dial_s: How long connecting to a peer may take, TLS included.
        handshake_s: How long TLS may take with who connects to us.
        hello_s: How long a connection may live before the peer's HELLO is whole.
        hello_bytes_most: The longest frame before HELLO was accepted; 0 for a mebibyte more than
            four times our own HELLO, which is about as long as that of a peer of our layout.
        messages_per_s: Messages read from one connection; one that sends more is read more slowly.
        messages_at_once: So many may come at once before that.
        queued_bytes_most: A peer for which more bytes wait than this, and which has read nothing
            for a second, is hung up on.
        queued_bytes_in_all_most: The most bytes that wait for all peers; whoever has the most
            waiting is hung up on.
    """

    connections_most: int = 4096
    connections_per_address_most: int = 1024
    strangers_most: int = 256
    strangers_per_address_most: int = 64
    dial_s: float = 5.0
    handshake_s: float = 5.0
    hello_s: float = 10.0
    hello_bytes_most: int = 0
    messages_per_s: int = 20_000
    messages_at_once: int = 100_000
    queued_bytes_most: int = 64 * 1024 * 1024
    queued_bytes_in_all_most: int = 256 * 1024 * 1024

    def __attrs_post_init__(self) -> None:
        for each in fields(Limits):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ConfigurationError(each.name, value, "a number of at least 0")
            if value == 0 and each.name != "hello_bytes_most":
                raise ConfigurationError(each.name, value, "more than 0")


@define
class Admission:
    """Counts accepted connections by address. Knows numbers only; whoever asks closes them."""

    limits: Limits
    _strangers: dict[int, str] = field(factory=dict)
    _known: dict[int, str] = field(factory=dict)
    _by_address: Counter[str] = field(factory=Counter)
    _strange_by_address: Counter[str] = field(factory=Counter)

    def full(self, address: str) -> str:
        """Why no connection from `address` can be accepted; "" where one can."""
        limits = self.limits
        # Strangers make room for each other, so that only who was greeted can fill the place up.
        if len(self._known) >= limits.connections_most:
            return f"{len(self._known)} connections are greeted already"
        known = self._by_address[address] - self._strange_by_address[address]
        if known >= limits.connections_per_address_most:
            return f"{known} connections from {address} are greeted already"
        return ""

    def enter(self, number: int, address: str) -> list[int]:
        """A connection that was accepted; returns the strangers who must leave for it."""
        limits = self.limits
        leaving = []
        if self._strange_by_address[address] >= limits.strangers_per_address_most:
            leaving.append(self._oldest(address))
        elif len(self._strangers) >= limits.strangers_most:
            ((most, _),) = self._strange_by_address.most_common(1)
            leaving.append(self._oldest(most))
        for each in leaving:
            self.leave(each)
        self._strangers[number] = address
        self._by_address[address] += 1
        self._strange_by_address[address] += 1
        return leaving

    def greeted(self, number: int) -> None:
        """A stranger has said HELLO; nothing where it was none."""
        address = self._strangers.pop(number, None)
        if address is not None:
            self._known[number] = address
            self._less(self._strange_by_address, address)

    def leave(self, number: int) -> None:
        """A connection is over; may be said twice."""
        address = self._strangers.pop(number, None)
        if address is not None:
            self._less(self._strange_by_address, address)
        else:
            address = self._known.pop(number, None)
        if address is not None:
            self._less(self._by_address, address)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def _oldest(self, address: str) -> int:
        return next(number for number, each in self._strangers.items() if each == address)

    @staticmethod
    def _less(counter: Counter[str], address: str) -> None:
        counter[address] -= 1
        if not counter[address]:
            del counter[address]


@define
class Allowance:
    """A bucket of messages that fills with time.

    Attributes:
        per_s: Messages per second that it fills with.
        most: What it holds when it is full, as it is at first.
    """

    per_s: float
    most: float
    _left: float = field(init=False)
    _at_s: float | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._left = self.most

    def spend(self, messages: int, now_s: float) -> float:
        """So many came at `now_s`; returns for how many seconds to read no more."""
        if self._at_s is not None:
            self._left = min(self.most, self._left + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        self._left -= messages
        return max(0.0, -self._left / self.per_s)
