"""Directed channels with messages in flight, which a network may lose, repeat, delay or cut.

The state is a value; `enabled` lists what may happen next and `apply` makes it happen. An explorer
takes every enabled action; a driver in virtual time `submit`s messages, whose faults a `FaultPlan`
decides, sleeps until `next_due` and applies what is `due`.

An *ordered* channel stands for one connection: only its head is delivered, nothing is repeated, and
losing a message ends it: nothing behind that message arrives, nor does anything sent later. Over a
cut path nothing is delivered until it is healed; what is in flight waits.
"""

from __future__ import annotations

from collections.abc import Hashable

from attrs import evolve, frozen

from pushkv.core.errors import LocalProtocolError
from pushkv.core.ids import FOREVER, Instant

from .faults import NO_FAULTS, Chance, Fault, FaultPlan, may_strike, strike

__all__ = [
    "Action",
    "Channel",
    "Cut",
    "Delay",
    "Deliver",
    "Delivered",
    "Duplicate",
    "Event",
    "Heal",
    "Lose",
    "Lost",
    "Network",
    "Packet",
    "Reset",
    "Send",
    "apply",
    "connect",
    "cost",
    "disconnect",
    "due",
    "enabled",
    "next_due",
    "submit",
]


@frozen
class Packet:
    """One message in flight: `payload` is the driver's own; it is due at `due`, not before."""

    payload: Hashable
    due: Instant = Instant(0)


@frozen
class Channel:
    """The messages in flight from `source` to `target`, oldest first.

    `path` names the two places it runs between, for cuts: several channels (connections) may share
    one path. Over an `ended` channel nothing more is sent.
    """

    source: str
    target: str
    ordered: bool = True
    packets: tuple[Packet, ...] = ()
    path: tuple[str, str] = ("", "")
    ended: bool = False


