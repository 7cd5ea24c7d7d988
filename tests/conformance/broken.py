"""One broken transport for each check: the memory transport with one mistake."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import ClassVar

import numpy as np
from attrs import evolve, field, frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import FOREVER, Worker, seconds
from pushkv.model.faults import Fault, FaultRule
from pushkv.transport import Arrival, Completion, Permit, Region, Write, WriteOutcome
from pushkv_memory import MemoryFabric, MemoryTransport

from .memory_ends import STRONG

SLOW = (FaultRule(Fault.DELAY, 1_000_000, least=seconds(0.02), most=seconds(0.1)),)
LARGE = 1 << 20
News = Completion | Arrival


class Known(MemoryTransport):
    """Can tell its peers of the same fabric something that did not happen."""

    lives: ClassVar[dict[tuple[bytes, Worker], Known]] = {}

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.told: deque[News] = deque()

    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        super().start(worker, regions, clock, wake)
        self.lives[self.memory(), worker] = self

    def peer(self, write: Write) -> Known:
        return self.lives[self.memory(), write.peer]

    def poll(self) -> Sequence[News]:
        news = [*self.told, *super().poll()]
        self.told.clear()
        return news


class Changing(MemoryTransport):
    """Passes news through `change`, which may leave some out or repeat them."""

    def change(self, each: News) -> Sequence[News]:
        return (each,)

    def poll(self) -> Sequence[News]:
        return [changed for each in super().poll() for changed in self.change(each)]


# -- delivery


class FlipsAByte(MemoryTransport):
    def post(self, write: Write) -> None:
        super().post(write)
        at = int(write.destination[-1].sum()) - 1
        ctypes.c_uint8.from_address(at).value ^= 1


class SortsTheSourceAlone(MemoryTransport):
    def post(self, write: Write) -> None:
        source = write.source.copy()
        same = source[:, 1] == 700
        source[same, 0] = np.sort(source[same, 0])
        super().post(evolve(write, source=source))


class RoundsAddresses(MemoryTransport):
    def post(self, write: Write) -> None:
        destination = write.destination.copy()
        destination[:, 0] &= np.uint64(2**64 - 4)
        super().post(evolve(write, destination=destination))


class CutsOffLargeSegments(MemoryTransport):
    def post(self, write: Write) -> None:
        at, length = (int(each) for each in write.destination[0])
        before = ctypes.string_at(at + LARGE, length - LARGE) if length > LARGE else b""
        super().post(write)
        ctypes.memmove(at + LARGE, before, len(before))


class ForgetsEmptyWrites(MemoryTransport):
    def post(self, write: Write) -> None:
        if write.length_bytes:
            super().post(write)


class WritesOneByteMore(MemoryTransport):
    def post(self, write: Write) -> None:
        super().post(write)
        ctypes.c_uint8.from_address(int(write.destination[-1].sum())).value = 0


class AnnouncesBeforeItWrites(Known):
    def post(self, write: Write) -> None:
        early = Arrival(write.attempt, write.part, write.arrival_token, write.length_bytes)
        self.peer(write).told.append(early)
        time.sleep(0.02)
        super().post(write)


class CutsTheToken(Changing):
    def change(self, each: News) -> Sequence[News]:
        return (evolve(each, token=each.token % 2**32) if isinstance(each, Arrival) else each,)


class PromisesVisibility(MemoryTransport):
    """Over a fabric whose DONE means little."""

    @property
    def capabilities(self) -> Capabilities:
        return evolve(super().capabilities, done_means_visible=True)


class ReadsTheSourceWhenAsked(Known):
    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.late: dict[int, Write] = {}

    def post(self, write: Write) -> None:
        super().post(write)
        target = self.peer(write)
        assert isinstance(target, ReadsTheSourceWhenAsked)
        target.late[write.part] = write

    def poll(self) -> Sequence[News]:
        news = super().poll()
        for each in news:
            write = self.late.get(each.part) if isinstance(each, Arrival) else None
            if write is not None:
                length = int(write.source[0, 1])
                ctypes.memmove(int(write.destination[0, 0]), int(write.source[0, 0]), length)
        return news


class TellsFailuresTwice(Changing):
    def change(self, each: News) -> Sequence[News]:
        failed = isinstance(each, Completion) and each.outcome is WriteOutcome.FAILED
        return (each, each) if failed else (each,)


class DropsOldArrivals(MemoryTransport):
    def look_for_arrivals(self, active: bool) -> None:
        super().look_for_arrivals(active)
        super().poll()


class StopsLookingForGood(MemoryTransport):
    stops = 0

    def look_for_arrivals(self, active: bool) -> None:
        self.stops += not active
        super().look_for_arrivals(active and self.stops < 2)


# -- failures


class RemovesNoPeer(MemoryTransport):
    def remove_peer(self, peer: Worker) -> None:
        pass


class TakesAnyMemory(MemoryTransport):
    def add_peer(self, peer: Worker, memory: bytes) -> None:
        super().add_peer(peer, self.memory())


class RegistersTheGap(MemoryTransport):
    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        first, last = regions
        whole = last.address + last.length_bytes - first.address
        super().start(worker, [Region(first.address, whole)], clock, wake)


class WritesWhatMatches(Changing):
    def post(self, write: Write) -> None:
        shorter = min(len(write.source), len(write.destination))
        source, destination = write.source[:shorter], write.destination[:shorter].copy()
        destination[:, 1] = source[:, 1]
        super().post(evolve(write, source=source, destination=destination))

    def change(self, each: News) -> Sequence[News]:
        return (evolve(each, length_bytes=8192),)


class AsksForNoPermit(MemoryTransport):
    def post(self, write: Write) -> None:
        super().post(evolve(write, permit=lasting()))


class AsksAtTheOrder(MemoryTransport):
    def post(self, write: Write) -> None:
        copied = Permit()
        copied.until_ns = write.permit.until_ns
        super().post(evolve(write, permit=copied))


class AsksBeforeReady(MemoryTransport):
    def post(self, write: Write) -> None:
        asked = lasting()
        ready = write.ready
        assert ready is not None

        def ask() -> bool:
            asked.until_ns = write.permit.until_ns
            return ready()

        super().post(evolve(write, permit=asked, ready=ask))


class RefusesAfterwards(Changing):
    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.permits: dict[int, Permit] = {}

    def post(self, write: Write) -> None:
        self.permits[write.part] = write.permit
        super().post(evolve(write, permit=lasting()))

    def change(self, each: News) -> Sequence[News]:
        if isinstance(each, Arrival):
            return ()
        if self.permits[each.part].until_ns == 0:
            refused = Completion(each.attempt, each.part, WriteOutcome.REFUSED, 0, "too late")
            return (refused,)
        return (each,)


class WaitsForNoSource(MemoryTransport):
    def post(self, write: Write) -> None:
        super().post(evolve(write, ready=None))


class OneAfterAnother(Changing):
    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.waiting: deque[Write] = deque()
        self.busy = False

    def post(self, write: Write) -> None:
        self.waiting.append(write)
        self.go_on()

    def go_on(self) -> None:
        if self.waiting and not self.busy:
            self.busy = True
            super().post(self.waiting.popleft())

    def change(self, each: News) -> Sequence[News]:
        if isinstance(each, Completion):
            self.busy = False
            self.go_on()
        return (each,)


class WaitsForEver(MemoryTransport):
    def post(self, write: Write) -> None:
        permit, ready = lasting(), write.ready
        assert ready is not None

        def ask() -> bool:
            if ready():
                permit.until_ns = write.permit.until_ns
                return True
            return False

        super().post(evolve(write, permit=permit, ready=ask))


class TakesErrorsForWaiting(MemoryTransport):
    def post(self, write: Write) -> None:
        def ask() -> bool:
            try:
                return write.ready is None or write.ready()
            except OSError:
                return False

        super().post(evolve(write, ready=ask))


# -- work


class HasASmallQueue(MemoryTransport):
    posted = 0

    def post(self, write: Write) -> None:
        self.posted += 1
        if self.posted <= 1000:
            super().post(write)


class IsSlowToPost(MemoryTransport):
    def post(self, write: Write) -> None:
        if write.length_bytes > LARGE:
            time.sleep(0.4)
        super().post(write)


class WaitsForTheAnswer(MemoryTransport):
    def post(self, write: Write) -> None:
        super().post(write)
        until = time.monotonic() + 0.4
        while write.length_bytes > LARGE and self.fabric.in_flight and time.monotonic() < until:
            time.sleep(0.001)


class ForgetsToWake(MemoryTransport):
    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        calls = count()
        super().start(worker, regions, clock, lambda: None if next(calls) % 3 == 2 else wake())


class Spins(MemoryTransport):
    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        super().start(worker, regions, clock, wake)
        self.closed = threading.Event()
        threading.Thread(target=self.spin, daemon=True).start()

    def spin(self) -> None:
        while not self.closed.is_set():
            pass

    def close(self, timeout_s: float) -> bool:
        self.closed.set()
        return super().close(timeout_s)


class LeaksDescriptors(MemoryTransport):
    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.open: list[int] = []

    def post(self, write: Write) -> None:
        self.open.append(os.open(os.devnull, os.O_RDONLY))
        super().post(write)

    def close(self, timeout_s: float) -> bool:
        while self.open:
            os.close(self.open.pop())
        return super().close(timeout_s)


# -- peers


class ForgetsWhenAPeerComesAgain(MemoryTransport):
    def add_peer(self, peer: Worker, memory: bytes) -> None:
        super().add_peer(peer, memory)
        super().poll()


class ForgetsWithThePeer(MemoryTransport):
    def remove_peer(self, peer: Worker) -> None:
        super().remove_peer(peer)
        super().poll()


class CallsTheUnknownDone(Changing):
    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.lengths: dict[int, int] = {}

    def post(self, write: Write) -> None:
        self.lengths[write.part] = write.length_bytes
        super().post(write)

    def change(self, each: News) -> Sequence[News]:
        if isinstance(each, Completion) and each.outcome is WriteOutcome.UNKNOWN:
            length = self.lengths[each.part]
            return (Completion(each.attempt, each.part, WriteOutcome.DONE, length),)
        return (each,)


class SaysNothingOfTheUnknown(Changing):
    def change(self, each: News) -> Sequence[News]:
        unknown = isinstance(each, Completion) and each.outcome is WriteOutcome.UNKNOWN
        return () if unknown else (each,)


class TakesANameForAPeer(MemoryTransport):
    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.first: dict[tuple[str, int], Worker] = {}

    def post(self, write: Write) -> None:
        peer = write.peer
        super().post(evolve(write, peer=self.first.setdefault((peer.engine, peer.rank), peer)))


class DeniesThatItReaches(MemoryTransport):
    """Over a fabric whose WRITEs do reach a successor."""

    @property
    def capabilities(self) -> Capabilities:
        return evolve(super().capabilities, reaches_successor=False)


class AnnouncesAtOnce(Known):
    def post(self, write: Write) -> None:
        early = Arrival(write.attempt, write.part, write.arrival_token, write.length_bytes)
        self.peer(write).told.append(early)
        super().post(write)


# -- life


class CountsItsVersions(MemoryTransport):
    @property
    def version(self) -> str:  # type: ignore[override]
        self.asked = getattr(self, "asked", 0) + 1
        return f"version {self.asked}"


class StartsTwice(MemoryTransport):
    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        if regions:
            super().start(worker, regions, clock, wake)


class NeedsAStart(MemoryTransport):
    def close(self, timeout_s: float) -> bool:
        self.memory_of_others()
        return super().close(timeout_s)

    def memory_of_others(self) -> None:
        with self.fabric.lock:
            self._started()


class IsSilentOnceClosed(MemoryTransport):
    closed = False

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        return super().close(timeout_s)

    def poll(self) -> Sequence[News]:
        return () if self.closed else super().poll()


class LeavesItsWrites(MemoryTransport):
    def close(self, timeout_s: float) -> bool:
        return True


class ClosesInAnyCase(MemoryTransport):
    def close(self, timeout_s: float) -> bool:
        super().close(timeout_s)
        return True


class LeaksAThread(MemoryTransport):
    end = threading.Event()

    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        super().start(worker, regions, clock, wake)
        threading.Thread(target=self.end.wait, daemon=True).start()


def lasting() -> Permit:
    permit = Permit()
    permit.until_ns = FOREVER
    return permit


@frozen
class Broken:
    """How a check is made to fail, and what it then says."""

    transport: Callable[[MemoryFabric], MemoryTransport]
    said: str
    faults: tuple[FaultRule, ...] = ()
    capabilities: Capabilities = field(default=STRONG)


WEAK = evolve(STRONG, done_means_visible=False)
REACHING = evolve(STRONG, reaches_successor=True)
NO_COMPLETION = "exactly one completion for each WRITE; seen: 0 of"

BROKEN = {
    "bytes_arrive": Broken(FlipsAByte, "1 bytes differ"),
    "scattered_segments": Broken(SortsTheSourceAlone, "bytes differ"),
    "misaligned_segments": Broken(RoundsAddresses, "bytes differ"),
    "large_segment": Broken(CutsOffLargeSegments, "bytes differ"),
    "empty_write": Broken(ForgetsEmptyWrites, NO_COMPLETION),
    "nothing_outside_is_touched": Broken(WritesOneByteMore, "bytes differ"),
    "arrival_after_bytes": Broken(AnnouncesBeforeItWrites, "bytes still to come"),
    "arrival_names_the_part": Broken(CutsTheToken, "token = 9223372036854775809; seen: 1"),
    "done_means_visible": Broken(PromisesVisibility, "bytes differ", SLOW, WEAK),
    "source_is_free_when_idle": Broken(ReadsTheSourceWhenAsked, "bytes differ"),
    "one_completion_each": Broken(TellsFailuresTwice, "seen: 2 of"),
    "arrivals_wait": Broken(DropsOldArrivals, "an arrival of each WRITE; seen: none"),
    "looking_twice": Broken(StopsLookingForGood, "an arrival of each WRITE; seen: none"),
    "unknown_peer": Broken(RemovesNoPeer, "outcome FAILED; seen: DONE"),
    "bad_peer_memory": Broken(TakesAnyMemory, "outcome FAILED; seen: DONE"),
    "outside_memory": Broken(RegistersTheGap, "outcome FAILED; seen: DONE"),
    "unequal_segments": Broken(WritesWhatMatches, "outcome FAILED; seen: DONE"),
    "permit_needed": Broken(AsksForNoPermit, "outcome REFUSED; seen: DONE"),
    "permit_asked_when_ready": Broken(AsksAtTheOrder, "outcome REFUSED; seen: DONE"),
    "permit_asked_last": Broken(AsksBeforeReady, "outcome REFUSED; seen: DONE"),
    "permit_withdrawn_midway": Broken(RefusesAfterwards, "bytes differ", SLOW),
    "waits_for_its_source": Broken(WaitsForNoSource, "no completion before the source is ready"),
    "waiting_holds_up_nobody": Broken(OneAfterAnother, NO_COMPLETION),
    "waiting_ends_with_the_permit": Broken(WaitsForEver, NO_COMPLETION),
    "source_that_raises": Broken(TakesErrorsForWaiting, NO_COMPLETION),
    "many_small_writes": Broken(HasASmallQueue, NO_COMPLETION),
    "calls_return": Broken(IsSlowToPost, "post: 0.4"),
    "calls_wait_for_no_peer": Broken(WaitsForTheAnswer, "post: 0.4"),
    "wake_wakes": Broken(ForgetsToWake, "a wake for"),
    "idle_costs_nothing": Broken(Spins, "of a core while idle"),
    "transfers_leak_nothing": Broken(LeaksDescriptors, "no more than before"),
    "same_peer_twice": Broken(ForgetsWhenAPeerComesAgain, NO_COMPLETION),
    "removed_peer": Broken(ForgetsWithThePeer, NO_COMPLETION),
    "consumer_crashes": Broken(CallsTheUnknownDone, "and bytes are missing", SLOW),
    "writes_to_the_dead_end": Broken(SaysNothingOfTheUnknown, NO_COMPLETION),
    "successor_is_reached": Broken(TakesANameForAPeer, "outcome DONE; seen: UNKNOWN"),
    "predecessor_stays_dead": Broken(
        DeniesThatItReaches, "from a dead incarnation", capabilities=REACHING
    ),
    "producer_crashes": Broken(AnnouncesAtOnce, "arrivals of whole parts only", SLOW),
    "facts_are_constant": Broken(CountsItsVersions, "facts after a WRITE"),
    "misuse_is_an_error": Broken(StartsTwice, "start again = 'TransportError'; seen: 'nothing'"),
    "close_before_start": Broken(NeedsAStart, "no exception"),
    "close_tells_the_rest": Broken(IsSilentOnceClosed, NO_COMPLETION),
    "close_ends_what_waits": Broken(LeavesItsWrites, NO_COMPLETION),
    "close_is_honest": Broken(ClosesInAnyCase, NO_COMPLETION),
    "closed_for_good": Broken(LeavesItsWrites, "outcome FAILED; seen: DONE"),
    "lives_leave_nothing": Broken(LeaksAThread, "no more than before"),
}
"""By the check that must find it."""
