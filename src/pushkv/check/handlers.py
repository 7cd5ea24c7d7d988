"""What each move does. A handler returns whether the move is possible in this world."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from pushkv.core.effects import ProducerAddress, Transmit
from pushkv.core.events import (
    Arrived,
    Cancelled,
    Computed,
    ConnectionClosed,
    ConnectionOpened,
    Event,
    MessageReceived,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    Readmitted,
    TakenBack,
    WriterGone,
)
from pushkv.core.ids import AttemptId, TransferId
from pushkv.core.messages import (
    AttemptMessage,
    Complete,
    Failed,
    Progress,
    Reason,
    Registered,
    Revoked,
    Unproven,
)

from . import hands as in_hand
from . import memory as blocks
from .configurations import Transfer
from .moves import Move
from .nodes import Node, Offer, Prefilling, Slot, Stage, Step, with_prefill
from .snapshot import NOW
from .wires import CONSUMER, PER_PAIR, PRODUCER, End, Pair, Wire
from .world import Draft
from .writing import happen, post, refuse, write

__all__ = ["HANDLERS"]


# -- a consumer's engine


def offer(draft: Draft, move: Move) -> bool:
    """Blocks are reserved, and offered under the next number."""
    at, transfer = move.at, draft.world.transfers[move.name]
    node = draft.node(at)
    number = node.endpoint.attempt_max + 1
    attempt = draft.attempt(at, transfer.name, number)
    reserved = blocks.reserve(draft.memory(at), attempt, transfer.tokens - transfer.start)
    if reserved is None:
        return False
    memory, taken = reserved
    draft.put_memory(at, memory)
    draft.step(
        at,
        ("offer", transfer.name, taken),
        lambda slot, node: _offer(draft, slot, node, transfer, taken),
    )
    return True


def _offer(
    draft: Draft, slot: Slot, node: Node, transfer: Transfer, taken: tuple[int, ...]
) -> Step:
    configuration = draft.world.configuration
    number = node.endpoint.attempt_max + 1
    ranks = tuple(rank for engine, rank in configuration.consumers if engine == slot.engine)
    left = tuple((name, n - (name == transfer.name)) for name, n in node.offers_left)
    failures = transfer.offers - dict(left)[transfer.name] - 1
    producers = tuple(
        ProducerAddress(engine, 1, rank)
        for engine, rank in configuration.producers
        if engine == transfer.producers[0 if failures < 1 else -1]
    )
    event = Offered(
        transfer=TransferId(transfer.name),
        attempt=number,
        producers=producers,
        blocks=(taken,),
        start=transfer.start,
        end=transfer.tokens,
        prompt_digest=transfer.name.encode(),
        consumer_ranks=ranks,
        failures=failures,
    )
    offers = (*node.offers, Offer(transfer.name, number, taken))
    return draft.world.nodes.step(slot, evolve(node, offers=offers, offers_left=left), event)


def cancel(draft: Draft, move: Move) -> bool:
    """Nobody wants it any more."""
    happen(draft, move.at, ("cancel", move.name), Cancelled(TransferId(move.name)))
    return True


def take_back(draft: Draft, move: Move) -> bool:
    """The engine preempts the request and wants the blocks."""
    happen(draft, move.at, ("take_back", move.name), TakenBack(TransferId(move.name)))
    return True


def readmit(draft: Draft, move: Move) -> bool:
    """The engine admits it again."""
    happen(draft, move.at, ("readmit", move.name), Readmitted(TransferId(move.name)))
    return True


def serve(draft: Draft, move: Move) -> bool:
    """R13: the restart grace is over; every block is handed to somebody."""
    node = draft.node(move.at)
    if node.endpoint.ready_at > NOW:
        return False
    draft.put_node(move.at, evolve(node, serving=True))
    draft.put_memory(move.at, blocks.hand_out(draft.memory(move.at)))
    return True


# -- a producer's engine


def engine(draft: Draft, at: int, before: Prefilling, after: Prefilling, event: Event) -> bool:
    """The engine moves on with one transfer, and says so."""

    def run(slot: Slot, node: Node) -> Step:
        return draft.world.nodes.step(slot, with_prefill(node, after), event)

    draft.step(at, (type(event).__name__, before, after), run)
    return True


def arrive(draft: Draft, move: Move) -> bool:
    """The request reaches the producer."""
    after = Prefilling(move.name, Stage.QUEUED, 0)
    event = Arrived(TransferId(move.name), move.name.encode())
    return engine(draft, move.at, after, after, event)


def compute(draft: Draft, move: Move) -> bool:
    """Prefill has computed one chunk more."""
    transfer = draft.world.transfers[move.name]
    before = draft.node(move.at).prefill(move.name)
    assert before is not None
    tokens = next((each for each in transfer.chunks if each > before.tokens), None)
    if tokens is None:
        return False
    final = tokens == transfer.chunks[-1]
    after = evolve(before, stage=Stage.FINISHED if final else Stage.RUNNING, tokens=tokens)
    source = before.source(transfer.tokens)
    event = Computed(TransferId(move.name), tokens, source, final)
    return engine(draft, move.at, before, after, event)


def abort(draft: Draft, move: Move) -> bool:
    """The engine gives the request up; its blocks stay until they are released."""
    before = draft.node(move.at).prefill(move.name)
    assert before is not None
    after = evolve(before, stage=Stage.ABORTED)
    return engine(draft, move.at, before, after, PrefillAborted(TransferId(move.name)))


def preempt(draft: Draft, move: Move) -> bool:
    """The engine takes the source back, once no WRITE reads it; its next life has other blocks."""
    before = draft.node(move.at).prefill(move.name)
    assert before is not None
    reads = tuple(sorted({*before.reads, *_reads(draft, move)}))
    after = Prefilling(move.name, Stage.PREEMPTED, 0, before.life + 1, reads)
    return engine(draft, move.at, before, after, PrefillPreempted(TransferId(move.name)))


def yields(draft: Draft, move: Move) -> bool:
    """Nothing reads the blocks of a former life any more: they go."""
    before = draft.node(move.at).prefill(move.name)
    assert before is not None
    if set(before.reads) & _reads(draft, move):
        return False
    draft.put_node(move.at, with_prefill(draft.node(move.at), evolve(before, reads=())))
    return True


def _reads(draft: Draft, move: Move) -> set[tuple[AttemptId, int]]:
    """The WRITEs that may read the source, as the runtime counts them."""
    slot, life = draft.world.slots[move.at], draft.node(move.at).life
    return in_hand.named(draft.hands.of(move.name, slot.worker(life)))


def resume(draft: Draft, move: Move) -> bool:
    """Prefill begins again, in other blocks."""
    before = draft.node(move.at).prefill(move.name)
    assert before is not None
    after = evolve(before, stage=Stage.RUNNING)
    return engine(draft, move.at, before, after, PrefillResumed(TransferId(move.name)))


# -- time and life


def fire(draft: Draft, move: Move) -> bool:
    """A deadline comes. What is on its way already is not asked for twice."""
    world = draft.world
    number = draft.ids[move.at]
    queued = _queued(draft) if move.cost == "resend" else ()

    def run(slot: Slot, node: Node) -> Step:
        return world.nodes.fire(slot, node, world.nodes.fires(node)[move.number])

    effects = draft.step(move.at, ("fire", move.number), run)
    if draft.ids[move.at] == number and not effects and not draft.broken:
        return False
    return not any(isinstance(each, Transmit) and each.message in queued for each in effects)


def _queued(draft: Draft) -> tuple[object, ...]:
    return tuple(
        message
        for at in range(len(draft.world.pairs))
        for wire in draft.pair(at).wires
        for queue in wire.queues
        for message in queue
    )


def crash(draft: Draft, move: Move) -> bool:
    """A process dies. Its sockets are closed; what it had in flight flies on."""
    world, at = draft.world, move.at
    slot, node = world.slots[at], draft.node(move.at)
    dead = evolve(world.nodes.begin(slot, node.life, node), life=0, lives=node.lives, serving=False)
    draft.put_node(at, dead)
    draft.put_hands(in_hand.crashed(draft.hands, slot.worker(node.life)))
    for index, ends in enumerate(world.pairs):
        if at not in ends:
            continue
        pair = draft.pair(index)
        for wire in pair.wires:
            end = CONSUMER if slot.consumer else PRODUCER
            pair = pair.put(wire.closed(end, End.SHUT))
        draft.put_pair(index, pair)
    if slot.consumer:
        memory = draft.memory(at)
        ranks = memory.pieces_per_block
        draft.put_memory(at, blocks.begin(memory.total, ranks, blocks.STARTING))
    return True


def restart(draft: Draft, move: Move) -> bool:
    """The next life in the same place, on the same addresses."""
    world, at = draft.world, move.at
    slot, node = world.slots[at], draft.node(move.at)
    alive = world.nodes.begin(slot, node.lives + 1, node)
    draft.put_node(at, alive)
    draft.put_hands(in_hand.started(draft.hands, slot.worker(alive.life)))
    if slot.consumer and alive.serving:
        draft.put_memory(at, blocks.hand_out(draft.memory(at)))
    return True


def gone(draft: Draft, move: Move) -> bool:
    """R14: proof that a peer's former life is dead, and nothing from it or to it is under way."""
    world = draft.world
    mine = world.slots[move.at]
    before = draft.ids[move.at]
    for at, slot in enumerate(world.slots):
        if slot.consumer == mine.consumer:
            continue
        node = draft.node(at)
        for life in range(1, node.lives + 1):
            worker = slot.worker(life)
            flying = any(
                worker == each.key.writer or (worker == each.target and each.pending)
                for each in draft.hands.writes.flights
            )
            if life == node.life or flying:
                continue
            happen(draft, move.at, ("gone", at, life), WriterGone(worker))
    return draft.ids[move.at] != before


