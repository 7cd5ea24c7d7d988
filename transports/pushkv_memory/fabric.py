"""The fabric that joins the memory transports of one process, faults included.

What happens to a WRITE is decided by `pushkv.model`: a `Fate` when it is posted, and the rules of
a `Flight` at every step. The fabric adds what the model leaves out: real bytes, time, and whom to
tell. Under one seed and a virtual clock, the same calls give the same history.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import assert_never

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import ConfigurationError, TransportError
from pushkv.core.ids import FOREVER, Duration, Instant, Worker, seconds
from pushkv.model.fates import CrashStep, CutStep, EndStep, LandStep, Step, decide
from pushkv.model.faults import Chance, Fault, FaultPlan, FaultRule
from pushkv.model.flights import FlightKey, Outcome, drop, place, post, standing
from pushkv.transport import Arrival, Completion, Write, WriteOutcome

from .copying import problem, split
from .flying import Flying
from .history import Crashed, Ended, Entry, History, Landed, Noticed, PathCut, PathHealed, Posted
from .port import Port
from .schedule import Schedule, Timer

__all__ = ["CAPABILITIES", "MemoryFabric", "default_fabric"]

CAPABILITIES = Capabilities(
    "memory",
    done_means_visible=True,
    write_bound=seconds(0.25),
    death_bound=seconds(0.25),
    reaches_successor=False,
)
"""What a fabric promises unless told otherwise, and keeps: it lands no byte after the bound."""

READY_INTERVAL = seconds(0.001)
"""How often a WRITE whose source is not `ready` is looked at again."""

_MESSAGE_FAULTS = (Fault.LOSS, Fault.DUPLICATION)


class MemoryFabric:
    """What joins the transports of one process. Thread-safe.

    Args:
        seed: Of every choice by chance.
        faults: One `FaultRule` per fault of WRITEs, arrivals, workers and paths.
        capabilities: What it promises; it keeps them, and uses every freedom that they leave.
        clock: In nanoseconds. With `time.monotonic_ns` time passes by itself; any other clock is
            virtual, and whoever moves it calls `advance`.
        pieces: In how many pieces a WRITE lands, at most.
        timeout: How long after its post a WRITE that a cut path holds up is reported UNKNOWN.
        history_most: How many entries `history` keeps.
        observer: Called with each entry as it happens, under the lock; must not block.

    Raises:
        ConfigurationError: A value is out of range, or a fault is one of messages.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Iterable[FaultRule] = (),
        capabilities: Capabilities = CAPABILITIES,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        pieces: int = 4,
        timeout: Duration = seconds(1),
        history_most: int = 65_536,
        observer: Callable[[Entry], None] | None = None,
    ) -> None:
        if pieces < 1:
            raise ConfigurationError("pieces", pieces, "at least 1")
        if timeout < 0:
            raise ConfigurationError("timeout", timeout, "at least 0")
        self._plan = FaultPlan(seed, tuple(faults))
        for fault in _MESSAGE_FAULTS:
            if self._plan.rule(fault) is not None:
                raise ConfigurationError("faults", fault.value, "no fault of messages")
        self.capabilities = capabilities
        self.name: bytes = f"pushkv-memory:{os.getpid()}:{id(self):x}".encode()
        self._chance = Chance()
        self._clock = clock
        self._pieces = pieces
        self._timeout = timeout
        self._ports: dict[Worker, Port] = {}
        self._flying: dict[FlightKey, Flying] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._held: list[tuple[tuple[str, str], Flying, Callable[[Instant], None]]] = []
        self._history = History(history_most, observer)
        self._rung: list[Port] = []
        self._schedule = Schedule()
        self.lock: threading.RLock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._timer: Timer | None = None
        if clock is time.monotonic_ns:
            self._timer = Timer(self._changed, self._wait_s, self.advance)

    # -- for tests and drivers of virtual time

    @property
    def history(self) -> tuple[Entry, ...]:
        """What has happened, oldest first; the oldest entries beyond `history_most` are gone."""
        with self.lock:
            return tuple(self._history)

    @property
    def chance(self) -> Chance:
        """How often each fault had an opportunity, and struck."""
        return self._chance

    @property
    def in_flight(self) -> int:
        """WRITEs that may still land, or whose writer has not been told."""
        with self.lock:
            return len(self._flying)

    def next_due(self) -> Instant:
        """When `advance` has something to do; FOREVER for never."""
        with self.lock:
            return self._schedule.next_due()

    def advance(self, now: Instant | None = None) -> None:
        """Do everything that is due at `now`, by default the clock's reading, in order of time."""
        with self.lock:
            self._run(self._now() if now is None else now)
        self._wake()

    def crash(self, worker: Worker, *, bytes_land: bool = True) -> None:
        """Kill a worker: it learns nothing more, and its memory is no longer written or read.

        Its own bytes in flight land when they would have, no later than `death_bound` from now; or
        never, with `bytes_land` false. What others WRITE to it goes to its successor, if there is
        one by then and the capabilities say so, or nowhere.
        """
        with self.lock:
            self._crash(worker, self._now(), bytes_land=bytes_land)
        self._wake()

    def partition(self, source: Worker, target: Worker, *, both: bool = True) -> None:
        """Let nothing pass from one worker's place to the other's, with `both` nor back.

        A transport that declares shared memory is not impressed.
        """
        with self.lock:
            self._cut(place(source), place(target), self._now(), both=both)

    def heal(self) -> None:
        """Mend every path; what was held up and is not too late goes on."""
        with self.lock:
            self._heal(tuple(sorted(self._cuts)), self._now())
            self._run(self._now())
        self._wake()

    # -- for transports

    def attach(self, port: Port) -> None:
        """A worker begins.

        Raises:
            TransportError: A worker of that engine and rank is still there.
        """
        with self.lock:
            for other in self._ports:
                if place(other) == place(port.worker):
                    raise TransportError(
                        f"{place(other)} is still there as incarnation {other.incarnation}: "
                        "close its transport or crash it first"
                    )
            self._ports[port.worker] = port

    def detach(self, port: Port, timeout_s: float) -> bool:
        """A worker ends; whether its WRITEs had ended. Waits for them in real time only."""
        until = time.monotonic() + timeout_s
        with self._changed:
            if self._ports.get(port.worker) is port:
                del self._ports[port.worker]
            port.is_open = False
            while port.open_writes and self._timer is not None and not port.crashed:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            for flying in self._flying.values():
                if flying.port is port:
                    flying.save_source()
            return port.crashed or not port.open_writes

    def look(self, port: Port, active: bool) -> None:
        """Begin or stop to tell a worker of its arrivals."""
        with self.lock:
            if port.look(active):
                self._rung.append(port)
        self._wake()

    def post(self, port: Port, write: Write) -> None:
        """Order a WRITE of `port`'s worker; a dead worker's is forgotten."""
        with self.lock:
            port.open_writes += 1
            self._order(port, write, self._now())
            self._run(self._now())
        self._wake()

    # -- posting

    def _order(self, port: Port, write: Write, now: Instant) -> None:
        if port.crashed:
            return
        if not port.is_open:
            self._refuse(port, write, WriteOutcome.FAILED, "the transport is closed", now)
            return
        if write.ready is not None:
            try:
                ready = write.ready()
            except Exception as error:  # noqa: BLE001 - the caller's code; it harms its WRITE only
                self._refuse(port, write, WriteOutcome.FAILED, f"ready() raised {error!r}", now)
                return
            if not ready:
                self._wait_for_source(port, write, now)
                return
        cause = self._obstacle(port, write)
        if cause:
            self._refuse(port, write, WriteOutcome.FAILED, cause, now)
        elif not self._allows(port, write):
            self._refuse(port, write, WriteOutcome.REFUSED, "the permit does not last", now)
        else:
            self._post(port, write, now)

    def _wait_for_source(self, port: Port, write: Write, now: Instant) -> None:
        """Ask again later, as long as there is a permit: a source may never become ready."""
        if self._allows(port, write):
            again = Instant(now + READY_INTERVAL)
            self._schedule.add(again, partial(self._order, port, write))
        else:
            self._refuse(port, write, WriteOutcome.REFUSED, "the permit does not last", now)

    def _allows(self, port: Port, write: Write) -> bool:
        return write.permit.allows(Instant(port.clock()), self.capabilities)

    def _obstacle(self, port: Port, write: Write) -> str:
        """Why this WRITE cannot be posted, or ""."""
        known = port.peers.get(write.peer)
        if known is None:
            return f"peer {write.peer} is not known: add_peer comes first"
        if known != self.name:
            return f"peer {write.peer} is not on this fabric"
        if FlightKey(port.worker, write.attempt, write.part) in self._flying:
            return f"part {write.part} is in flight already (R10)"
        cause = problem(write)
        if cause:
            return cause
        target = self._ports.get(write.peer)
        for side, end, segments in (
            ("source", port, write.source),
            ("destination", target, write.destination),
        ):
            for address, length in segments.tolist():
                if end is not None and length and not end.covers(address, length):
                    return f"{side} {address:#x} + {length} is not registered"
        return ""

    def _refuse(
        self, port: Port, write: Write, outcome: WriteOutcome, cause: str, now: Instant
    ) -> None:
        self._history.append(Ended(now, port.worker, write.attempt, write.part, outcome))
        self._tell(port, Completion(write.attempt, write.part, outcome, 0, cause))

    def _post(self, port: Port, write: Write, now: Instant) -> None:
        pieces = split(write, self._pieces)
        self._chance, fate = decide(self._plan, self._chance, len(pieces), self.capabilities, now)
        if fate.refused:
            self._refuse(port, write, WriteOutcome.REFUSED, "the permit does not last", now)
            return
        key = FlightKey(port.worker, write.attempt, write.part)
        flight = post(key, write.peer, tuple(range(len(pieces))), now, self.capabilities)
        landing = {step.index for _, step in fate.steps if isinstance(step, LandStep)}
        for index in range(len(pieces)):
            if index not in landing:
                flight = drop(flight, index)
        flying = Flying(port, write, flight, pieces, fate)
        self._flying[key] = flying
        self._history.append(
            Posted(now, port.worker, write.peer, write.attempt, write.part, write.length_bytes)
        )
        for due, step in fate.steps:
            self._schedule.add(due, partial(self._step, flying, step))
        if flight.complete:
            self._announce(flying, now)

    # -- steps

    def _step(self, flying: Flying, step: Step, now: Instant) -> None:
        match step:
            case LandStep():
                self._land(flying, step, now)
            case EndStep():
                self._end(flying, step, now)
            case CrashStep():
                self._crash(flying.port.worker, now, bytes_land=True)
            case CutStep():
                source, target = place(flying.port.worker), place(flying.write.peer)
                self._cut(source, target, now, both=step.both)
                if step.lasts:
                    paths = (
                        ((source, target), (target, source)) if step.both else ((source, target),)
                    )
                    self._schedule.add(Instant(now + step.lasts), lambda at: self._heal(paths, at))
            case _:
                assert_never(step)

    def _land(self, flying: Flying, step: LandStep, now: Instant) -> None:
        flight = flying.flight
        if step.index not in flight.pending:
            return
        if now > flight.latest:
            flying.lose(step.index, Outcome.FAILED, "the write bound passed")
        elif self._is_cut(flying, back=False):
            self._hold(flying, step, now, back=False)
            return
        else:
            into: Worker | None = flight.target
            if into not in self._ports:
                into = standing(flight.target, tuple(sorted(self._ports)), self.capabilities)
            runs = flying.pieces[step.index]
            port = None if into is None else self._ports[into]
            if port is None or not all(port.covers(to, length) for _, to, length in runs):
                flying.lose(step.index, Outcome.UNKNOWN, "the target is gone")
            else:
                flying.land(step.index, now)
                self._history.extend(
                    Landed(now, flight.key.attempt, flight.key.part, port.worker, to, length)
                    for _, to, length in runs
                )
                if flying.flight.complete:
                    self._announce(flying, now)
        self._forget_if_over(flying)

    def _end(self, flying: Flying, step: EndStep, now: Instant) -> None:
        outcome, cause = step.outcome, "" if step.outcome is Outcome.DONE else "injected fault"
        strong = self.capabilities.done_means_visible
        if flying.flight.outcome is not None or flying.port.crashed:
            return
        if outcome is Outcome.DONE:
            if flying.flight.torn:
                outcome, cause = flying.lost
            elif strong and (flying.flight.pending or self._is_cut(flying, back=True)):
                self._hold(flying, step, now, back=True)
                return
        self._close(flying, outcome, cause, now)

    def _close(self, flying: Flying, outcome: Outcome, cause: str, now: Instant) -> None:
        completion = flying.end(outcome, cause, self.capabilities)
        key = flying.flight.key
        ended = Ended(now, flying.port.worker, key.attempt, key.part, completion.outcome)
        self._history.append(ended)
        self._forget_if_over(flying)
        self._tell(flying.port, completion)

    def _forget_if_over(self, flying: Flying) -> None:
        flight = flying.flight
        if flight.over or (flying.port.crashed and not flight.pending):
            self._flying.pop(flight.key, None)
            if flying.held and not flight.complete:
                self._held = [held for held in self._held if held[1] is not flying]

    def _announce(self, flying: Flying, now: Instant) -> None:
        for delay in flying.fate.arrivals:
            self._schedule.add(Instant(now + delay), partial(self._notice, flying))

    def _notice(self, flying: Flying, now: Instant) -> None:
        """An arrival reaches its target; a strong transport's writer sends it once it knows."""
        write = flying.write
        if self.capabilities.done_means_visible:
            if flying.port.crashed:
                return
            if self._is_cut(flying, back=False):
                path = place(flying.port.worker), place(write.peer)
                self._held.append((path, flying, partial(self._notice, flying)))
                return
        port = self._ports.get(write.peer)
        if port is not None:
            self._history.append(Noticed(now, write.attempt, write.part, write.peer))
            arrival = Arrival(write.attempt, write.part, write.arrival_token, write.length_bytes)
            if port.arrive(arrival):
                self._rung.append(port)

    # -- cut paths

    def _is_cut(self, flying: Flying, *, back: bool) -> bool:
        there = place(flying.port.worker), place(flying.write.peer)
        cut = there in self._cuts or (back and (there[1], there[0]) in self._cuts)
        return cut and not self.capabilities.shared_memory

    def _hold(self, flying: Flying, step: Step, now: Instant, *, back: bool) -> None:
        """Keep a step until its path is mended; report UNKNOWN if that takes too long."""
        there = place(flying.port.worker), place(flying.write.peer)
        path = there if not back or there in self._cuts else (there[1], there[0])
        flying.held += 1
        self._held.append((path, flying, partial(self._resume, flying, step)))
        if not flying.is_timed:
            flying.is_timed = True
            late = Instant(max(now, flying.flight.posted + self._timeout))
            self._schedule.add(late, partial(self._time_out, flying))
            if flying.flight.latest != FOREVER:
                expiry = Instant(flying.flight.latest + 1)
                self._schedule.add(expiry, partial(self._expire, flying))

    def _resume(self, flying: Flying, step: Step, now: Instant) -> None:
        flying.held -= 1
        self._step(flying, step, now)

    def _time_out(self, flying: Flying, now: Instant) -> None:
        flying.is_timed = False
        if flying.held and flying.flight.outcome is None and not flying.port.crashed:
            self._close(flying, Outcome.UNKNOWN, "no answer: the path is cut", now)

    def _expire(self, flying: Flying, now: Instant) -> None:
        """Nothing lands any more; a writer that was not told is told that."""
        for index in flying.flight.pending:
            flying.lose(index, Outcome.FAILED, "the write bound passed")
        if flying.flight.outcome is None and flying.held and not flying.port.crashed:
            self._close(flying, Outcome.UNKNOWN, "no answer: the path is cut", now)
        self._forget_if_over(flying)

    def _cut(self, source: str, target: str, now: Instant, *, both: bool) -> None:
        for path in ((source, target), (target, source))[: 2 if both else 1]:
            if path not in self._cuts:
                self._cuts.add(path)
                self._history.append(PathCut(now, *path))

    def _heal(self, paths: tuple[tuple[str, str], ...], now: Instant) -> None:
        for path in paths:
            if path in self._cuts:
                self._cuts.remove(path)
                self._history.append(PathHealed(now, *path))
        going, self._held = (
            [held for held in self._held if held[0] not in self._cuts],
            [held for held in self._held if held[0] in self._cuts],
        )
        for _, _, step in going:
            self._schedule.add(now, step)

    # -- death, time and news

    def _crash(self, worker: Worker, now: Instant, *, bytes_land: bool) -> None:
        port = self._ports.pop(worker, None)
        if port is None:
            return
        port.die()
        self._history.append(Crashed(now, worker))
        bound = self.capabilities.death_bound
        for flying in tuple(self._flying.values()):
            if flying.port is port:
                flying.outlive_writer(FOREVER if bound is None else Instant(now + bound))
                if not bytes_land:
                    flying.flight = drop(flying.flight)
                self._forget_if_over(flying)

    def _tell(self, port: Port, completion: Completion) -> None:
        port.complete(completion)
        self._rung.append(port)
        self._changed.notify_all()

    def _now(self) -> Instant:
        return Instant(self._clock())

    def _wait_s(self) -> float | None:
        due = self._schedule.next_due()
        return None if due == FOREVER else (due - self._now()) / 1e9

    def _run(self, now: Instant) -> None:
        """What is due at `now`; in real time also what becomes due meanwhile."""
        while (taken := self._schedule.take(now)) is not None:
            due, step = taken
            now = now if self._timer is None else self._now()
            step(due if self._timer is None else now)

    def _wake(self) -> None:
        """Wake whoever has news, without the lock."""
        with self.lock:
            rung, self._rung = self._rung, []
            if self._timer is not None:
                self._timer.nudge()
        for port in dict.fromkeys(rung):
            if port.is_open:
                port.wake()


@cache
def default_fabric() -> MemoryFabric:
    """The fabric that all transports of this process share unless told otherwise."""
    return MemoryFabric()
