"""A violation as a story: one sentence per step, the property it breaks, a sequence diagram."""

from __future__ import annotations

from attrs import frozen

from pushkv.core.ids import Worker
from pushkv.model import writes as model

from .configurations import Configuration
from .hands import choices
from .moves import Move
from .nodes import Slot
from .search import Violation
from .wires import CONSUMER, PRODUCER
from .world import State, World

__all__ = ["PROPERTIES", "Chapter", "mermaid", "story", "tell"]

PROPERTIES = {
    "I1": "no byte lands in a block, or is read from one, that is not the attempt's own",
    "I2": "delivered only when every byte of the attempt is in place at every rank",
    "I3": "one outcome and one release for each attempt and each source",
    "I4": "every block is in exactly one place, and what is exposed is counted",
    "I5": "what is late, unknown or comes twice is counted, and changes nothing",
    "I6": "nothing of another attempt or incarnation is acted on",
    "I7": "whoever asks is answered, whoever gives up is heeded, and nobody waits without an end",
    "I8": "every failure has one reason, that of whoever failed",
    "links": "a link is dialled for as long as an attempt waits for it; who greets last has it",
    "no exception": "no event is illegal, and nothing raises",
    "ends": "under fairness every request ends, and its blocks come back",
}
"""What is checked, by name; I1 to I8 as in the protocol."""


@frozen
class Chapter:
    """One step of a story: who does it to whom, in one sentence, and its name in a diagram."""

    who: str
    whom: str
    sentence: str
    name: str


def tell(world: World, state: State, move: Move) -> Chapter:
    """What `move` is, in words."""
    if move.kind in ("connect", "deliver", "lie", "hear", "lose", "report"):
        return _network(world, state, move)
    if move.kind in ("post", "refuse", "write"):
        return _writes(world, state, move)
    if move.kind == "time":
        return Chapter("", "", "Every clock goes on by one step.", "time passes")
    who = str(world.slots[move.at])
    sentence = _ENGINE[move.kind].format(who=who, name=move.name)
    short = move.name if move.kind == "fire" else f"{move.kind.replace('_', ' ')} {move.name}"
    return Chapter(who, who, sentence, short.strip())


_ENGINE = {
    "offer": "{who} reserves blocks for transfer {name} and offers them.",
    "cancel": "{who} no longer wants transfer {name}.",
    "take_back": "{who} preempts transfer {name} and wants its blocks back.",
    "readmit": "{who} admits transfer {name} again.",
    "arrive": "The request of transfer {name} reaches {who}.",
    "compute": "{who} computes more of transfer {name}.",
    "abort": "{who} gives the request of transfer {name} up.",
    "preempt": "{who} preempts the prefill of transfer {name} and takes its source back.",
    "yield": "Nothing reads the source of transfer {name} any more: {who} takes it back.",
    "resume": "{who} runs the prefill of transfer {name} again.",
    "fire": "A deadline comes at {who}: it {name}.",
    "crash": "{who} dies; what it has in flight flies on.",
    "restart": "{who} begins a new life on the same addresses.",
    "serve": "{who} has waited out its restart grace and hands out every block.",
    "gone": "It is proven to {who} that a former life of its peer is dead and silent.",
    "proven": "The operator tells {who} that nothing writes for transfer {name} any more.",
}


_STRANGELY = {
    "repeat": ", and will come again",
    "overtake": " before the one in front of it",
}