def proven(draft: Draft, move: Move) -> bool:
    """The operator has looked: nothing writes into this transfer's blocks, and nothing will."""
    if draft.hands.aimed(move.name):
        return False
    if draft.world.slots[move.at].consumer and not _silent(draft, move):
        return False
    before = draft.ids[move.at]
    happen(draft, move.at, ("proven", move.name), Proven(TransferId(move.name)))
    return draft.ids[move.at] != before


def _silent(draft: Draft, move: Move) -> bool:
    """No producer can be told of, or serves, the consumer's transfer."""
    world = draft.world
    for at, (consumer, producer) in enumerate(world.pairs):
        listens = any(wire.ends[PRODUCER] == End.OPEN for wire in draft.pair(at).wires)
        if consumer == move.at and draft.node(producer).life and listens:
            return False
    return not any(
        transfer == move.name and served.registration is not None
        for at, slot in enumerate(world.slots)
        if not slot.consumer
        for (transfer, _), served in draft.node(at).endpoint.producers
    )


# -- the network


def connect(draft: Draft, move: Move) -> bool:
    """A dial ends: with a connection, or refused where nobody listens."""
    world = draft.world
    consumer, producer = world.pairs[move.at]
    slot = world.slots[producer]
    node = draft.node(consumer)
    place = (slot.engine, slot.rank)
    if place not in node.dialing:
        return False
    address = ProducerAddress(slot.engine, 1, slot.rank)
    dialing = tuple(each for each in node.dialing if each != place)

    def answered(event: Event) -> Callable[[Slot, Node], Step]:
        return lambda slot, node: world.nodes.step(slot, evolve(node, dialing=dialing), event)

    if not draft.node(producer).life:
        closed = ConnectionClosed(None, address, "refused")
        draft.step(consumer, ("refused", place), answered(closed))
        return True
    pair = draft.pair(move.at)
    if pair.made >= world.configuration.connections:
        return False
    number = move.at * PER_PAIR + pair.made
    draft.put_pair(move.at, Pair(pair.made + 1, (*pair.wires, Wire(number))))
    accepted = ConnectionOpened(number, 2 * number, None)
    happen(draft, producer, ("accepted", number), accepted)
    opened = ConnectionOpened(number, 2 * number + 1, address)
    draft.step(consumer, ("opened", number), answered(opened))
    return True


