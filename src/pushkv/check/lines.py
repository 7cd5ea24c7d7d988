"""Moves as lines of a scenario script, one for each, in the words that scripts have for them.

No two moves that are possible in the same state and lead to different ones have the same line: so a
line is looked up among what is possible, and a path of a search is a script.
"""

from __future__ import annotations

from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import AttemptId, Worker
from pushkv.core.link import LINK
from pushkv.core.producer_table import PRODUCER
from pushkv.model import writes as model
from pushkv.testing.told import message_words

from . import wires
from .hands import choices
from .moves import Move
from .nodes import Fire, Node
from .wires import PER_PAIR
from .world import State, World

__all__ = ["line_of", "prelude_words", "worker_name"]


def line_of(world: World, state: State, move: Move) -> str:
    """What `move` is called in a script."""
    if move.kind == "time":
        return "time passes"
    if move.kind in ("connect", "deliver", "lie", "hear", "lose", "report"):
        return _network(world, state, move)
    if move.kind in ("post", "refuse"):
        ordered = world.hands(state).ordered[move.number]
        of = _write(ordered.writer, ordered.write.attempt, ordered.write.part.number)
        return of.format("posts" if move.kind == "post" else "may not post")
    if move.kind == "write":
        return _flight(world, state, move)
    who = str(world.slots[move.at])
    if move.kind == "fire":
        node = world.node(state, move.at)
        fire = world.nodes.fires(node)[move.number]
        return f"{who} deadline {_machine(world, node, fire)}: {fire.what}"
    if move.kind == "compute":
        prefill = world.node(state, move.at).prefill(move.name)
        before = 0 if prefill is None else prefill.tokens
        chunks = world.transfers[move.name].chunks
        tokens = next((each for each in chunks if each > before), before)
        return f"{who} computes {move.name} tokens={tokens}"
    return f"{who} {_ENGINE[move.kind]} {move.name}".strip()


_ENGINE = {
    "offer": "offers",
    "cancel": "cancels",
    "take_back": "reclaims",
    "readmit": "readmits",
    "arrive": "gets",
    "compute": "computes",
    "abort": "aborts",
    "preempt": "preempts",
    "yield": "yields",
    "resume": "resumes",
    "crash": "crashes",
    "restart": "restarts",
    "serve": "serves",
    "gone": "hears of the dead",
    "proven": "trusts",
}
_NETWORK = {
    "lose": "{me} loses link {link} to {peer}",
    "hear": "{me} hears that link {link} to {peer} is closed",
    "report": "{me} has closed link {link} to {peer}",
}


def prelude_words(world: World) -> str:
    """What has happened in the initial state already."""
    return ", ".join(_before(world, kind, at) for kind, at in world.configuration.prelude)


def _before(world: World, kind: str, at: int) -> str:
    if kind == "post":
        return "a WRITE is posted"
    if kind == "lose":
        consumer, producer = world.pairs[at]
        return f"{world.slots[consumer]} loses its link to {world.slots[producer]}"
    return f"{world.slots[at]} {'computes' if kind == 'compute' else _ENGINE[kind]}"


def worker_name(worker: Worker) -> str:
    """A process: its engine, its rank if there are several, its life if it is not the first."""
    life = f".{worker.incarnation}" if worker.incarnation > 1 else ""
    return f"{worker.engine}{worker.rank or ''}{life}"


def _machine(world: World, node: Node, fire: Fire) -> str:
    endpoint = node.endpoint
    if fire.table == CONSUMER.name:
        attempt = endpoint.consumers[fire.index][0]
        producer = dict(endpoint.address)[attempt]
        return f"{_attempt(attempt)} from={producer.host}{producer.rank or ''}"
    if fire.table == PRODUCER.name:
        transfer, rank = endpoint.producers[fire.index][0]
        return f"{transfer} for rank {rank}"
    if fire.table == LINK.name:
        key = endpoint.links[fire.index][0]
        if isinstance(key, ProducerAddress):
            return f"link to {key.host}{key.rank or ''}"
        return f"link to {worker_name(key)}"
    transfer, number = endpoint.requests[fire.index][0]
    return f"{transfer}/{number}"


def _attempt(attempt: AttemptId) -> str:
    return f"{attempt.transfer}/{attempt.attempt}"


def _write(writer: Worker, attempt: AttemptId, part: int) -> str:
    """A line about one WRITE, in which its verb is missing."""
    target = Worker(attempt.consumer, attempt.consumer_incarnation, attempt.consumer_rank)
    name = f"{_attempt(attempt)} to={worker_name(target)} part={part}"
    return f"{worker_name(writer)} {{}} {name}"


def _network(world: World, state: State, move: Move) -> str:
    names = [str(world.slots[at]) for at in world.pairs[move.at]]
    if move.kind == "connect":
        return f"connect {names[0]} {names[1]}"
    link = move.number % PER_PAIR + 1
    if move.kind == "lie":
        return f"{names[1]} lies to {names[0]} {move.name.upper()} link={link}"
    end = wires.CONSUMER if move.name == "consumer" else wires.PRODUCER
    me, peer = names[end], names[1 - end]
    if move.kind != "deliver":
        return _NETWORK[move.kind].format(me=me, peer=peer, link=link)
    wire = world.pair(state, move.at).wire(move.number)
    assert wire is not None, "only what is on a wire is delivered"
    message = message_words(wire.queues[end][move.cost == "overtake"])
    how = {"repeat": " twice", "overtake": " early"}.get(move.cost, "")
    return f"deliver {peer} {me} {message} link={link}{how}"


def _flight(world: World, state: State, move: Move) -> str:
    writes = world.hands(state).writes
    action = choices(writes)[move.number][0]
    match action:
        case model.Land(key=key, index=index):
            line = _write(key.writer, key.attempt, key.part).format("lands")
            return f"{line} piece={index}"
        case model.End(key=key, outcome=outcome):
            return _write(key.writer, key.attempt, key.part).format("closes") + f" {outcome}"
        case model.Drop(key=key):
            return _write(key.writer, key.attempt, key.part).format("drops")
        case model.Arrive(index=index):
            how = ""
        case model.LoseArrival(index=index):
            how = " never"
        case model.RepeatArrival(index=index):
            how = " twice"
        case _:
            raise AssertionError(f"{action} is no choice")
    key = writes.arrivals[index].key
    return _write(key.writer, key.attempt, key.part).format("arrives") + how
