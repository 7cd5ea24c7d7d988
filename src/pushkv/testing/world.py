"""A small world around several endpoints, in virtual time: wires, clocks, memory, engines.

Nothing in it is random. Messages wait in ordered queues until they are delivered, directions can be
cut, processes crash and come back, and each WRITE ends how and when the test says. The memory knows
who owns each block and who wrote it, and a block that is given back belongs to somebody else at
once. Whatever the protocol forbids raises `ViolationError` in the step in which it happens.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve

from pushkv.core import rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.events import (
    ArrivalSeen,
    Arrived,
    Computed,
    Offered,
    WriteClosed,
)
from pushkv.core.ids import Instant, TransferId
from pushkv.core.policy import Policy

from .world_network import Network
from .world_parts import (
    BLOCK_TOKENS,
    BLOCKS,
    POLICY,
    STRONG,
    STRONG_UNBOUNDED,
    WEAK,
    WEAK_UNBOUNDED,
    Memory,
    Node,
    Offer,
    Owner,
    ViolationError,
    Wire,
    Write,
)

__all__ = [
    "BLOCKS",
    "BLOCK_TOKENS",
    "POLICY",
    "STRONG",
    "STRONG_UNBOUNDED",
    "WEAK",
    "WEAK_UNBOUNDED",
    "Memory",
    "Node",
    "Offer",
    "Owner",
    "ViolationError",
    "Wire",
    "World",
    "Write",
    "pair",
]


class World(Network):
    """Several nodes, what their transports do, and what their engines know."""

    # -- the transport

    def ordered(self) -> list[Write]:
        """WRITEs that were ordered and not posted."""
        return [write for write in self.writes if write.posted_at is None and not write.closed]

    def flying(self) -> list[Write]:
        """WRITEs that are posted and not closed."""
        return [write for write in self.writes if write.posted_at is not None and not write.closed]

    def post(self, write: Write) -> bool:
        """R5: the permit is checked here and now. Returns whether it was posted."""
        node = write.node
        until = node.permits.get(write.effect.epoch, Instant(0))
        if not rules.may_post(self.local(node), until, self.capabilities.write_bound):
            self.close(write, "refused")
            return False
        write.posted_at = self.now
        return True

    def land(self, write: Write, tokens: int | None = None) -> None:
        """The bytes of `tokens` of its tokens, or of all, reach the consumer's host (I1)."""
        assert write.posted_at is not None, "only what was posted can land"
        bound = self.capabilities.write_bound
        took = self.local(write.node) - self.local(write.node, write.posted_at)
        assert bound is None or took <= bound, "the transport breaks its promise"
        effect = write.effect
        attempt = effect.attempt
        target = next(
            node
            for node in self.nodes.values()
            if (node.engine, node.rank) == (attempt.consumer, attempt.consumer_rank)
        )
        last = effect.part.end if tokens is None else effect.part.start + tokens
        for token in range(effect.part.start, last):
            value = self._read(write, token)
            block = effect.destination[0][
                (token - effect.destination_start // BLOCK_TOKENS * BLOCK_TOKENS) // BLOCK_TOKENS
            ]
            owner = target.memory.owners[block]
            mine = Owner("attempt", attempt.transfer, attempt.attempt)
            same_life = attempt.consumer_incarnation == target.incarnation and target.alive
            if owner != mine if same_life else owner is not None and target.alive:
                raise ViolationError(f"I1: {attempt} wrote block {block} of {owner}")
            target.memory.contents[block][attempt.producer_rank, token] = value
        write.landed = write.landed or last == effect.part.end

    def _read(self, write: Write, token: int) -> object:
        node, effect = write.node, write.effect
        alive = node.alive and node.incarnation == write.incarnation
        if alive and not write.source_read:
            block = effect.source[0][token // BLOCK_TOKENS]
            owner = node.memory.owners[block]
            if owner != Owner("source", effect.attempt.transfer):
                raise ViolationError(f"I1: {effect.attempt} read block {block} of {owner}")
        return (effect.attempt.transfer, effect.attempt.attempt)

    def land_all(self, node: Node, transfer: str, attempt: int) -> None:
        """Put every byte of an attempt in place, as if its WRITEs had been made."""
        event = node.offers[TransferId(transfer), attempt].event
        for token in range(event.start, event.end):
            block = event.blocks[0][token // BLOCK_TOKENS - event.start // BLOCK_TOKENS]
            for address in event.producers:
                written = (event.transfer, event.attempt)
                node.memory.contents[block][address.rank, token] = written

    def arrive(self, write: Write, token: int | None = None) -> None:
        """The consumer's transport can see the arrival; it is told when it looks."""
        attempt = write.effect.attempt
        for node in self.nodes.values():
            named = (node.engine, node.incarnation, node.rank)
            if node.alive and named == (
                attempt.consumer,
                attempt.consumer_incarnation,
                attempt.consumer_rank,
            ):
                number = write.effect.arrival_token if token is None else token
                seen = ArrivalSeen(attempt, write.effect.part.number, number)
                self._arrivals.append((node, seen))

    def close(self, write: Write, outcome: str, *, source_idle: bool = False) -> None:
        """The transport reports how the WRITE ended."""
        write.closed = True
        write.source_read = source_idle or outcome == "done"
        node = write.node
        if node.alive and node.incarnation == write.incarnation:
            number = write.effect.part.number
            attempt = write.effect.attempt
            self.happen(node, WriteClosed(attempt, number, outcome, source_idle=source_idle))

    def finish(self, write: Write) -> None:
        """Post, land, arrive and close as done; or as refused, if it may not be posted."""
        if self.post(write):
            self.land(write)
            self.arrive(write)
            self.close(write, "done")

    # -- the engines

    def offer(
        self,
        node: Node,
        transfer: str,
        producers: Iterable[Node],
        tokens: int = 8,
        *,
        start: int = 0,
        consumer_ranks: tuple[int, ...] | None = None,
        failures: int = 0,
        digest: bytes | None = None,
        expected: str = "",
    ) -> int | None:
        """The engine reserves blocks and offers them; None while it may hand out none (R13)."""
        if self.local(node) < node.endpoint.receiving.ready_at:
            return None
        number = node.attempts
        node.attempts += 1
        owner = Owner("attempt", transfer, number)
        first = start // BLOCK_TOKENS
        blocks = node.memory.take(
            -(-tokens // BLOCK_TOKENS) - first if tokens > start else 0, owner
        )
        event = Offered(
            transfer=TransferId(transfer),
            attempt=number,
            producers=tuple(evolve(each.address, engine=expected) for each in producers),
            blocks=(blocks,),
            start=start,
            end=tokens,
            prompt_digest=transfer.encode() if digest is None else digest,
            consumer_ranks=(node.rank,) if consumer_ranks is None else consumer_ranks,
            failures=failures,
        )
        node.offers[event.transfer, number] = Offer(event, owner)
        self.happen(node, event)
        return number

    def request(self, node: Node, transfer: str, tokens: int = 8) -> None:
        """The producer's engine has a request, and blocks for its prompt."""
        name = TransferId(transfer)
        number = -(-tokens // BLOCK_TOKENS)
        node.sources[name] = node.memory.take(number, Owner("source", transfer))
        self.happen(node, Arrived(name, transfer.encode()))

    def compute(self, node: Node, transfer: str, tokens: int = 8, *, final: bool = True) -> None:
        """The producer's engine has computed this many tokens."""
        name = TransferId(transfer)
        self.happen(node, Computed(name, tokens, (node.sources[name],), final))

    def prefill(self, node: Node, transfer: str, tokens: int = 8) -> None:
        """A request, and its whole prompt computed."""
        self.request(node, transfer, tokens)
        self.compute(node, transfer, tokens)

    def outcome(self, node: Node, transfer: str, attempt: int) -> Delivered | NotDelivered | None:
        """What the engine was told."""
        return node.offers[TransferId(transfer), attempt].outcome

    def delivered(self, node: Node, transfer: str, attempt: int = 0) -> bool:
        """Whether the engine was told that it can decode."""
        return isinstance(self.outcome(node, transfer, attempt), Delivered)

    def reason(self, node: Node, transfer: str, attempt: int = 0) -> str:
        """Why it was not delivered, or "" as long as it may be."""
        outcome = self.outcome(node, transfer, attempt)
        return outcome.reason if isinstance(outcome, NotDelivered) else ""

    def released(self, node: Node, transfer: str, attempt: int = 0) -> bool:
        """Whether the engine was told that the blocks are its own again."""
        return node.offers[TransferId(transfer), attempt].released

    def hand_out(self, node: Node) -> bool:
        """The engine gives free blocks to somebody; False while it may not (R13)."""
        if self.local(node) < node.endpoint.receiving.ready_at:
            return False
        node.memory.take(node.memory.blocks // 2, Owner("somebody"))
        return True

    def _report(self, node: Node, report: Report) -> None:
        node.reports.append(report)
        if isinstance(report, SourceReleased):
            node.released_sources.append(report)
            if node.sources.pop(report.transfer, None) is None:
                raise ViolationError(f"I3: the source of {report.transfer} was released twice")
            node.memory.give_back(Owner("source", report.transfer))
            return
        assert not isinstance(report, SourceYielded), "the runtime's word, not an endpoint's"
        offer = node.offers[report.transfer, report.attempt]
        match report:
            case Delivered() | NotDelivered():
                if offer.outcome is not None:
                    raise ViolationError(f"I3: {report} after {offer.outcome}")
                offer.outcome = report
                if isinstance(report, Delivered):
                    self._complete(node, offer)
            case BlocksReleased():
                if offer.released or offer.outcome is None:
                    raise ViolationError(f"I3: {report}, outcome {offer.outcome}")
                offer.released = True
                node.memory.give_back(offer.owner)
            case RetryDue():
                self._retry(node, offer)

    def _retry(self, node: Node, offer: Offer) -> None:
        told = offer.outcome
        due = isinstance(told, NotDelivered) and (told.retry or told.reason == "preempted")
        if not due:
            raise ViolationError(f"I3: a retry is due after {told}")
        if self.auto_retry:
            event = offer.event
            producers = [self.nodes[address.host] for address in event.producers]
            self.offer(
                node,
                event.transfer,
                producers,
                event.end,
                start=event.start,
                consumer_ranks=event.consumer_ranks,
                failures=event.failures + 1,
            )

    def _complete(self, node: Node, offer: Offer) -> None:
        """I2: every byte of this attempt is in place, from every producer rank."""
        event = offer.event
        for address in event.producers:
            for token in range(event.start, event.end):
                first = event.start // BLOCK_TOKENS
                block = event.blocks[0][token // BLOCK_TOKENS - first]
                value = node.memory.contents[block].get((address.rank, token))
                if value != (event.transfer, event.attempt):
                    raise ViolationError(
                        f"I2: {event.transfer}/{event.attempt} was delivered without token "
                        f"{token} of producer rank {address.rank}: {value}"
                    )

    # -- after every event

    def _check(self, node: Node) -> None:
        """I4: what the endpoint counts as exposed is what the engine has not got back."""
        out = sum(
            len(offer.event.blocks[0]) for offer in node.offers.values() if not offer.released
        )
        if out != node.endpoint.receiving.exposed_blocks:
            raise ViolationError(
                f"I4: {node.name} counts {node.endpoint.receiving.exposed_blocks} exposed blocks "
                f"of {out}"
            )
        for key, offer in node.offers.items():
            held = sum(owner == offer.owner for owner in node.memory.owners)
            if held != (0 if offer.released else len(offer.event.blocks[0])):
                raise ViolationError(f"I4: {key} holds {held} blocks")


def pair(
    capabilities: Capabilities = STRONG, policy: Policy = POLICY, *, auto: bool = True
) -> tuple[World, Node, Node]:
    """A world of one consumer and one producer."""
    world = World(capabilities, policy, auto=auto)
    return world, world.node("d"), world.node("p")
