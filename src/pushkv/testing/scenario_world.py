"""A deterministic world that writes down what happens in it, for scenario scripts."""

from __future__ import annotations

from pushkv.core.capabilities import Capabilities
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
)
from pushkv.core.messages import (
    Complete,
    Failed,
    Grant,
    Hello,
    Message,
    Ping,
    Refused,
)
from pushkv.core.policy import Policy

from .world import (
    Node,
    World,
)

__all__ = ["ScenarioError", "ToldWorld"]

SILENT = (Ping, Grant, Hello)
"""Messages that no script is about."""


class ScenarioError(AssertionError):
    """A line of a script that cannot be understood, or does not hold."""


class ToldWorld(World):
    """A world that writes down what happens in it."""

    def __init__(self, capabilities: Capabilities, policy: Policy) -> None:
        super().__init__(capabilities, policy)
        self._story: dict[tuple[str, int], list[int]] = {}
        self.begin = self.now
        self.flows = True

    def tell(self, text: str) -> None:
        """Write a line of the story, with the time since the last engine was made.

        What is only said again, a message or a dial, is written once, with how often it was said.
        """
        again = " is told: " not in text and " orders " not in text
        serial = 0 if again else len(self._story)
        self._story.setdefault((text, serial), []).append(self.now - self.begin)

    def take_story(self) -> list[str]:
        """What was written since it was last asked."""
        story, self._story = self._story, {}
        return [_line(text, times) for (text, _), times in story.items()]

    def _do(self, node: Node, effect: Effect) -> None:
        text = self._told(node, effect)
        if text:
            self.tell(text)
        super()._do(node, effect)

    def _told(self, node: Node, effect: Effect) -> str:
        name = node.name
        match effect:
            case Transmit():
                if isinstance(effect.message, SILENT):
                    return ""
                other = self.wires[effect.connection].other(node)
                return f"{name} → {other.name} {_message(effect.message)}"
            case PostWrite():
                part, attempt = effect.part, effect.attempt
                return (
                    f"{name} orders WRITE {attempt.transfer}/{attempt.attempt} part {part.number}, "
                    f"tokens [{part.start}, {part.end})"
                )
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

    def _once(self) -> bool:
        return self.flows and super()._once()


def _line(text: str, times: list[int]) -> str:
    line = f"{times[0] / 1e9:.2f}s {text}"
    if len(times) == 1:
        return line
    return f"{line}, {len(times)} times until {times[-1] / 1e9:.2f}s"


def _message(message: Message) -> str:
    kind = type(message).__name__.upper()
    if isinstance(message, Refused):
        return f"{kind} {message.field}"
    attempt = getattr(message, "attempt", None)
    text = f"{kind} {attempt.transfer}/{attempt.attempt}" if attempt is not None else kind
    if isinstance(message, Complete):
        parts = ", ".join(f"[{part.start}, {part.end})" for part in message.parts)
        return f"{text} {parts or 'of nothing'}"
    return f"{text} {message.reason}" if isinstance(message, Failed) else text