def _network(world: World, state: State, move: Move) -> Chapter:
    ends = [str(world.slots[at]) for at in world.pairs[move.at]]
    if move.kind == "connect":
        sentence = f"{ends[0]} and {ends[1]} are connected, or the dial fails."
        return Chapter(ends[0], ends[1], sentence, "dial")
    if move.kind == "lie":
        what = move.name.upper()
        return Chapter(ends[1], ends[0], f"{ends[1]} says {what} without a cause.", what)
    end = CONSUMER if move.name == "consumer" else PRODUCER
    me, peer = ends[end], ends[1 - end]
    if move.kind == "deliver":
        wire = world.pair(state, move.at).wire(move.number)
        assert wire is not None, "only what is on a wire is delivered"
        message = type(wire.queues[end][move.cost == "overtake"]).__name__.upper()
        so = _STRANGELY.get(move.cost, "")
        return Chapter(peer, me, f"{message} from {peer} reaches {me}{so}.", message)
    sentence = {
        "hear": f"{me} learns that {peer} has closed their connection.",
        "lose": f"{me} loses its connection to {peer}, which hears nothing of it.",
        "report": f"{me} has closed its connection to {peer}.",
    }[move.kind]
    return Chapter(me, me, sentence, f"connection {move.number} {move.kind}")


def _writes(world: World, state: State, move: Move) -> Chapter:
    hands = world.hands(state)
    if move.kind != "write":
        write = hands.ordered[move.number].write
        attempt, part = write.attempt, write.part.number
        who = _place(hands.ordered[move.number].writer)
        whom = attempt.consumer
        what = f"part {part} of attempt {attempt.attempt} of {attempt.transfer}"
        if move.kind == "refuse" and hands.ordered[move.number].withdrawn:
            return Chapter(who, who, f"{what} was withdrawn, and is not posted.", "withdrawn")
        if move.kind == "refuse":
            return Chapter(who, who, f"The permit does not last: {what} is not posted.", "refused")
        return Chapter(who, whom, f"{who} checks its permit and posts {what}.", f"WRITE {part}")
    action = choices(hands.writes)[move.number][0]
    if isinstance(action, model.Land | model.End | model.Drop):
        key = action.key
        who, whom = _place(key.writer), key.attempt.consumer
        what = f"part {key.part} of attempt {key.attempt.attempt} of {key.attempt.transfer}"
        if isinstance(action, model.Land):
            return Chapter(who, whom, f"Bytes of {what} land.", f"bytes of part {key.part}")
        if isinstance(action, model.End):
            outcome = action.outcome.upper()
            return Chapter(who, who, f"{who} is told {outcome} of {what}.", outcome)
        return Chapter(who, who, f"What is left of {what} will never land.", "lost")
    name = type(action).__name__
    return Chapter("", "", f"{name}: an arrival on its way to its consumer.", name)


def _place(worker: Worker) -> str:
    """Where a process runs, by name."""
    return str(Slot(worker.engine, worker.rank, consumer=False))


def story(configuration: Configuration, violation: Violation) -> str:
    """The violation, told."""
    world = World(configuration)
    chapters = _chapters(world, violation)
    lines = [f"{configuration.name}: {configuration.purpose}", ""]
    lines += [f"{number:3}. {each.sentence}" for number, each in enumerate(chapters, 1)]
    lines.append("")
    for name, detail in violation.broken:
        lines.append(f"{name} is broken ({PROPERTIES[name]}): {detail}")
    return "\n".join(lines)


def _chapters(world: World, violation: Violation) -> list[Chapter]:
    state = world.initial()
    found: list[Chapter] = []
    for move in violation.moves:
        found.append(tell(world, state, move))
        after = next((each for each in world.successors(state) if each[0] == move), None)
        assert after is not None, f"{move} is not possible: is the rule that was out in force?"
        state = after[1]
    return found


def mermaid(configuration: Configuration, violation: Violation) -> str:
    """The violation as a Mermaid sequence diagram."""
    world = World(configuration)
    names = [str(slot) for slot in world.slots]
    lines = ["sequenceDiagram", *(f"    participant {name}" for name in names)]
    for each in _chapters(world, violation):
        if not each.who:
            lines.append(f"    Note over {','.join((names[0], names[-1]))}: {each.name}")
        elif each.who == each.whom:
            lines.append(f"    Note over {each.who}: {each.name}")
        else:
            lines.append(f"    {each.who}->>{each.whom}: {each.name}")
    for name, detail in violation.broken:
        lines.append(f"    Note over {names[0]},{names[-1]}: {name}: {detail.replace(';', ',')}")
    return "\n".join(lines)
