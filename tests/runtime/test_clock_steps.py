"""What a clock that steps may do: end permits early, and never let them last."""

from __future__ import annotations

import pytest
from tests.matrix.clocks import SteppingClock
from tests.matrix.detour import Detour
from tests.runtime.node import Node, right, until

from pushkv.core.ids import seconds
from pushkv.core.messages import Grant, Registered
from pushkv.testing.channel_faults import Act, Toward
from pushkv_memory import MemoryFabric

PROMPT = tuple(range(40))


@pytest.mark.parametrize(("step_s", "delivers"), [(0.0, True), (5.0, False)])
def test_a_producer_whose_clock_jumps_ahead_writes_under_no_permit_of_before(
    step_s: float, delivers: bool
) -> None:
    fabric = MemoryFabric()
    lease = {"lease": seconds(4), "waiting": seconds(4), "attempts": 1}
    clock = SteppingClock()
    with (
        Node(fabric, "P", clock=clock, changes={**lease, "expected": seconds(4)}) as producer,
        Node(fabric, "D", changes=lease) as consumer,
        Detour(producer.address) as detour,
    ):
        result = consumer.consume("t", PROMPT, detour.address)
        until(lambda: any(isinstance(each.message, Grant) for each in detour.faults.frames))
        until(lambda: any(isinstance(each.message, Registered) for each in detour.faults.frames))
        detour.faults.rule(Grant, toward=Toward.PRODUCER, act=Act.DROP)
        clock.step(seconds(step_s))
        producer.produce("t", PROMPT)
        generation = result.result(10)
        assert generation.tokens == right(PROMPT)
        assert generation.prefilled is not delivers
