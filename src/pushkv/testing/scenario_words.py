"""The words of scenario scripts: one method for each, over one script's world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from attrs import evolve

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import PushKVError
from pushkv.core.events import (
    Cancelled,
    Event,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    Readmitted,
    TakenBack,
    WriterGone,
)
from pushkv.core.ids import EngineId, Incarnation, TransferId, Worker, seconds

from .scenario_messages import ASKED, made
from .scenario_world import ScenarioError, ToldWorld
from .world import (
    BLOCK_TOKENS,
    POLICY,
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
    Node,
    Wire,
    Write,
)
from .world_parts import ShortageError

__all__ = ["Words"]

TRANSPORTS: dict[str, Capabilities] = {
    "strong": STRONG,
    "strong-unbounded": STRONG_UNBOUNDED,
    "weak": WEAK,
    "weak-unbounded": WEAK_UNBOUNDED,
}
NUMBERS = (
    "drift_ppm",
    "write_retries",
    "attempts",
    "exposed_blocks",
    "pinned_blocks",
    "transfers",
    "remembered",
)
"""What in a policy is no duration."""


class Words:
    """One script's world, and what a script can make happen in it.

    Methods that begin with ``of_world_`` are commands; those with ``of_node_`` follow the name of
    an engine. What is written ``name=value`` is a keyword.
    """

    def __init__(self) -> None:
        self._capabilities = STRONG
        self._policy = POLICY
        self._world: ToldWorld | None = None
        self._by_hand = False
        self._dead: dict[str, Worker] = {}

    @property
    def world(self) -> ToldWorld:
        """The world.

        Raises:
            ScenarioError: No engine was named yet.
        """
        if self._world is None:
            raise ScenarioError("name an engine first")
        return self._world

    def take_story(self) -> list[str]:
        """What has happened since it was last asked."""
        return [] if self._world is None else self._world.take_story()

    def end(self) -> None:
        """Nothing is left to be said: what a script's world breaks, it breaks at once."""

    def do(self, words: list[str]) -> None:
        """Run one command, and let what follows from it happen.

        Raises:
            ScenarioError: It cannot be understood, or does not hold.
        """
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        nodes = {} if self._world is None else self._world.nodes
        if plain[0] in nodes and len(plain) > 1:
            method, arguments = f"of_node_{plain[1]}", [nodes[plain[0]], *plain[2:]]
        else:
            method, arguments = f"of_world_{plain[0]}", list(plain[1:])
        word: Callable[..., None] | None = getattr(self, method, None)
        if word is None:
            raise ScenarioError(f"no such word; known are {', '.join(self._known())}")
        try:
            bound = signature(word).bind(*arguments, **options)
        except TypeError as error:
            raise ScenarioError(str(error)) from error
        try:
            word(*bound.args, **bound.kwargs)
            if self._world is not None:
                self._world.settle()
        except (KeyError, ValueError, ShortageError, PushKVError) as error:
            raise ScenarioError(f"{type(error).__name__}: {error}") from error

    def _known(self) -> list[str]:
        return sorted(
            name.split("_", 2)[2]
            for name in dir(self)
            if name.startswith(("of_world_", "of_node_"))
        )

    def node(self, name: str) -> Node:
        """The engine of this name."""
        if name not in self.world.nodes:
            raise ScenarioError(f"there is no engine {name!r}")
        return self.world.nodes[name]

    def of_world_show(self, name: str) -> None:
        """Who owns which blocks of an engine, and what it has counted."""
        node = self.node(name)
        owned: dict[str, list[int]] = {}
        for block, owner in enumerate(node.memory.owners):
            if owner is not None and owner.kind in ("attempt", "source"):
                number = f"/{owner.number}" if owner.kind == "attempt" else " source"
                owned.setdefault(f"{owner.name}{number}", []).append(block)
        held = "; ".join(f"{each} {_blocks(blocks)}" for each, blocks in owned.items())
        self.world.tell(f"{name} holds {held or 'nothing'}")
        if node.counted:
            counts = ", ".join(f"{cause} {number}" for cause, number in node.counted.items())
            self.world.tell(f"{name} has counted {counts}")

    # -- before anything happens

    def of_world_transport(self, kind: str) -> None:
        """What the transport of all engines promises."""
        self._capabilities = TRANSPORTS[kind]

    def of_world_policy(self, **values: str) -> None:
        """Durations in seconds, and numbers."""
        changes: dict[str, Any] = {
            name: int(value) if name in NUMBERS else seconds(float(value))
            for name, value in values.items()
        }
        self._policy = evolve(self._policy, **changes)

    def of_world_engine(
        self, name: str, of: str = "", rank: str = "0", ppm: str = "0", blocks: str = "64"
    ) -> None:
        """A worker process; `of` is the engine whose rank it is."""
        if self._world is None:
            self._world = ToldWorld(self._capabilities, self._policy)
            self._world.auto = not self._by_hand
        self._world.node(
            name,
            engine=of,
            policy=self._policy,
            rank=int(rank),
            ppm=int(ppm),
            blocks=int(blocks),
        )
        self._world.begin = self._world.now

    def of_world_engines(self, *names: str) -> None:
        """Several, of one rank each."""
        for name in names:
            self.of_world_engine(name)

    def of_world_writes(self, by: str, hand: str) -> None:
        """Whether WRITEs are made by the script, or happen at once."""
        self._by_hand = {"by hand": True, "at once": False}[f"{by} {hand}"]
        if self._world is not None:
            self._world.auto = not self._by_hand

    # -- the network and time

    def of_world_messages(self, how: str) -> None:
        """Whether messages wait for `deliver`, or flow."""
        self.world.flows = {"wait": False, "flow": True}[how]

    def of_world_wait(self, duration_s: str) -> None:
        """Time passes."""
        self.world.advance(seconds(float(duration_s)))

    def of_world_part(self, one: str, other: str) -> None:
        """Nothing comes through between the two, and neither hears of it."""
        self.world.part(self.node(one), self.node(other))

    def of_world_cut(self, source: str, target: str) -> None:
        """Nothing comes through one way."""
        self.world.cut(self.node(source), self.node(target))

    def of_world_heal(self) -> None:
        """Everything comes through again."""
        self.world.heal()

    def of_world_reset(self, one: str, other: str) -> None:
        """Both ends learn that their connection is gone."""
        self.world.reset(self._wire(one, other))

    def of_world_drop(self, source: str, target: str, kind: str) -> None:
        """The first waiting message of this kind is lost."""
        queue = self._wire(source, target).queues[target]
        for item in queue:
            if type(item).__name__.upper() == kind:
                queue.remove(item)
                return
        raise ScenarioError(f"no {kind} waits; there is {[type(each).__name__ for each in queue]}")

    def of_world_deliver(self, source: str, target: str, how: str = "once") -> None:
        """The first waiting message arrives; `twice`, if so."""
        wire, to = self._wire(source, target), self.node(target)
        if not self.world.deliverable(wire, to):
            raise ScenarioError("nothing waits there")
        self.world.deliver(wire, to, twice={"once": False, "twice": True}[how])

    def of_world_again(self, source: str, target: str, kind: str) -> None:
        """The last message of this kind comes once more, over the connection of now."""
        sent = [each for each in self.node(source).sent if type(each).__name__.upper() == kind]
        if not sent:
            raise ScenarioError(f"{source} has sent no {kind}")
        self.world.send(self._wire(source, target), self.node(target), sent[-1])

    def of_node_says(self, node: Node, kind: str, ref: str = "", to: str = "") -> None:
        """Send a message that nothing calls for, of an attempt by name: `p says REVOKED a/7 to=d`.

        The attempt is of the engine that is told, or that of `node` where consumers say such a
        thing. COMPLETE names no part.
        """
        transfer, _, number = ref.partition("/")
        other = self.node(to)
        consumer, producer = (node, other) if kind in ASKED else (other, node)
        message = made(kind, consumer, producer, transfer, int(number or 0))
        self.world.send(self._wire(node.name, to), other, message)

    def _wire(self, one: str, other: str) -> Wire:
        return self.world.wire(self.node(one), self.node(other))

    # -- a consumer's engine

    def of_node_offers(
        self,
        node: Node,
        transfer: str,
        to: str,
        *producers: str,
        tokens: str = "8",
        start: str = "0",
        failures: str = "0",
        ranks: str = "",
        prompt: str = "",
        expects: str = "",
    ) -> None:
        """Offer blocks for a transfer: `d offers a to p`."""
        number = self.world.offer(
            node,
            transfer,
            [self.node(each) for each in producers],
            int(tokens),
            start=int(start),
            failures=int(failures),
            consumer_ranks=tuple(map(int, ranks.split(","))) if ranks else None,
            digest=prompt.encode() or None,
            expected=expects,
        )
        if number is None:
            self.world.tell(f"{node.name} may hand out no block yet")

    def of_node_cancels(self, node: Node, transfer: str) -> None:
        """The engine gives a transfer up; two quotation marks are the empty name."""
        self._happen(node, Cancelled(TransferId(transfer.strip('"'))))

    def of_node_reclaims(self, node: Node, transfer: str) -> None:
        """The engine preempts a request that waits for its KV."""
        self._happen(node, TakenBack(TransferId(transfer)))

    def of_node_readmits(self, node: Node, transfer: str) -> None:
        """The engine admits a preempted request again."""
        self._happen(node, Readmitted(TransferId(transfer)))

    # -- a producer's engine

    def of_node_gets(self, node: Node, transfer: str, tokens: str = "8") -> None:
        """A request arrives at the prefill engine."""
        self.world.request(node, transfer, int(tokens))

    def of_node_computes(
        self, node: Node, transfer: str, tokens: str = "8", final: str = "yes"
    ) -> None:
        """Prefill has come that far."""
        most = BLOCK_TOKENS * len(node.sources[TransferId(transfer)])
        if int(tokens) > most:
            raise ScenarioError(f"its prompt has room for {most} tokens: p gets {transfer} tokens=")
        self.world.compute(node, transfer, int(tokens), final={"yes": True, "no": False}[final])

    def of_node_prefills(self, node: Node, transfer: str, tokens: str = "8") -> None:
        """A request arrives, and its prefill is done at once."""
        self.world.prefill(node, transfer, int(tokens))

    def of_node_aborts(self, node: Node, transfer: str) -> None:
        """The prefill engine gives the request up."""
        self._happen(node, PrefillAborted(TransferId(transfer)))

    def of_node_preempts(self, node: Node, transfer: str) -> None:
        """The prefill engine takes the source blocks of an unfinished prefill away."""
        self._happen(node, PrefillPreempted(TransferId(transfer)))

    def of_node_resumes(self, node: Node, transfer: str) -> None:
        """Prefill begins again."""
        self._happen(node, PrefillResumed(TransferId(transfer)))

    def _happen(self, node: Node, event: Event) -> None:
        self.world.happen(node, event)

    # -- a producer's transport

    def of_node_posts(self, node: Node, ref: str, part: str = "") -> None:
        """Post the WRITEs ordered for it; the permit is checked here and now."""
        for write in self._writes(node, ref, part):
            if write.posted_at is None and not self.world.post(write):
                self.world.tell(f"{_named(write)} refused: no permit")

    def of_node_lands(self, node: Node, ref: str, part: str = "", tokens: str = "") -> None:
        """Bytes of posted WRITEs reach the consumer's memory: all, or those of some tokens."""
        for write in self._writes(node, ref, part, closed=True):
            self.world.land(write, int(tokens) if tokens else None)

    def of_node_arrives(self, node: Node, ref: str, part: str = "", token: str = "") -> None:
        """The consumer's transport sees the arrivals, perhaps with a token of somebody else's."""
        for write in self._writes(node, ref, part, closed=True):
            self.world.arrive(write, int(token) if token else None)

    def of_node_closes(
        self, node: Node, ref: str, outcome: str, part: str = "", again: str = "no"
    ) -> None:
        """The transport says how WRITEs ended: done, failed, refused or unknown; perhaps again."""
        for write in self._writes(node, ref, part, closed={"yes": True, "no": False}[again]):
            self.world.close(write, outcome)

    def of_node_finishes(self, node: Node, ref: str, part: str = "") -> None:
        """Post, land, arrive and close as done."""
        for write in self._writes(node, ref, part):
            self.world.finish(write)

    def _writes(self, node: Node, ref: str, part: str, *, closed: bool = False) -> Iterator[Write]:
        transfer, _, attempt = ref.partition("/")
        found = [
            write
            for write in self.world.writes
            if write.node is node
            and write.effect.attempt.transfer == transfer
            and attempt in ("", str(write.effect.attempt.attempt))
            and part in ("", str(write.effect.part.number))
            and closed in (True, write.closed)
        ]
        if not found:
            raise ScenarioError(f"no such WRITE of {node.name} is open")
        return iter(found)

    # -- processes, and what is known of them

    def of_node_crashes(self, node: Node, how: str = "") -> None:
        """The process is gone; `silently`: its peers hear nothing of it."""
        self._dead[node.name] = Worker(
            EngineId(node.engine), Incarnation(node.incarnation), node.rank
        )
        self.world.crash(node, silently={"": False, "silently": True}[how])

    def of_node_restarts(self, node: Node) -> None:
        """The next life on the same host and addresses."""
        self.world.restart(node)

    def of_node_hears(self, node: Node, dead: str) -> None:
        """Proof that a crashed process can write nothing any more."""
        self._happen(node, WriterGone(self._dead[dead]))

    def of_node_trusts(self, node: Node, transfer: str) -> None:
        """The operator's word that nothing can write into a transfer's blocks."""
        self._happen(node, Proven(TransferId(transfer)))


def _blocks(blocks: list[int]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"


def _named(write: Write) -> str:
    attempt = write.effect.attempt
    return f"WRITE {attempt.transfer}/{attempt.attempt} part {write.effect.part.number}"