def deliver(draft: Draft, move: Move) -> bool:
    """The first message of a queue arrives, or another one in its stead, as `move.cost` says."""
    world = draft.world
    end = CONSUMER if move.name == "consumer" else PRODUCER
    if move.cost == "overtake":
        overtaken = draft.pair(move.at).overtaken(move.number, end)
        if overtaken is None:
            return False
        draft.put_pair(move.at, overtaken)
    number, after = draft.head(move.at, move.number, end)
    if move.cost != "repeat":
        draft.ids[world.pair_at + move.at] = after
    event = MessageReceived(move.number, world.message_parts[number])
    happen(draft, world.pairs[move.at][end], ("message", move.number, number), event)
    return True


def lie(draft: Draft, move: Move) -> bool:
    """A producer that writes nothing says something about the latest attempt all the same."""
    at = draft.world.pairs[move.at][CONSUMER]
    live = draft.node(at).endpoint.consumers
    if not live:
        return False
    attempt = max((each for each, _ in live), key=lambda each: each.attempt)
    messages: dict[str, AttemptMessage] = {
        "registered": Registered(attempt),
        "progress": Progress(attempt, 0),
        "complete": Complete(attempt, ()),
        "failed": Failed(attempt, (), Reason.GONE),
        "revoked": Revoked(attempt, ()),
        "unproven": Unproven(attempt, ()),
    }
    key = ("lie", move.number, move.name)
    happen(draft, at, key, MessageReceived(move.number, messages[move.name]))
    return True


def close(draft: Draft, move: Move) -> bool:
    """An end learns that its connection is gone; what was on its way there is lost."""
    end = CONSUMER if move.name == "consumer" else PRODUCER
    draft.closed(move.at, move.number, end, End.SHUT)
    event = ConnectionClosed(move.number, None)
    happen(draft, draft.world.pairs[move.at][end], ("closed", move.number), event)
    return True


def time(draft: Draft, move: Move) -> bool:
    """Every clock goes on by one step."""
    world, ids = draft.world, draft.ids
    if world.configuration.prompt and _queued(draft):
        return False
    for at in range(len(world.slots)):
        ids[at] = world.older_node(at, ids[at])
    for at in range(world.pair_at, world.hands_at):
        ids[at] = world.older_pair(ids[at])
    ids[world.hands_at] = world.older_hands(ids[world.hands_at])
    return True


HANDLERS: dict[str, Callable[[Draft, Move], bool]] = {
    "offer": offer,
    "cancel": cancel,
    "take_back": take_back,
    "readmit": readmit,
    "arrive": arrive,
    "compute": compute,
    "abort": abort,
    "preempt": preempt,
    "yield": yields,
    "resume": resume,
    "fire": fire,
    "crash": crash,
    "restart": restart,
    "serve": serve,
    "gone": gone,
    "proven": proven,
    "connect": connect,
    "deliver": deliver,
    "lie": lie,
    "hear": close,
    "lose": close,
    "report": close,
    "post": post,
    "refuse": refuse,
    "write": write,
    "time": time,
}
"""By kind of move."""
