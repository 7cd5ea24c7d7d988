"""A moment of a transfer's life in words: what came, what was done about it, and why."""

from __future__ import annotations

from collections.abc import Callable

from pushkv.core.ids import AttemptId, Part, block_count

from .lives import Item, Moment
from .replay import TABLES

__all__ = ["is_quiet", "what", "why"]

WHY = {row.name: row.why for table in TABLES.values() for row in table.rows.values()}


def why(moment: Moment) -> str:
    """The reason that the row gives for itself; of a WRITE, what the transport says."""
    return WHY.get(moment.row, moment.cause)


def is_quiet(moment: Moment) -> bool:
    """Whether nothing came of it but time."""
    return (
        moment.event.type in ("Tick", "Permitted")
        and moment.before == moment.after
        and not moment.effects
    )


def what(moment: Moment) -> str:
    """What happened, and what the machine wants done: "COMPLETE came → outcome: delivered"."""
    came = _said(EVENTS, moment.event)
    if moment.length_bytes:
        came += f", {moment.length_bytes:,} bytes"
    done = [_said(EFFECTS, effect) for effect in moment.effects]
    return " → ".join(filter(None, (came, ", ".join(filter(None, done)))))


def _said(words: dict[str, Callable[[Item], str]], item: Item) -> str:
    return words[item.type](item) if item.type in words else _plain(item)


def _plain(item: Item) -> str:
    """A message by its name, anything else by its type; with its reason."""
    reason = f" ({item.reason})" if item.reason else ""
    return f"{item.type}{reason}"


def _message(item: Item) -> str:
    reason = f" ({item.reason})" if item.reason else ""
    return f"{item.type.upper()} came{reason}"


def _sent(item: Item) -> str:
    message = item.message
    if message is None:
        return "sent"
    reason = f" ({message.reason})" if message.reason else ""
    return f"send {message.type.upper()}{reason}"


def _part(item: Item) -> str:
    if isinstance(item.part, Part):
        return f"{item.part.number}, tokens {item.part.start} to {item.part.end}"
    return str(item.part)


def _number(item: Item) -> str:
    attempt = item.attempt
    return str(attempt.attempt if isinstance(attempt, AttemptId) else attempt)


EVENTS: dict[str, Callable[[Item], str]] = {
    "Offered": lambda item: f"attempt {_number(item)}: {block_count(item.blocks)} blocks offered",
    "Arrived": lambda _: "the engine has the request",
    "Computed": lambda item: (
        f"prefill is over, {item.tokens} tokens" if item.final else f"{item.tokens} tokens computed"
    ),
    "PrefillPreempted": lambda _: "prefill preempted",
    "PrefillResumed": lambda _: "prefill resumed",
    "PrefillAborted": lambda item: f"prefill aborted ({item.reason})",
    "RegistrationReceived": lambda _: "REGISTER came",
    "Permitted": lambda _: "a permit came",
    "WriteEnded": lambda item: f"WRITE {_part(item)} ended: {item.outcome}",
    "WriteDone": lambda item: f"WRITE {_part(item)} counts as done",
    "WriteFailed": lambda item: f"WRITE {_part(item)} counts as failed",
    "WriteRefused": lambda item: f"WRITE {_part(item)} was not posted",
    "WriteUnknown": lambda item: f"WRITE {_part(item)} is of unknown outcome",
    "ArrivalSeen": lambda item: f"arrival of part {_part(item)}",
    "LinkUp": lambda _: "the link is up",
    "LinkDown": lambda _: "the link is lost",
    "Withdrawn": lambda item: f"withdrawn ({item.reason})",
    "MemberTold": lambda item: f"a member is told {item.outcome}",
    "MemberFreed": lambda _: "a member is free",
    "Cancelled": lambda item: f"the engine cancels ({item.reason})",
    "TakenBack": lambda _: "the engine takes its blocks back",
    "WriterGone": lambda _: "the writer is dead for certain",
    "Proven": lambda _: "an operator's proof",
    "Tick": lambda _: "time",
    **dict.fromkeys(
        ("Complete", "Failed", "Progress", "Query", "Received", "Registered"), _message
    ),
    **dict.fromkeys(("Revoke", "Revoked", "Unproven"), _message),
}
EFFECTS: dict[str, Callable[[Item], str]] = {
    "Send": _sent,
    "PostWrite": lambda item: f"order WRITE {_part(item)}",
    "WithdrawWrites": lambda _: "withdraw WRITEs",
    "SourceFreed": lambda _: "source released",
    "MemberTold": lambda item: (
        f"tell {item.outcome}" + (f" ({item.reason})" if item.reason else "")
    ),
    "MemberFreed": lambda _: "",
    "Delivered": lambda _: "outcome: delivered",
    "NotDelivered": lambda item: (
        f"outcome: not delivered ({item.reason})" + (", will retry" if item.retry else "")
    ),
    "BlocksReleased": lambda _: "blocks released",
    "RetryDue": lambda _: "retry is due",
    "SuspectLink": lambda _: "end the link",
    "WithdrawMember": lambda item: f"withdraw a member ({item.reason})",
}
