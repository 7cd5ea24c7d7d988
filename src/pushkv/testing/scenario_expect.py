"""What scenario scripts can expect."""

from __future__ import annotations

from collections.abc import Callable

from pushkv.core.effects import Delivered, NotDelivered
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason

from .scenario_words import Words
from .scenario_world import ScenarioError
from .world import Node, Offer, Owner

__all__ = ["Stage"]


class Stage(Words):
    """One script's world. `do` runs a command; `take_story` is what came of it."""

    def of_world_expect(self, name: str, *words: str) -> None:
        """`expect d a delivered`, `expect d counts late 1`: raises if it is not so."""
        if len(words) < 1:
            raise ScenarioError("expect what?")
        node = self.node(name)
        word, rest = words[0], words[1:]
        of_node: dict[str, Callable[..., str]] = {
            "free": _free,
            "counts": _counts,
            "sent": _sent,
            "dialed": _dialed,
            "keeps": _keeps,
            "pins": _pins,
            "freed": _freed,
        }
        if word in of_node:
            wrong = of_node[word](node, *rest)
        elif rest and rest[0] == "is":
            wrong = _producer_is(node, word, rest[1])
        else:
            wrong = _attempt(self._offer(node, word), *rest)
        if wrong:
            raise ScenarioError(wrong)

    @staticmethod
    def _offer(node: Node, ref: str) -> Offer:
        transfer, _, attempt = ref.partition("/")
        found = [
            offer
            for (name, number), offer in node.offers.items()
            if name == transfer and attempt in ("", str(number))
        ]
        if not found:
            raise ScenarioError(f"{node.name} has offered no {ref}")
        return found[-1]


def _attempt(offer: Offer, *words: str) -> str:
    told = offer.outcome
    seen = {
        "delivered": isinstance(told, Delivered),
        "waits": told is None,
        "failed": isinstance(told, NotDelivered),
        "exposed": not offer.released,
        "released": offer.released,
    }
    if not words or words[0] not in seen:
        raise ScenarioError(f"expected one of {', '.join(seen)}")
    if not seen[words[0]]:
        return f"it is {[word for word, so in seen.items() if so]}"
    if words[0] == "failed" and isinstance(told, NotDelivered):
        return _equal(str(told.reason), Reason(words[1]).value)
    return ""


def _equal(seen: object, expected: object) -> str:
    return "" if seen == expected else f"it is {seen}"


def _free(node: Node, number: str) -> str:
    owners = node.memory.owners
    return _equal(sum(each is None or each.kind == "other" for each in owners), int(number))


def _counts(node: Node, cause: str, number: str) -> str:
    return _equal(node.counted[cause], int(number))


def _sent(node: Node, kind: str, number: str) -> str:
    return _equal(sum(type(each).__name__.upper() == kind for each in node.sent), int(number))


def _dialed(node: Node, number: str) -> str:
    return _equal(node.dials, int(number))


def _keeps(node: Node, what: str, number: str) -> str:
    endpoint = node.endpoint
    stores = {
        "attempts": len(endpoint.receiving.consumers.states),
        "requests": len(endpoint.receiving.requests.states),
        "transfers": len(endpoint.sending.producers.states),
        "links": len(endpoint.links.store.states),
    }
    return _equal(stores[what], int(number))


def _pins(node: Node, transfer: str) -> str:
    held = Owner("source", transfer) in node.memory.owners
    return "" if held and transfer in node.sources else "its source is free"


def _freed(node: Node, transfer: str, reason: str = "") -> str:
    found = [each for each in node.released_sources if each.transfer == transfer]
    if len(found) != 1:
        return f"its source was freed {len(found)} times"
    return _equal(str(found[0].reason or ""), reason)


def _producer_is(node: Node, transfer: str, status: str) -> str:
    states = node.endpoint.sending.producers.states
    found = [state for (name, _), state in states.items() if name == TransferId(transfer)]
    return _equal([state.status.name for state in found], [status])
