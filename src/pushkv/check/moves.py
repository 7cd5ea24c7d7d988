"""The closed alphabet: everything that may happen, and where it can be seen to be possible.

A `Move` is a question; whether it is possible in the whole world, and what follows, is `world`'s
to say. The order in which moves are listed is fixed.
"""

from __future__ import annotations

from attrs import frozen

from pushkv.core.ids import TransferId
from pushkv.core.link import LINK
from pushkv.core.request import RequestStatus

from .configurations import Configuration
from .hands import Hands, choices
from .nodes import Node, Nodes, Slot, Stage
from .wires import CONSUMER, PRODUCER, End, Pair

__all__ = ["KINDS", "LIES", "TIME", "Move", "of_hands", "of_node", "of_pair"]

KINDS = (
    "offer",
    "cancel",
    "take_back",
    "readmit",
    "arrive",
    "compute",
    "abort",
    "preempt",
    "yield",
    "resume",
    "fire",
    "crash",
    "restart",
    "serve",
    "gone",
    "proven",
    "connect",
    "deliver",
    "lie",
    "hear",
    "lose",
    "report",
    "post",
    "refuse",
    "write",
    "time",
)
"""Every kind of move there is."""


LIES = ("registered", "progress", "complete", "failed", "revoked", "unproven")
"""What a producer may say without a cause. COMPLETE names no part."""


@frozen
class Move:
    """One thing that may happen.

    Attributes:
        kind: One of `KINDS`.
        at: Which worker or pair of workers, by position; 0 where there is only one of them.
        number: Which of several.
        name: Which transfer, or what for.
        cost: The budget that it costs; "" for none.
    """

    kind: str
    at: int = 0
    number: int = 0
    name: str = ""
    cost: str = ""


TIME = Move("time")


def of_node(
    configuration: Configuration, nodes: Nodes, slot: Slot, at: int, node: Node
) -> tuple[Move, ...]:
    """What a process, its engine and its clock may do."""
    if not node.life:
        return (Move("restart", at),)
    found: list[Move] = []
    if slot.consumer:
        found += _consumer(at, node)
    else:
        found += _producer(configuration, slot, at, node)
    for index, fire in enumerate(nodes.fires(node)):
        cost = "" if fire.table == LINK.name and fire.field == "timer_at" else fire.cost
        found.append(Move("fire", at, index, fire.what, cost))
    crash = "crash_consumer" if slot.consumer else "crash_producer"
    if configuration.budget(crash):
        found.append(Move("crash", at, cost=crash))
    if configuration.proofs:
        found.append(Move("gone", at))
        if slot.consumer:
            names = dict.fromkeys(TransferId(each.transfer) for each in node.offers)
        else:
            names = dict.fromkeys(
                name for (name, _), each in node.endpoint.producers if each.unknown
            )
        found += [Move("proven", at, name=name) for name in names]
    return tuple(found)


def _consumer(at: int, node: Node) -> list[Move]:
    if not node.serving:
        return [Move("serve", at)]
    found: list[Move] = []
    for transfer, left in node.offers_left:
        offer = node.offer(transfer)
        if left and (offer is None or offer.told):
            found.append(Move("offer", at, name=transfer))
    latest = dict(node.endpoint.latest)
    for (transfer, attempt), request in node.endpoint.requests:
        if latest.get(transfer) != attempt:
            continue
        if request.status is RequestStatus.RECEIVING:
            found.append(Move("cancel", at, name=transfer, cost="cancel"))
            found.append(Move("take_back", at, name=transfer, cost="take_back"))
        if request.status is RequestStatus.RETRYING:
            found.append(Move("cancel", at, name=transfer, cost="cancel"))
        if request.status is RequestStatus.PREEMPTED:
            found.append(Move("readmit", at, name=transfer))
            found.append(Move("cancel", at, name=transfer, cost="cancel"))
    return found


def _producer(configuration: Configuration, slot: Slot, at: int, node: Node) -> list[Move]:
    found: list[Move] = []
    for transfer in configuration.transfers:
        if slot.engine not in transfer.producers:
            continue
        prefill = node.prefill(transfer.name)
        if prefill is None:
            found.append(Move("arrive", at, name=transfer.name))
            continue
        if prefill.stage in (Stage.QUEUED, Stage.RUNNING, Stage.PREEMPTED):
            found.append(Move("compute", at, name=transfer.name))
        if prefill.stage == Stage.RELEASED:
            found.append(Move("arrive", at, name=transfer.name, cost="arrive_again"))
        if prefill.stage == Stage.RUNNING:
            found.append(Move("preempt", at, name=transfer.name, cost="preempt"))
        if prefill.reads:
            found.append(Move("yield", at, name=transfer.name))
        if prefill.stage == Stage.PREEMPTED:
            found.append(Move("resume", at, name=transfer.name))
        if prefill.stage not in (Stage.ABORTED, Stage.RELEASED):
            found.append(Move("abort", at, name=transfer.name, cost="abort"))
    return found


def of_pair(configuration: Configuration, at: int, pair: Pair) -> tuple[Move, ...]:
    """What may happen to the connections of two workers."""
    found = [Move("connect", at)]
    for wire in pair.wires:
        for end in (CONSUMER, PRODUCER):
            name = "consumer" if end == CONSUMER else "producer"
            if wire.ends[end] == End.HUNG_UP:
                found.append(Move("report", at, wire.number, name))
            if wire.ends[end] != End.OPEN:
                continue
            if end == CONSUMER and configuration.budget("lie"):
                found += [Move("lie", at, wire.number, name, "lie") for name in LIES]
            if wire.queues[end]:
                found.append(Move("deliver", at, wire.number, name))
                found.append(Move("deliver", at, wire.number, name, "repeat"))
                if configuration.budget("overtake"):
                    found.append(Move("deliver", at, wire.number, name, "overtake"))
            if wire.ends[1 - end] == End.OPEN:
                found.append(Move("lose", at, wire.number, name, "lose"))
            else:
                found.append(Move("hear", at, wire.number, name))
    return tuple(found)


def of_hands(hands: Hands) -> tuple[Move, ...]:
    """What may happen to WRITEs and arrivals."""
    found: list[Move] = []
    for index in range(len(hands.ordered)):
        found.append(Move("post", number=index))
        found.append(Move("refuse", number=index))
        found.append(Move("refuse", number=index, cost="refusal"))
    for index, (action, cost) in enumerate(choices(hands.writes)):
        found.append(Move("write", number=index, name=type(action).__name__, cost=cost))
    return tuple(found)
