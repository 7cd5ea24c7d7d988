"""One WRITE in flight: the model's flight, and the real bytes it moves."""

from __future__ import annotations

from attrs import evolve

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Instant
from pushkv.model.fates import Fate
from pushkv.model.flights import Flight, Outcome, drop, end, land
from pushkv.transport import Completion, Write, WriteOutcome

from .copying import Run, copy, snapshot
from .port import Port

__all__ = ["Flying"]


class Flying:
    """Belongs to its fabric, whose lock guards it.

    Bytes that may land after the writer was told that its source is free, after its death or after
    it closed are saved at that moment: a network card has them, and nobody's memory is read late.
    """

    def __init__(
        self,
        port: Port,
        write: Write,
        flight: Flight,
        pieces: tuple[tuple[Run, ...], ...],
        fate: Fate,
    ) -> None:
        self.port = port
        self.write = write
        self.flight: Flight = flight
        self.pieces = pieces
        self.fate = fate
        self.held = 0
        self.is_timed = False
        self.lost: tuple[Outcome, str] = (Outcome.UNKNOWN, "the target is gone")
        self._saved: dict[int, tuple[bytes, ...]] = {}

    def land(self, index: int, now: Instant) -> None:
        """Copy one piece."""
        self.flight = land(self.flight, index, now)
        copy(self.pieces[index], self._saved.pop(index, None))

    def lose(self, index: int, outcome: Outcome, cause: str) -> None:
        """One piece will never land; what the writer is to be told for it."""
        self.flight = drop(self.flight, index)
        self.lost = outcome, cause

    def save_source(self) -> None:
        """Keep what has not landed yet as it is now."""
        for index in self.flight.pending:
            if index not in self._saved:
                self._saved[index] = snapshot(self.pieces[index])

    def end(self, outcome: Outcome, cause: str, capabilities: Capabilities) -> Completion:
        """What the writer is told."""
        self.flight = end(self.flight, outcome, capabilities)
        busy = bool(outcome is Outcome.UNKNOWN and self.fate.source_busy and self.flight.pending)
        if not busy:
            self.save_source()
        key = self.flight.key
        length_bytes = self.write.length_bytes if outcome is Outcome.DONE else 0
        told = WriteOutcome(outcome.value)
        return Completion(key.attempt, key.part, told, length_bytes, cause, source_idle=not busy)

    def outlive_writer(self, latest: Instant) -> None:
        """The writer died; its bytes land no later than `latest`."""
        self.save_source()
        self.flight = evolve(self.flight, latest=min(self.flight.latest, latest))
