"""A decode engine of a swarm: offers blocks, retries, recomputes, preempts, cancels, decodes."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from functools import partial

from attrs import define, field

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.events import Cancelled, Offered, Proven, Readmitted, TakenBack
from pushkv.core.messages import Reason

from .engine import MILLISECOND, Engine, Rank, Request, Surroundings
from .pool import BLOCK_TOKENS, Holder, ViolationError

__all__ = ["Decode"]


class At(StrEnum):
    """Where a request is in its engine."""

    WAITING = "waits for blocks"
    OFFERED = "waits for its KV"
    RETRYING = "waits for its retry"
    PREEMPTED = "is preempted"
    DECODING = "decodes"
    OVER = "is over"


@define(eq=False)
class _Seat:
    request: Request
    at: At = At.WAITING
    is_local: bool = False
    attempt: int = -1
    failures: int = 0


@define(eq=False)
class Book:
    """What is known of one attempt: per rank its outcome, then its release, once each (I3)."""

    seat: _Seat
    holder: Holder
    exposed: dict[int, int]
    began: int
    outcome: dict[int, Delivered | NotDelivered] = field(factory=dict)
    released: set[int] = field(factory=set)
    retries: set[int] = field(factory=set)
    cancelled: set[int] = field(factory=set)
    is_void: bool = False
    is_handed_over: bool = False


class Decode(Engine):
    """Its ranks all read every producer rank's WRITEs; an attempt is one at all of them (R12)."""

    def __init__(self, around: Surroundings, name: str, ranks: int, seed: str) -> None:
        super().__init__(around, name, ranks, seed)
        self.seats: dict[str, _Seat] = {}
        self.books: dict[tuple[str, int], Book] = {}
        self.live: int = 0
        """Attempts that wait for an outcome at some rank."""
        self._queue: deque[_Seat] = deque()
        self._attempt = 0
        self._called_off: set[tuple[str, int, int]] = set()

    def begin(self) -> None:
        """A new life knows nothing of the one before."""
        if not self.is_up:
            self.seats, self.books, self._called_off, self._attempt = {}, {}, set(), 0
            self._queue.clear()
        super().begin()

    def admit(self, request: Request) -> None:
        """A request takes its place in the queue for blocks."""
        seat = self.seats[request.transfer] = _Seat(request)
        for name, call in (("cancel", self._cancel), ("preempt", self._preempt)):
            if name in request.trouble:
                self.later(request.trouble[name], partial(call, seat))
        self._enqueue(seat)

    def _enqueue(self, seat: _Seat) -> None:
        seat.at = At.WAITING
        self._queue.append(seat)
        self._fill()

    def _fill(self) -> None:
        """Whoever is first gets blocks, on all ranks or on none."""
        while self._queue and self.is_ready:
            seat = self._queue[0]
            if seat.at is not At.WAITING:
                self._queue.popleft()
                continue
            request = seat.request
            count = -(-(request.tokens - request.start) // BLOCK_TOKENS)
            if any(len(rank.pool.free) < count for rank in self.ranks):
                return
            self._queue.popleft()
            if seat.is_local:
                self._compute(seat, count)
            else:
                self._offer(seat, count)

    # -- attempts

    def _offer(self, seat: _Seat, count: int) -> None:
        request = seat.request
        older = self.books.get((request.transfer, seat.attempt))
        if older is not None:
            self._call_off(older)
        seat.attempt, self._attempt = self._attempt, self._attempt + 1
        seat.at = At.OFFERED
        holder = Holder("attempt", request.transfer, seat.attempt)
        exposed = {rank.number: self._exposed(rank) for rank in self.ranks}
        book = Book(seat, holder, exposed, self.around.agenda.now())
        self.live += 1
        self.around.offered()
        self.books[request.transfer, seat.attempt] = book
        for rank in self.ranks:
            blocks = rank.pool.take(count, holder)
            assert blocks is not None, "looked at before"
            offer = Offered(
                transfer=request.transfer,
                attempt=seat.attempt,
                producers=request.producers,
                blocks=(blocks,),
                start=request.start,
                end=request.tokens,
                prompt_digest=request.digest,
                consumer_ranks=request.consumer_ranks,
                failures=seat.failures,
            )
            rank.submit(offer)

    def _exposed(self, rank: Rank) -> int:
        """Blocks of attempts that this rank has not released."""
        return sum(
            len(rank.pool.held.get(book.holder, ()))
            for book in self.books.values()
            if rank.number not in book.released
        )

    def hear(self, rank: Rank, report: Report) -> None:
        """A report about one attempt at one rank."""
        attempt = -1 if isinstance(report, SourceReleased | SourceYielded) else report.attempt
        book = self.books.get((report.transfer, attempt))
        key = (report.transfer, attempt, rank.number)
        if isinstance(report, RetryDue) and key in self._called_off:
            return
        if book is None:
            raise ViolationError("I3", f"{rank.host}: {report} after both reports")
        match report:
            case Delivered() | NotDelivered():
                self._told(rank, book, report)
            case BlocksReleased():
                if rank.number in book.released or rank.number not in book.outcome:
                    raise ViolationError("I3", f"{rank.host}: {report} too early, or twice")
                book.released.add(rank.number)
                self._give_back(book)
            case RetryDue():
                self._retry_due(rank, book, report)
            case _:
                raise ViolationError("I3", f"{rank.host}: {report} to an engine that decodes")
        self._forget(book)
        self._fill()

    def _told(self, rank: Rank, book: Book, report: Delivered | NotDelivered) -> None:
        if rank.number in book.outcome:
            raise ViolationError("I3", f"{rank.host}: {report} after {book.outcome[rank.number]}")
        book.outcome[rank.number] = report
        request = book.seat.request
        if isinstance(report, Delivered):
            if request.digest != self.digest_of(request):
                raise ViolationError("I2", f"{rank.host}: {report}, and it was another prompt")
            rank.pool.verify(book.holder, request.serial, request.start // BLOCK_TOKENS, "I2")
        else:
            self._check_reason(rank, book, report)
            if report.retry and rank.number not in book.cancelled:
                book.retries.add(rank.number)
        if len(book.outcome) == len(self.ranks):
            self._conclude(book)
        elif isinstance(report, NotDelivered) and not book.is_void:
            for other in self.ranks:
                if other.number not in book.outcome:
                    # Should it have failed by itself already, its retry is off with this.
                    book.cancelled.add(other.number)
                    self._called_off.add((report.transfer, report.attempt, other.number))
                    other.submit(Cancelled(report.transfer, Reason.SIBLING))

    def _check_reason(self, rank: Rank, book: Book, report: NotDelivered) -> None:
        """I4, I7: a budget is said to be spent only where it is."""
        own = len(rank.pool.held.get(book.holder, ()))
        most = self.around.weather.policy.exposed_blocks
        if report.reason is Reason.BUDGET and book.exposed[rank.number] + own <= most:
            raise ViolationError(
                "I4", f"{rank.host}: {report} at {book.exposed[rank.number]} + {own} of {most}"
            )

    def _conclude(self, book: Book) -> None:
        """All ranks have an outcome: the attempt has one."""
        self.live -= 1
        seat = book.seat
        current = not book.is_void and seat.at is At.OFFERED
        if current and all(isinstance(each, Delivered) for each in book.outcome.values()):
            self._deliver(book)
            return
        book.is_void = True
        self._give_back(book)
        if seat.at is At.PREEMPTED and seat.attempt == book.holder.attempt:
            self.later(self.random.randrange(500 * MILLISECOND), partial(self._readmit, book))
        elif current:
            seat.failures += 1
            if self.is_stopping:
                self._over(seat, "lost")
            elif book.retries:
                seat.at = At.RETRYING
            else:
                seat.is_local = True
                self._enqueue(seat)

    def _retry_due(self, rank: Rank, book: Book, report: RetryDue) -> None:
        seat = book.seat
        if rank.number not in book.retries:
            raise ViolationError("I3", f"{rank.host}: {report}, and no retry was promised")
        book.retries.discard(rank.number)
        if seat.at is At.RETRYING and seat.attempt == report.attempt:
            if self.is_stopping:
                self._over(seat, "lost")
            else:
                self._enqueue(seat)

    def _give_back(self, book: Book) -> None:
        """Blocks of an attempt that failed, on each rank that has released them."""
        if book.is_void and not book.is_handed_over:
            for rank in self.ranks:
                if rank.number in book.released and book.holder in rank.pool.held:
                    rank.pool.give(book.holder)
                    self.around.counters["blocks given back"] += 1

    def _forget(self, book: Book) -> None:
        told = len(book.outcome) == len(book.released) == len(self.ranks)
        if told and not book.retries and book.seat.at is not At.PREEMPTED:
            self.books.pop((book.holder.transfer, book.holder.attempt), None)

    # -- decoding

    def _deliver(self, book: Book) -> None:
        seat = book.seat
        book.is_handed_over = True
        holder = Holder("decode", seat.request.transfer)
        for rank in self.ranks:
            rank.pool.hand_over(book.holder, holder)
        self._decode(seat, holder, "delivered")

    def _compute(self, seat: _Seat, count: int) -> None:
        """The prompt's KV is computed here, on other blocks."""
        request = seat.request
        holder = Holder("decode", request.transfer)
        for rank in self.ranks:
            rank.pool.take(count, holder)
            rank.pool.fill(holder, request.serial, request.start // BLOCK_TOKENS, 0, count)
        self._decode(seat, holder, "computed")

    def _decode(self, seat: _Seat, holder: Holder, outcome: str) -> None:
        seat.at = At.DECODING
        self.around.settle(seat.request, outcome)
        wait = self.random.randrange(30 * MILLISECOND)
        self.later(wait, partial(self._finish, seat, holder))

    def _finish(self, seat: _Seat, holder: Holder) -> None:
        if seat.at is not At.DECODING:
            return
        for rank in self.ranks:
            request = seat.request
            rank.pool.verify(holder, request.serial, request.start // BLOCK_TOKENS, "I1")
            rank.pool.give(holder)
        self._over(seat)
        self._fill()

    def _over(self, seat: _Seat, outcome: str | None = None) -> None:
        seat.at = At.OVER
        if self.seats.get(seat.request.transfer) is seat:
            del self.seats[seat.request.transfer]
        if outcome is not None and seat.request.outcome is None:
            self.around.settle(seat.request, outcome)

    # -- trouble

    def _cancel(self, seat: _Seat) -> None:
        """The client is gone."""
        at = seat.at
        if at in (At.OVER, At.DECODING):
            return
        if at is not At.WAITING or seat.attempt >= 0:
            for rank in self.ranks:
                rank.submit(Cancelled(seat.request.transfer))
        book = self.books.get((seat.request.transfer, seat.attempt))
        self._over(seat, "cancelled")
        if book is not None:
            self._void(book)

    def _void(self, book: Book) -> None:
        """Whatever comes, this attempt delivers nothing any more; a promised retry is off."""
        book.is_void = True
        self._call_off(book)
        self._give_back(book)
        self._forget(book)
        self._fill()

    def _call_off(self, book: Book) -> None:
        """A promised retry may still be said to be due, or not: nobody waits for it."""
        transfer, attempt = book.holder.transfer, book.holder.attempt
        self._called_off.update((transfer, attempt, rank) for rank in book.retries)
        book.retries.clear()

    def _preempt(self, seat: _Seat) -> None:
        """The engine wants the blocks for somebody else; the request waits to come back."""
        if seat.at is At.OFFERED and not self.is_stopping:
            seat.at = At.PREEMPTED
            self.books[seat.request.transfer, seat.attempt].is_void = True
            for rank in self.ranks:
                rank.submit(TakenBack(seat.request.transfer))

    def _readmit(self, book: Book) -> None:
        """Ranks that were preempted say when a new attempt is due; the others are not asked."""
        seat = book.seat
        if seat.at is not At.PREEMPTED:
            return
        seat.at = At.RETRYING
        for rank in self.ranks:
            told = book.outcome[rank.number]
            if isinstance(told, NotDelivered) and told.reason is Reason.PREEMPTED:
                book.retries.add(rank.number)
                rank.submit(Readmitted(seat.request.transfer))
        if not book.retries:
            self._enqueue(seat)
        self._forget(book)

    # -- proofs and ends

    def prove(self, patience: int, keep_one_in: int) -> None:
        """The operator has looked: nothing writes into attempts of long ago any more."""
        now = self.around.agenda.now()
        for book in list(self.books.values()):
            posted = self.around.last_post(book.holder.transfer)
            old = book.is_void and now - max(book.began, posted) > patience
            kept = keep_one_in and book.seat.request.serial % keep_one_in == 0
            if old and not kept and len(book.released) < len(self.ranks):
                for rank in self.ranks:
                    rank.submit(Proven(book.holder.transfer))

    def lose_all(self) -> None:
        """Every client hears that its connection is gone."""
        for seat in list(self.seats.values()):
            self._over(seat, "lost")
        self.books.clear()
        self.live = 0

    def check_told(self) -> None:
        """No attempt of a runtime that is over is without an outcome."""
        for book in self.books.values():
            if len(book.outcome) < len(self.ranks):
                raise ViolationError("I3", f"{self.name}: {book.holder} ends without an outcome")

    def held_back(self) -> list[str]:
        """Attempts whose blocks are not back, in words."""
        return [
            f"{self.name}: {book.holder} {book.seat.at}, outcome at ranks {sorted(book.outcome)}, "
            f"released at {sorted(book.released)}"
            for book in self.books.values()
        ]
