"""One WRITE between `post` and its report. Used by the agent's thread alone.

Every piece carries a notification of its own, and the receiver takes a part as arrived when it has
those of all its pieces. NIXL orders nothing between two WRITEs, so a notification on the last piece
would say nothing about the others; waiting for them before posting the last would cost a round
trip, and prove nothing where DONE does not mean visible (LIBFABRIC).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Instant
from pushkv.transport import Write, WriteOutcome

from ._codec import encode_notice
from ._library import Agent, NixlError
from ._outcomes import Phase, meaning
from ._peers import Peer, Peers
from ._pieces import Piece

__all__ = ["OpenWrite", "Step"]

_log = logging.getLogger("pushkv.nixl")


class Step(Enum):
    """What `OpenWrite.post_next` did."""

    POSTED = "posted"
    """A piece went out; there may be more."""
    NOT_READY = "not ready"
    """The source bytes do not exist yet: ask again."""
    STOPPED = "stopped"
    """No piece will be posted any more."""


class OpenWrite:
    """A WRITE, its pieces and the handles of those that are posted.

    Attributes:
        number: To report it by.
        outcome: The worst that is known so far; final once `over`.
        cause: What made it so.
    """

    def __init__(self, number: int, write: Write, peer: Peer, pieces: list[Piece]) -> None:
        self.number = number
        self.write = write
        self.peer = peer
        self.outcome = WriteOutcome.DONE
        self.cause = ""
        self._pieces = pieces
        self._next = 0
        self._handles: list[int] = []

    @property
    def posting(self) -> bool:
        """Whether pieces are left to post."""
        return self._next < len(self._pieces)

    @property
    def eager(self) -> bool:
        """Whether the next piece can go out at once, as far as is known without asking."""
        return self.write.ready is None and not self.peer.connecting

    @property
    def over(self) -> bool:
        """Whether nothing is left to post and every handle is over."""
        return not self.posting and not self._handles

    @property
    def handles(self) -> int:
        """Handles that are posted and not over."""
        return len(self._handles)

    def stop(self, outcome: WriteOutcome, cause: str) -> None:
        """Post no further piece. A WRITE that is posted in part is FAILED, whatever stopped it."""
        if outcome is WriteOutcome.REFUSED and self._next:
            outcome = WriteOutcome.FAILED
        self._next = len(self._pieces)
        worse = outcome is WriteOutcome.UNKNOWN and self.outcome is not WriteOutcome.UNKNOWN
        if worse or self.outcome is WriteOutcome.DONE:
            self.outcome, self.cause = outcome, cause

    def post_next(
        self,
        agent: Agent,
        peers: Peers,
        clock: Callable[[], int],
        capabilities: Capabilities,
        touched: set[int],
        before: Callable[[], None],
    ) -> Step:
        """Post one piece if it may be posted (R3, R5); blocks as long as NIXL takes to post it.

        `touched` gets the WRITE's number before its first post. `before` is called once all is
        ready for a post, and before the permit is asked for the last time.
        """
        permit = self.write.permit
        if not permit.allows(Instant(clock()), capabilities):
            self.stop(WriteOutcome.REFUSED, "the permit did not last")
            return Step.STOPPED
        if self.peer.connecting:
            return Step.NOT_READY
        if not self._ready():
            return Step.NOT_READY if self.posting else Step.STOPPED
        unusable = peers.usable(self.peer)
        if unusable:
            self.stop(WriteOutcome.FAILED, unusable)
            return Step.STOPPED
        try:
            notice = encode_notice(self.write, self._next, len(self._pieces))
            handle = agent.prepare(self.peer.agent, self._pieces[self._next], notice)
        except ValueError as error:
            self.stop(WriteOutcome.FAILED, str(error))
            return Step.STOPPED
        except NixlError as error:
            self._fail(Phase.PREPARE, error, peers)
            return Step.STOPPED
        before()
        checked = clock()
        if not permit.allows(Instant(checked), capabilities):
            self.stop(WriteOutcome.REFUSED, "the permit did not last")
            self._release(agent, handle)
            return Step.STOPPED
        self._next += 1
        touched.add(self.number)
        try:
            done = agent.post(handle)
        except NixlError as error:
            self._fail(Phase.POST, error, peers)
            self._release(agent, handle)
            return Step.STOPPED
        self._keep(agent, handle, done)
        bound = capabilities.write_bound
        if bound is not None and clock() > checked + bound:
            # The process was stopped, or the bound is wrong: bytes may land after the fence.
            self.stop(WriteOutcome.UNKNOWN, f"posting took longer than write_bound = {bound} ns")
        return Step.POSTED if self.posting else Step.STOPPED

    def check(self, agent: Agent, peers: Peers) -> bool:
        """Look at every posted handle; whether one of them ended."""
        ended = False
        for handle in tuple(self._handles):
            try:
                if not agent.check(handle):
                    continue
                self.peer.reached = True
            except NixlError as error:
                self._fail(Phase.CHECK, error, peers)
            ended = True
            self._handles.remove(handle)
            self.peer.handles -= 1
            self._release(agent, handle)
        return ended

    def _ready(self) -> bool:
        if self.write.ready is None:
            return True
        try:
            return self.write.ready()
        except Exception as error:  # noqa: BLE001 - it harms its own WRITE alone
            self.stop(WriteOutcome.FAILED, f"ready() raised {error!r}")
            return False

    def _keep(self, agent: Agent, handle: int, done: bool) -> None:
        if done:
            self.peer.reached = True
            self._release(agent, handle)
        else:
            self._handles.append(handle)
            self.peer.handles += 1

    def _fail(self, phase: Phase, error: NixlError, peers: Peers) -> None:
        known = meaning(phase, error.kind)
        self.stop(known.outcome, f"{phase}: {error}")
        if known.peer_lost:
            peers.lose(self.peer)

    def _release(self, agent: Agent, handle: int) -> None:
        try:
            agent.release(handle)
        except NixlError as error:
            _log.warning("NIXL did not release a handle that was over: %s", error)
