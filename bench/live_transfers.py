"""What one transfer costs while 100 others are live, and while 100,000 are.

    python bench/live_transfers.py [--few 100] [--many 100000] [--transfers 400] [--json FILE]

Two endpoints, one at each end, in this process and in virtual time: the core alone, with no
network and no transport. The live transfers are registered at both ends and wait for their prefill.
Each measured transfer goes all its way beside them: offered, registered, computed, written,
delivered, released at both ends, and forgotten. Each is followed by a look at the next deadline, as
the runtime does after every event.

Two pairs stand side by side, one with few, one with many, and the transfers go to them in turns of
20, so that what else the machine does hits both. CPU time of this thread; medians of turns.

Bar: the cost with many is at most 1.2 times that with few.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import statistics
import time
from collections import deque
from pathlib import Path

from pushkv.core.capabilities import Capabilities
from pushkv.core.effects import (
    Delivered,
    Dial,
    PostWrite,
    ProducerAddress,
    SourceReleased,
    Transmit,
)
from pushkv.core.endpoint import Endpoint, Identity
from pushkv.core.events import (
    Arrived,
    Computed,
    ConnectionOpened,
    Event,
    MessageReceived,
    Offered,
    WriteClosed,
)
from pushkv.core.ids import EngineId, Incarnation, Instant, TransferId, seconds
from pushkv.core.messages import Hello
from pushkv.core.policy import Policy

BAR = 1.2
TURN = 20
BLOCKS = (tuple(range(16)),)
TOKENS = 2048
DIGEST = b"prompt"
ADDRESS = ProducerAddress("p", 1)
CONNECTION = 1
DAY = seconds(86_400)
DECODE, PREFILL = 0, 1


class Pair:
    """A decode and a prefill endpoint, joined by a wire without delay, and what has become."""

    def __init__(self, live: int) -> None:
        # Nothing expires: what is live here waits for a long prefill.
        policy = Policy(
            transfers=live + 1_000, waiting=DAY, expected=DAY, hold=DAY, resend=seconds(3_600)
        )
        capabilities = Capabilities("bench", done_means_visible=True, reaches_successor=False)
        self.now = Instant(seconds(100))
        self.ends = [
            Endpoint(
                Identity(self._hello(name, policy), b"layout", b"0123456789abcdef"),
                policy,
                capabilities,
                lambda mine, theirs: None,
                Instant(0),
            )
            for name in ("d", "p")
        ]
        self.delivered = self.released = self.attempts = 0
        self._events: deque[tuple[int, Event]] = deque()
        for number in range(live):
            self._begin(f"live-{number}")
        self.live = live

    @staticmethod
    def _hello(name: str, policy: Policy) -> Hello:
        return Hello(
            protocol=1,
            nonce=0,
            engine=EngineId(name),
            incarnation=Incarnation(1),
            rank=0,
            model=(),
            layout=(),
            transport="bench",
            transport_version="1",
            lease=policy.lease,
            directory=(),
            memory=b"",
        )

    def _settle(self, end: int, event: Event) -> None:
        """Let an event and all that follows from it happen."""
        events = self._events
        events.append((end, event))
        while events:
            at, what = events.popleft()
            for effect in self.ends[at].handle(what, self.now):
                if isinstance(effect, Transmit):
                    events.append((1 - at, MessageReceived(CONNECTION, effect.message)))
                elif isinstance(effect, PostWrite):
                    done = WriteClosed(effect.attempt, effect.part.number, "done", "", True)
                    events.append((at, done))
                elif isinstance(effect, Dial):
                    events.append((DECODE, ConnectionOpened(CONNECTION, 11, effect.address)))
                    events.append((PREFILL, ConnectionOpened(CONNECTION, 12, None)))
                elif isinstance(effect, Delivered):
                    self.delivered += 1
                elif isinstance(effect, SourceReleased):
                    self.released += 1
            self.ends[at].next_deadline()

    def _begin(self, name: str) -> TransferId:
        transfer = TransferId(name)
        self._settle(PREFILL, Arrived(transfer, DIGEST))
        number, self.attempts = self.attempts, self.attempts + 1
        offered = Offered(transfer, number, (ADDRESS,), BLOCKS, 0, TOKENS, DIGEST)
        self._settle(DECODE, offered)
        return transfer

    def turn(self, first: int) -> float:
        """CPU seconds of one transfer, over a turn of them."""
        before = self.delivered
        began = time.thread_time()
        for number in range(first, first + TURN):
            self.now = Instant(self.now + 1_000_000)
            transfer = self._begin(f"one-{number}")
            self._settle(PREFILL, Computed(transfer, TOKENS, BLOCKS, True))
        took = time.thread_time() - began
        assert self.delivered - before == TURN == self.released - before
        receiving, sending = self.ends[DECODE].receiving, self.ends[PREFILL].sending
        assert len(receiving.consumers.states) == self.live
        assert len(sending.transfers()) == self.live
        return took / TURN


def measure(few: int, many: int, transfers: int) -> dict[str, object]:
    """Microseconds of CPU per transfer at both numbers of live ones."""
    pairs = {few: Pair(few), many: Pair(many)}
    # What lives long is not looked through again and again: as a server does after it has started.
    gc.collect()
    gc.freeze()
    turns: dict[int, list[float]] = {live: [] for live in pairs}
    for index in range(-2, transfers // TURN):
        for live, pair in pairs.items():
            took = pair.turn(index * TURN)
            if index >= 0:  # the first two warm up
                turns[live].append(1e6 * took)
    cost = {live: statistics.median(found) for live, found in turns.items()}
    ratio = cost[many] / cost[few]
    return {
        "python": platform.python_version(),
        "transfers": transfers,
        "us_per_transfer": {str(live): value for live, value in cost.items()},
        "turns_us": {str(live): found for live, found in turns.items()},
        "ratio": ratio,
        "bars": {"ratio": {"most": BAR, "value": ratio, "met": ratio <= BAR}},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--transfers", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="where the time goes, with many")
    arguments = parser.parse_args()
    if arguments.profile:
        pair = Pair(arguments.many)
        with cProfile.Profile() as profile:
            pair.turn(0)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    result = measure(arguments.few, arguments.many, arguments.transfers)
    costs = result["us_per_transfer"]
    assert isinstance(costs, dict)
    for live, cost in costs.items():
        print(f"{int(live):9,} live: {cost:8.1f} us of CPU a transfer, both ends")
    ratio = result["ratio"]
    assert isinstance(ratio, float)
    print(f"ratio {ratio:.2f}, bar {BAR}: {'met' if ratio <= BAR else 'MISSED'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
