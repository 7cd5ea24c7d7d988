"""What must hold of every step of an endpoint, whatever the rest of the world looks like."""

from __future__ import annotations

from collections.abc import Sequence

from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import (
    Counted,
    Effect,
    MemberTold,
    NotDelivered,
    SourceFreed,
    SourceReleased,
)
from pushkv.core.events import (
    ArrivalSeen,
    Cancelled,
    Closed,
    Event,
    MessageReceived,
    Opened,
    TakenBack,
    WriteClosed,
)
from pushkv.core.ids import AttemptId
from pushkv.core.link import LINK, LinkStatus
from pushkv.core.machines import StepRecord
from pushkv.core.messages import Failed, Query, Reason, Revoke
from pushkv.core.producer import EXPIRED, NOTIFYING
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST, RequestStatus

from .snapshot import EndpointState

__all__ = ["INPUT", "judged", "moved", "wanted"]

Broken = list[tuple[str, str]]

INPUT = (MessageReceived, ArrivalSeen, WriteClosed)
"""What peers and transports send, which may be late, come twice, or be unknown."""

HEEDED = (RequestStatus.RELEASING, RequestStatus.DELIVERED, RequestStatus.RELEASED)


def judged(
    event: Event, same: bool, records: Sequence[StepRecord], effects: Sequence[Effect]
) -> Broken:
    """What is wrong with one step.

    Args:
        event: What happened.
        same: Whether the endpoint remembers what it did before.
        records: The steps of its machines.
        effects: What it wants done.
    """
    broken: Broken = []
    for record in records:
        broken += _fenced(record)
        broken += _answered(record)
        broken += _greeted(record)
    if isinstance(event, INPUT):
        broken += _counted(event, same, records, effects)
    for effect in effects:
        if isinstance(effect, NotDelivered):
            broken += _explained(event, effect, records)
        elif isinstance(effect, SourceReleased):
            broken += _accounted(effect, records)
    return broken


def _fenced(record: StepRecord) -> Broken:
    """I6: what names another attempt or life changes nothing of this one."""
    attempt = getattr(record.event, "attempt", None)
    if not isinstance(attempt, AttemptId) or record.after is record.before:
        return []
    if record.machine == CONSUMER.name and record.key != attempt:
        return [("I6", f"{record.row.name} acts on {attempt} at {record.key}")]
    if record.machine != PRODUCER.name:
        return []
    served = getattr(record.before, "registration", None)
    if served is None or served.register.attempt == attempt:
        return []
    kept = ("registration", "open", "unknown", "done", "status")
    if any(getattr(record.before, each) != getattr(record.after, each) for each in kept):
        return [("I6", f"{record.row.name} acts on {attempt} while another is served")]
    return []


def _answered(record: StepRecord) -> Broken:
    """I7: whoever asks is answered, and whoever gives up is heeded, in every status."""
    asked = record.machine == PRODUCER.name and isinstance(record.event, Query | Revoke)
    if asked and not record.effects:
        return [("I7", f"{record.row.name} is not answered")]
    if record.machine == REQUEST.name and isinstance(record.event, Cancelled):
        after = getattr(record.after, "status", None)
        if after not in HEEDED:
            return [("I7", f"{record.row.name} stays {after}")]
    return []


def _greeted(record: StepRecord) -> Broken:
    """Who greets last has the link; one that is suspected is over when its socket is closed."""
    if record.machine != LINK.name:
        return []
    before, after = (getattr(each, "status", None) for each in (record.before, record.after))
    if isinstance(record.event, Opened) and after is not LinkStatus.UP:
        return [("links", f"{record.row.name} leaves it {after}")]
    left = before is LinkStatus.SUSPECT and after is not LinkStatus.SUSPECT
    if left and not isinstance(record.event, Opened | Closed):
        return [("links", f"{record.row.name} leaves it {after}")]
    return []


def _counted(
    event: Event, same: bool, records: Sequence[StepRecord], effects: Sequence[Effect]
) -> Broken:
    """I5: what no machine acts on is counted, and changes nothing."""
    if any(each.after is not each.before or each.effects for each in records):
        return []
    if not same:
        return [("I5", f"{_named(event)} changes something that no machine knows of")]
    if not any(isinstance(each, Counted) for each in effects):
        return [("I5", f"{_named(event)} is not counted")]
    return []


def _named(event: Event) -> str:
    what = event.message if isinstance(event, MessageReceived) else event
    return type(what).__name__


def _explained(event: Event, told: NotDelivered, records: Sequence[StepRecord]) -> Broken:
    """I8: one reason, the first member's, that of whoever failed; the phase and peer are known."""
    asked = [each for each in records if each.machine == REQUEST.name and told in each.effects]
    if not asked:
        return []  # refused before there was a machine
    cause = asked[0].event
    if isinstance(cause, TakenBack):
        return [] if told.reason is Reason.PREEMPTED else [_wrong(told, cause)]
    if isinstance(cause, Cancelled):
        return [] if told.reason is cause.reason else [_wrong(told, cause)]
    assert isinstance(cause, MemberTold), "a request fails by its members or its engine"
    if told.reason is not cause.reason or told.reason is Reason.SIBLING:
        return [_wrong(told, cause)]
    member = next(
        (each for each in records if each.machine == CONSUMER.name and cause in each.effects), None
    )
    if member is None:
        return [("I8", f"no member says why {told.transfer}/{told.attempt} is not delivered")]
    message = event.message if isinstance(event, MessageReceived) else None
    if isinstance(message, Failed) and member.event == message:
        return [] if told.reason is message.reason else [_wrong(told, message)]
    return []


def _wrong(told: NotDelivered, cause: object) -> tuple[str, str]:
    why = getattr(cause, "reason", None) or type(cause).__name__
    return "I8", f"{told.transfer}/{told.attempt} fails by {why}, and {told.reason} is told"


def _accounted(told: SourceReleased, records: Sequence[StepRecord]) -> Broken:
    """I8: a source that was not needed to the end has a reason, and an expired one its own."""
    last = [
        each
        for each in records
        if each.machine == PRODUCER.name
        and any(isinstance(effect, SourceFreed) for effect in each.effects)
    ]
    after = getattr(last[-1].after, "status", None) if last else None
    if after is EXPIRED and told.reason is not Reason.EXPIRED:
        return [("I8", f"the source of {told.transfer} expired, and {told.reason} is told")]
    if told.reason is None and after is not NOTIFYING:
        return [("I8", f"the source of {told.transfer} is given up without a reason")]
    return []


def wanted(state: EndpointState) -> Broken:
    """A link is dialled again for as long as some attempt waits for it, and no longer."""
    used = {key for key, attempts in state.by_link if attempts}
    asked = {key for key, link in state.links if link.wanted}
    wrong = used ^ asked
    return [("links", f"{len(used)} links are used, {len(asked)} wanted")] if wrong else []


def moved(before: EndpointState, after: EndpointState, closed: int) -> Broken:
    """The end of a connection moves no link that has another one."""
    current, later = dict(before.current), dict(after.links)
    return [
        ("links", f"the end of connection {closed} moves a link that has {current[key]}")
        for key, link in before.links
        if current.get(key, closed) != closed and later.get(key) != link
    ]
