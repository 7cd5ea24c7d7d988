"""Messages that a script makes up, whatever the machines would say."""

from __future__ import annotations

from pushkv.core.ids import AttemptId, EngineId, Incarnation, TransferId
from pushkv.core.messages import (
    AttemptMessage,
    Complete,
    Failed,
    Grant,
    Message,
    Ping,
    Progress,
    Query,
    Reason,
    Received,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)

from .scenario_world import ScenarioError
from .world import Node

__all__ = ["ASKED", "made"]

ASKED = ("QUERY", "REVOKE", "RECEIVED", "GRANT")
"""What a consumer says."""
STAMP = 7
"""That nobody has sent."""


def made(kind: str, consumer: Node, producer: Node, transfer: str, number: int) -> Message:
    """A message of that kind between two engines, about an attempt of `consumer`.

    Raises:
        ScenarioError: There is no message of that kind, or none that can be made up.
    """
    attempt = AttemptId(
        EngineId(consumer.engine),
        Incarnation(consumer.incarnation),
        consumer.rank,
        producer.rank,
        TransferId(transfer),
        number,
    )
    links: dict[str, Message] = {
        "PING": Ping(STAMP),
        "GRANT": Grant(
            STAMP,
            consumer.policy.lease,
            Incarnation(consumer.incarnation),
            Incarnation(producer.incarnation),
        ),
    }
    attempts: dict[str, AttemptMessage] = {
        "REGISTERED": Registered(attempt),
        "PROGRESS": Progress(attempt, 0),
        "COMPLETE": Complete(attempt, ()),
        "FAILED": Failed(attempt, (), Reason.GONE),
        "REVOKED": Revoked(attempt, ()),
        "UNPROVEN": Unproven(attempt, ()),
        "QUERY": Query(attempt),
        "REVOKE": Revoke(attempt),
        "RECEIVED": Received(attempt),
    }
    found = links.get(kind) or attempts.get(kind)
    if found is None:
        raise ScenarioError(f"no {kind} can be made up; known are {', '.join((*links, *attempts))}")
    return found