@frozen
class Network:
    """All channels, sorted by ends, and the directed paths that are cut, sorted."""

    channels: tuple[Channel, ...] = ()
    cuts: tuple[tuple[str, str], ...] = ()

    def channel(self, source: str, target: str) -> Channel:
        """The channel between two ends.

        Raises:
            LocalProtocolError: There is none.
        """
        for channel in self.channels:
            if channel.source == source and channel.target == target:
                return channel
        raise LocalProtocolError(f"no channel from {source!r} to {target!r}")

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from place `source` to place `target`."""
        return (source, target) in self.cuts


# -- actions


@frozen
class Send:
    """Put a message in flight; it is due at `due`."""

    source: str
    target: str
    payload: Hashable
    due: Instant = Instant(0)


@frozen
class Deliver:
    """The message at `index` reaches the target."""

    source: str
    target: str
    index: int = 0


@frozen
class Lose:
    """The message at `index` never arrives; on an ordered channel, nor does any behind it."""

    source: str
    target: str
    index: int = 0


@frozen
class Duplicate:
    """The message at `index` is in flight once more, behind all others."""

    source: str
    target: str
    index: int = 0


@frozen
class Delay:
    """The message at `index` is due at `due` only; an ordered channel holds up those behind it."""

    source: str
    target: str
    index: int
    due: Instant


@frozen
class Reset:
    """The channel ends, and everything in flight on it is lost."""

    source: str
    target: str


@frozen
class Cut:
    """Nothing gets from place `source` to place `target` any more; with `both`, nor back."""

    source: str
    target: str
    both: bool = False


@frozen
class Heal:
    """Messages pass from place `source` to place `target` again; with `both`, also back."""

    source: str
    target: str
    both: bool = False


Action = Send | Deliver | Lose | Duplicate | Delay | Reset | Cut | Heal

# -- events


@frozen
class Delivered:
    """A message reached `target`."""

    source: str
    target: str
    payload: Hashable


@frozen
class Lost:
    """A message will not reach `target`."""

    source: str
    target: str
    payload: Hashable


Event = Delivered | Lost


def connect(
    network: Network,
    source: str,
    target: str,
    *,
    ordered: bool = True,
    path: tuple[str, str] | None = None,
) -> Network:
    """A network with a channel more; the path is that of its ends where none is named.

    Raises:
        LocalProtocolError: The two ends have a channel already.
    """
    if any(c.source == source and c.target == target for c in network.channels):
        raise LocalProtocolError(f"a channel from {source!r} to {target!r} exists")
    added = Channel(source, target, ordered, (), path or (source, target))
    channels = sorted((*network.channels, added), key=lambda c: (c.source, c.target))
    return evolve(network, channels=tuple(channels))


def disconnect(network: Network, source: str, target: str) -> Network:
    """The network without this channel and what is in flight on it."""
    gone = network.channel(source, target)
    return evolve(network, channels=tuple(each for each in network.channels if each is not gone))


def apply(network: Network, action: Action) -> tuple[Network, tuple[Event, ...]]:
    """One action.

    Raises:
        LocalProtocolError: It is not possible: no such channel or message, the path is cut, or an
            ordered channel cannot do that. The network is as it was.
    """
    if isinstance(action, Cut | Heal):
        paths = {(action.source, action.target)}
        if action.both:
            paths.add((action.target, action.source))
        cuts = set(network.cuts)
        cuts = cuts | paths if isinstance(action, Cut) else cuts - paths
        return evolve(network, cuts=tuple(sorted(cuts))), ()
    channel = network.channel(action.source, action.target)
    changed, events = _on_channel(network, channel, action)
    return _with(network, channel, changed), events


def _with(network: Network, channel: Channel, changed: Channel) -> Network:
    channels = tuple(changed if each is channel else each for each in network.channels)
    return evolve(network, channels=channels)


def _on_channel(
    network: Network, channel: Channel, action: Send | Deliver | Lose | Duplicate | Delay | Reset
) -> tuple[Channel, tuple[Event, ...]]:
    match action:
        case Send(payload=payload):
            if channel.ended:
                return channel, _lost(channel, (Packet(payload),))
            return evolve(channel, packets=_sent(channel, payload, action.due)), ()
        case Reset():
            return evolve(channel, packets=(), ended=True), _lost(channel, channel.packets)
        case _:
            return _on_packet(network, channel, action)


def _sent(channel: Channel, payload: Hashable, at: Instant) -> tuple[Packet, ...]:
    if channel.ordered and channel.packets:
        at = max(at, channel.packets[-1].due)
    return (*channel.packets, Packet(payload, at))


def _lost(channel: Channel, packets: tuple[Packet, ...]) -> tuple[Event, ...]:
    return tuple(Lost(channel.source, channel.target, each.payload) for each in packets)


def _on_packet(
    network: Network, channel: Channel, action: Deliver | Lose | Duplicate | Delay
) -> tuple[Channel, tuple[Event, ...]]:
    if not 0 <= action.index < len(channel.packets):
        raise LocalProtocolError(f"{action}: {len(channel.packets)} messages are in flight")
    packet = channel.packets[action.index]
    before, behind = channel.packets[: action.index], channel.packets[action.index + 1 :]
    match action:
        case Deliver():
            if network.is_cut(*channel.path):
                raise LocalProtocolError(f"{action}: the path is cut")
            if channel.ordered and action.index:
                raise LocalProtocolError(f"{action}: the channel is ordered")
            event = Delivered(channel.source, channel.target, packet.payload)
            return evolve(channel, packets=(*before, *behind)), (event,)
        case Lose():
            if channel.ordered:
                lost = _lost(channel, (packet, *behind))
                return evolve(channel, packets=before, ended=True), lost
            return evolve(channel, packets=(*before, *behind)), _lost(channel, (packet,))
        case Duplicate():
            if channel.ordered:
                raise LocalProtocolError(f"{action}: the channel is ordered")
            return evolve(channel, packets=(*channel.packets, packet)), ()
        case Delay(due=at):
            late = evolve(packet, due=max(packet.due, at))
            if channel.ordered:
                behind = tuple(evolve(each, due=max(each.due, at)) for each in behind)
            return evolve(channel, packets=(*before, late, *behind)), ()


# -- choices


def enabled(
    network: Network,
    plan: FaultPlan = NO_FAULTS,
    chance: Chance = Chance(),  # noqa: B008 - a frozen value
    now: Instant = FOREVER,
) -> tuple[Action, ...]:
    """Everything that may happen to what is in flight at `now`, in a fixed order.

    Faults are listed while `plan` has budget for them; whoever takes one spends its `cost`.
    Equal messages of an unordered channel are listed once.
    """
    actions: list[Action] = []
    for channel in network.channels:
        ends = channel.source, channel.target
        for index in _choices(channel):
            ready = channel.packets[index].due <= now
            if ready and not network.is_cut(*channel.path):
                actions.append(Deliver(*ends, index))
            if may_strike(plan, chance, Fault.LOSS):
                actions.append(Lose(*ends, index))
            if not channel.ordered and may_strike(plan, chance, Fault.DUPLICATION):
                actions.append(Duplicate(*ends, index))
    whole = sorted(
        {channel.path for channel in network.channels if channel.path not in network.cuts}
    )
    if may_strike(plan, chance, Fault.PARTITION_ONE_WAY):
        actions.extend(Cut(*path) for path in whole)
    if may_strike(plan, chance, Fault.PARTITION):
        pairs = sorted({(min(path), max(path)) for path in whole})
        actions.extend(Cut(*pair, both=True) for pair in pairs)
    actions.extend(Heal(*cut) for cut in network.cuts)
    return tuple(actions)


def cost(action: Action) -> Fault | None:
    """The fault that an action stands for, to be spent; None where it is no fault."""
    match action:
        case Lose() | Reset():
            return Fault.LOSS
        case Duplicate():
            return Fault.DUPLICATION
        case Delay():
            return Fault.DELAY
        case Cut(both=both):
            return Fault.PARTITION if both else Fault.PARTITION_ONE_WAY
        case _:
            return None


def _choices(channel: Channel) -> tuple[int, ...]:
    """Indices of the messages that an action may take: the head, or one of each kind."""
    if channel.ordered:
        return (0,) if channel.packets else ()
    first = {packet: index for index, packet in reversed(list(enumerate(channel.packets)))}
    return tuple(sorted(first.values()))


# -- virtual time


def submit(
    network: Network,
    plan: FaultPlan,
    chance: Chance,
    message: Send,
) -> tuple[Network, Chance, tuple[Event, ...]]:
    """Send a message with whatever the plan has in store for it.

    `message.due` is when it would be delivered without a fault; a delay comes on top of it.
    """
    channel = network.channel(message.source, message.target)
    ends = message.source, message.target
    chance, delay = strike(plan, chance, Fault.DELAY)
    if delay is not None:
        message = evolve(message, due=Instant(message.due + delay.lasts()))
    chance, loss = strike(plan, chance, Fault.LOSS)
    network, events = apply(network, message)
    if loss is not None and not events:
        network, events = apply(network, Lose(*ends, len(channel.packets)))
    if events:
        return network, chance, events
    chance, again = strike(plan, chance, Fault.DUPLICATION)
    chance, overtaking = strike(plan, chance, Fault.REORDERING)
    if not channel.ordered:
        if overtaking is not None and channel.packets:
            network = _overtake(network, ends, overtaking.pick(len(channel.packets)))
        if again is not None:
            late = Instant(message.due + again.lasts())
            network, _ = apply(network, evolve(message, due=late))
    return network, chance, ()


def _overtake(network: Network, ends: tuple[str, str], index: int) -> Network:
    """The newest message of a channel moves before the one at `index`, and is due no later."""
    channel = network.channel(*ends)
    newest = channel.packets[-1]
    newest = evolve(newest, due=min(newest.due, channel.packets[index].due))
    packets = (*channel.packets[:index], newest, *channel.packets[index:-1])
    return _with(network, channel, evolve(channel, packets=packets))


def next_due(network: Network) -> Instant:
    """When the next message can be delivered; FOREVER where none can."""
    instants = [
        packet.due
        for channel in network.channels
        if not network.is_cut(*channel.path)
        for packet in (channel.packets[:1] if channel.ordered else channel.packets)
    ]
    return min(instants, default=FOREVER)


def due(network: Network, now: Instant) -> Deliver | None:
    """The next delivery at `now`: the earliest message, the first channel on a tie; None for none.

    Apply it and ask again, until there is none.
    """
    best: tuple[Instant, Deliver] | None = None
    for channel in network.channels:
        if network.is_cut(*channel.path):
            continue
        packets = channel.packets[:1] if channel.ordered else channel.packets
        for index, packet in enumerate(packets):
            if packet.due <= now and (best is None or packet.due < best[0]):
                best = packet.due, Deliver(channel.source, channel.target, index)
    return None if best is None else best[1]
