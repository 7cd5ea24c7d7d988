"""The machines of one endpoint at one moment, as an operator sees them. Pure; bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from attrs import frozen

from pushkv.core import producer as producer_machine
from pushkv.core import rules
from pushkv.core.capabilities import Capabilities
from pushkv.core.consumer import Consumer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import ProducerAddress
from pushkv.core.endpoint import Endpoint
from pushkv.core.ids import FOREVER, AttemptId, Duration, Epoch, Instant, block_count
from pushkv.core.link import LINK, Link, LinkStatus
from pushkv.core.links import LinkKey
from pushkv.core.producer import Producer
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST, Request, RequestStatus
from pushkv.core.sending import ProducerKey

from .ages import Ages
from .state import LinkState, Peer, Proof, QuarantineState, TransferState

__all__ = ["View", "links", "quarantined", "transfers"]

BETWEEN_ATTEMPTS = (RequestStatus.RETRYING, RequestStatus.PREEMPTED)
DEATH = "certain death of the peer's process: seen by the kernel on this host, or told by is_gone"
WORD = "the operator's word that nothing can reach these blocks any more: pushkv admin release"


@frozen
class View:
    """What is looked at, and when.

    Attributes:
        endpoint: The machines.
        permit_until: When the permit of a link ends; None where it has none.
        ages: Since when.
        lease: Of every link.
        capabilities: The transport's.
        now: The moment.
    """

    endpoint: Endpoint
    permit_until: Callable[[Epoch], Instant | None]
    ages: Ages
    lease: Duration
    capabilities: Capabilities
    now: Instant

    def left_s(self, until: Instant | None) -> float | None:
        """How long until then, in seconds; None for never, 0 for what is over."""
        if until is None or until == FOREVER:
            return None
        return max(0, until - self.now) / 1e9


def links(view: View, most: int) -> tuple[LinkState, ...]:
    """The first `most` links."""
    states = view.endpoint.links.store.states
    return tuple(_link(view, key, state) for key, state in islice(states.items(), most))


def _link(view: View, key: LinkKey, state: Link) -> LinkState:
    until: Instant | None = None
    if state.status is LinkStatus.UP and state.epoch is not None:
        granted = rules.fence(state.last_grant, view.lease)
        until = granted if state.grants else view.permit_until(state.epoch)
    return LinkState(
        role="consumer" if state.grants else "producer",
        address=f"{key.host}:{key.port}" if isinstance(key, ProducerAddress) else "",
        peer=None if state.peer is None else Peer.of(state.peer),
        status=str(state.status),
        status_s=view.ages.status_s(LINK.name, key),
        lease_left_s=view.left_s(until),
    )


def transfers(view: View, most: int) -> tuple[TransferState, ...]:
    """Up to `most` of each role's live attempts, and up to `most` in all, oldest first."""
    sending = view.endpoint.sending
    found = [
        *islice(_receiving(view), most),
        *(
            _producer(view, key, state)
            for key, state in islice(_live(sending.producers.states), most)
        ),
    ]
    return tuple(sorted(found, key=lambda each: -each.age_s)[:most])


def _receiving(view: View) -> Iterator[TransferState]:
    receiving = view.endpoint.receiving
    for attempt, state in receiving.consumers.states.items():
        yield _consumer(view, attempt, state)
    for key, request in receiving.requests.states.items():
        if request.status in BETWEEN_ATTEMPTS:
            yield _request(view, key, request)


def _live(states: dict[ProducerKey, Producer]) -> Iterator[tuple[ProducerKey, Producer]]:
    return ((key, each) for key, each in states.items() if not producer_machine.is_over(each))


def _consumer(view: View, attempt: AttemptId, state: Consumer) -> TransferState:
    request = view.endpoint.receiving.requests.states.get((attempt.transfer, attempt.attempt))
    return TransferState(
        transfer=attempt.transfer,
        attempt=attempt.attempt,
        role="consumer",
        peer=None if state.producer is None else Peer.of(state.producer),
        status=str(state.status),
        status_s=view.ages.status_s(CONSUMER.name, attempt),
        age_s=view.ages.age_s(CONSUMER.name, attempt),
        blocks=block_count(state.register.blocks),
        attempts=1 if request is None else request.failures + 1,
    )


def _request(view: View, key: tuple[str, int], request: Request) -> TransferState:
    return TransferState(
        transfer=request.transfer,
        attempt=request.attempt,
        role="consumer",
        peer=None,
        status=str(request.status),
        status_s=view.ages.status_s(REQUEST.name, key),
        age_s=view.ages.age_s(REQUEST.name, key),
        blocks=0,
        attempts=request.failures + 1,
    )


def _producer(view: View, key: ProducerKey, state: Producer) -> TransferState:
    served = state.registration
    return TransferState(
        transfer=state.transfer,
        attempt=None if served is None else served.register.attempt.attempt,
        role="producer",
        peer=None if served is None else Peer.of(served.consumer),
        status=str(state.status),
        status_s=view.ages.status_s(PRODUCER.name, key),
        age_s=view.ages.age_s(PRODUCER.name, key),
        blocks=block_count(state.source),
        attempts=len(state.ended) + (served is not None),
    )


def quarantined(view: View) -> Iterator[QuarantineState]:
    """What only a proof gives back: destinations, then sources, each oldest first."""
    receiving, sending, ages = view.endpoint.receiving, view.endpoint.sending, view.ages
    for attempt in sorted(receiving.quarantined, key=lambda each: ages.since(CONSUMER.name, each)):
        state = receiving.consumers.states[attempt]
        yield QuarantineState(
            role="consumer",
            transfer=attempt.transfer,
            attempt=attempt.attempt,
            peer=None if state.producer is None else Peer.of(state.producer),
            blocks=block_count(state.register.blocks),
            since_s=ages.status_s(CONSUMER.name, attempt),
            proofs=_proofs_for(view, state),
        )
    doubted = sorted(sending.doubted(), key=lambda each: ages.since(PRODUCER.name, each[1]))
    for consumer, key in doubted:
        source = sending.producers.states[key]
        assert source.registration is not None, "it is served"
        yield QuarantineState(
            role="producer",
            transfer=source.transfer,
            attempt=source.registration.register.attempt.attempt,
            peer=Peer.of(consumer),
            blocks=block_count(source.source),
            since_s=ages.status_s(PRODUCER.name, key),
            proofs=_proofs_of_source(view, source),
        )


def _proofs_for(view: View, state: Consumer) -> tuple[Proof, ...]:
    found = [Proof("verdict", "the same life of the peer comes back and says that it is over")]
    if state.fence is not None and view.capabilities.write_bound is not None:
        fence = Proof("fence", "its last lease ends, which bounds WRITEs", view.left_s(state.fence))
        found.insert(0, fence)
    return (*found, *_other_proofs(view))


def _proofs_of_source(view: View, state: Producer) -> tuple[Proof, ...]:
    over_at = max(doubt.over_at for doubt in state.unknown)
    due_s = view.left_s(over_at)
    late = () if due_s is None else (Proof("fence", "the WRITE's bound is over", due_s),)
    return (*late, *_other_proofs(view))


def _other_proofs(view: View) -> tuple[Proof, ...]:
    death = () if view.capabilities.death_bound is None else (Proof("death", DEATH),)
    return (*death, Proof("word", WORD))
