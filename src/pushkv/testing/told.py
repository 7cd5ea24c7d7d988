"""What machines say and want done, in the words of scenario scripts."""

from __future__ import annotations

from pushkv.core.effects import (
    BlocksReleased,
    Counted,
    Delivered,
    Dial,
    Effect,
    NotDelivered,
    PostWrite,
    RetryDue,
    SourceReleased,
    Transmit,
    WithdrawWrites,
)
from pushkv.core.messages import Complete, Failed, Grant, Hello, Message, Ping, Refused

__all__ = ["effect_words", "message_words"]

SILENT = (Ping, Grant, Hello)
"""Messages that no script is about."""


def effect_words(name: str, effect: Effect, peer: str = "") -> str:
    """What `name` says or is told; "" for what no script is about.

    Args:
        name: Whose effect it is.
        effect: What was wanted.
        peer: Who is at the other end of the connection, where a message is sent.
    """
    match effect:
        case Transmit():
            if isinstance(effect.message, SILENT):
                return ""
            return f"{name} → {peer} {message_words(effect.message)}"
        case PostWrite():
            part, attempt = effect.part, effect.attempt
            return (
                f"{name} orders WRITE {attempt.transfer}/{attempt.attempt} part {part.number}, "
                f"tokens [{part.start}, {part.end})"
            )
        case WithdrawWrites():
            return f"{name} posts no more of {effect.attempt.transfer}/{effect.attempt.attempt}"
        case Dial():
            return f"{name} dials {effect.address.host}"
        case Counted():
            return f"{name} counts {effect.cause}" + (effect.detail and f" ({effect.detail})")
        case Delivered():
            return f"{name} is told: {effect.transfer}/{effect.attempt} delivered"
        case NotDelivered():
            retry = ", to be tried again" if effect.retry else ""
            attempt_name = f"{effect.transfer}/{effect.attempt}"
            return f"{name} is told: {attempt_name} not delivered: {effect.reason}{retry}"
        case BlocksReleased():
            return f"{name} is told: {effect.transfer}/{effect.attempt} blocks are free"
        case RetryDue():
            return f"{name} is told: {effect.transfer}/{effect.attempt} may be tried again"
        case SourceReleased():
            why = f": {effect.reason}" if effect.reason else ""
            return f"{name} is told: {effect.transfer} source is free{why}"
    return ""


def message_words(message: Message) -> str:
    """A message: its kind, the attempt, and what it says of it."""
    kind = type(message).__name__.upper()
    if isinstance(message, Refused):
        return f"{kind} {message.field}"
    attempt = getattr(message, "attempt", None)
    text = f"{kind} {attempt.transfer}/{attempt.attempt}" if attempt is not None else kind
    if isinstance(message, Complete):
        parts = ", ".join(f"[{part.start}, {part.end})" for part in message.parts)
        return f"{text} {parts or 'of nothing'}"
    return f"{text} {message.reason}" if isinstance(message, Failed) else text
