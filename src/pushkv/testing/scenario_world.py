"""A deterministic world that writes down what happens in it, for scenario scripts."""

from __future__ import annotations

from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import Effect, Transmit
from pushkv.core.policy import Policy

from .told import effect_words
from .world import (
    Node,
    World,
)

__all__ = ["ScenarioError", "ToldWorld"]


class ScenarioError(AssertionError):
    """A line of a script that cannot be understood, or does not hold."""


class ToldWorld(World):
    """A world that writes down what happens in it."""

    def __init__(self, capabilities: Capabilities, policy: Policy) -> None:
        super().__init__(capabilities, policy)
        self._story: dict[tuple[str, int], list[int]] = {}
        self.begin: int = self.now
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
        peer = ""
        if isinstance(effect, Transmit):
            peer = self.wires[effect.connection].other(node).name
        text = effect_words(node.name, effect, peer)
        if text:
            self.tell(text)
        super()._do(node, effect)

    def _once(self) -> bool:
        return self.flows and super()._once()


def _line(text: str, times: list[int]) -> str:
    line = f"{times[0] / 1e9:.2f}s {text}"
    if len(times) == 1:
        return line
    return f"{line}, {len(times)} times until {times[-1] / 1e9:.2f}s"
