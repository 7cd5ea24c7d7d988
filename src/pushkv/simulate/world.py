"""A run: requests come, a router chooses engines, and what the design says happens.

Every request ends once, and at the end all blocks are back where they came from: `run` looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from pushkv.core.errors import ConfigurationError
from pushkv.core.policy import Policy

from .engine import Engine, Job
from .fabric import Fabric, Poster
from .handover import Direct, Handover, Told, Transfer
from .machines import Machines
from .requests import Request, Try, arrivals
from .settings import PUSHES, Design, Settings
from .timeline import Timeline, nanoseconds

__all__ = ["World"]

IDLE_NS = 600_000_000_000
"""Nothing ends for so long: whoever still waits, waits for ever."""
TOLD_EVERY = 20_000
"""Calls of the timeline between two words on how far it is."""


def _nothing(_ended: int) -> None:
    """Nobody wants to know how far it is."""


class World:
    """Engines, fabric, router and requests of one run.

    Raises:
        ConfigurationError: Faults of a design that cannot be simulated with faults.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        pushes = settings.design in PUSHES and settings.machines
        if settings.faults.deaths_hz and not pushes:
            raise ConfigurationError(
                "deaths_hz", settings.faults.deaths_hz, "0 unless real machines push"
            )
        self.timeline: Timeline = Timeline()
        self.requests: list[Request] = arrivals(settings, self.timeline.start)
        self.tries: dict[str, Try] = {}
        self.ended: int = 0
        self.lost_sources: set[str] = set()
        self.load: dict[str, int] = {}
        self._holding: dict[str, Engine] = {}
        self._random = Random(f"router {settings.seed}")  # noqa: S311
        monolithic = settings.design is Design.MONOLITHIC
        kinds = settings.deployment
        self.prefills: list[Engine] = self._engines(
            "p", kinds.prefill + (kinds.decode if monolithic else 0)
        )
        self.decodes: list[Engine] = (
            self.prefills if monolithic else self._engines("d", kinds.decode)
        )
        self.fabric: Fabric = Fabric(self.timeline, settings.link)
        self.engines: dict[str, Engine] = {
            each.name: each for each in (*self.prefills, *self.decodes)
        }
        self._posters = {name: Poster(self.timeline) for name in self.engines}
        self.handover: Handover = self._handover()

    def _engines(self, letter: str, number: int) -> list[Engine]:
        made = [Engine(f"{letter}{n}", self.settings.engine, self.timeline) for n in range(number)]
        self.load.update((each.name, 0) for each in made)
        return made

    def _handover(self) -> Handover:
        told = Told(self._delivered, self._not_delivered, self._source_free, self._blocks_free)
        parts = (self.timeline, self.fabric, self.settings.link, told, self._posters)
        if not self.settings.machines:
            return Direct(*parts)
        budget = int(self.settings.faults.budget_share * self.settings.engine.blocks)
        return Machines(*parts, Policy(exposed_blocks=max(1, budget)))

    # -- the run

    def run(self, progress: Callable[[int], None] = _nothing) -> bool:
        """Until all requests have ended and all blocks are back; False if it was interrupted.

        Args:
            progress: Called with how many requests have ended, now and then.
        """
        for request in self.requests:
            self.timeline.at(request.arrival, partial(self.dispatch, request))
        ended, at, told = -1, self.timeline.now, 0
        try:
            while not self.over():
                assert self.timeline.step(), self._stuck()
                if self.ended != ended:
                    ended, at = self.ended, self.timeline.now
                assert self.timeline.now - at < IDLE_NS, self._stuck()
                if self.timeline.happened - told >= TOLD_EVERY:
                    told = self.timeline.happened
                    progress(self.ended)
        except KeyboardInterrupt:
            return False
        return True

    def over(self) -> bool:
        """Whether every request has ended and no block is held."""
        if self.ended < len(self.requests):
            return False
        return not any(each.pool.held_blocks for each in self.engines.values())

    def _stuck(self) -> str:
        waiting = [each.number for each in self.requests if not each.ended]
        held = {each.name: each.pool.held_blocks for each in self.engines.values()}
        return f"requests {waiting[:9]} wait for ever; blocks held: {held}"

    # -- the router

    def _choose(self, engines: list[Engine]) -> Engine:
        looked_at = self.settings.deployment.looked_at
        some: Iterable[Engine] = engines
        if 0 < looked_at < len(engines):
            some = [engines[self._random.randrange(len(engines))] for _ in range(looked_at)]
        chosen = min(some, key=lambda each: self.load[each.name])
        self.load[chosen.name] += 1
        return chosen

    def dispatch(self, request: Request) -> None:
        """Send the first leg of a request, or both."""
        name = f"{request.number}.{request.tries}"
        request.tries += 1
        request.now = now = Try(request, name, self._choose(self.prefills))
        self.tries[name] = now
        if self.settings.design is Design.MONOLITHIC:
            now.decode = now.prefill
        elif self.settings.design is Design.PUSH_EARLY:
            self._second_leg(now)
        self._leg(now, lambda: self._prefill(now))

    def _leg(self, one: Try, call: Callable[[], None]) -> None:
        model = self.settings.engine
        takes = nanoseconds(model.leg_s + one.request.prompt * model.leg_token_s)
        self.timeline.after(takes, lambda: call() if one is one.request.now else None)

    def _second_leg(self, one: Try) -> None:
        one.decode = self._choose(self.decodes)
        prompt = one.request.prompt
        start = self._cached(prompt, self.settings.traffic.cached_decode)
        one.transfer = Transfer(one.name, one.prefill.name, one.decode.name, start, prompt)
        self._leg(one, lambda: self._decode(one))

    def _cached(self, prompt: int, share: float) -> int:
        """Cached tokens, in whole blocks; at least one token is not."""
        block = self.settings.engine.block_tokens
        return min(int(prompt * share), prompt - 1) // block * block

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.settings.engine.block_tokens)

    def end(self, request: Request) -> None:
        """Its client has all of it, or an error."""
        assert not request.ended, "a request ends once"
        request.ended_at = self.timeline.now
        self.ended += 1

    # -- prefill

    def _prefill(self, one: Try) -> None:
        request, monolithic = one.request, one.decode is one.prefill
        cached = self._cached(request.prompt, self.settings.traffic.cached_prefill)
        blocks: list[int] = []

        def admitted(given: tuple[int, ...], _held: int) -> int:
            blocks.extend(given)
            return 0

        if one.transfer is not None:
            self.handover.arrived(one.transfer)
        one.prefill.submit(
            Job(
                one.name,
                self._blocks(request.prompt + (request.output if monolithic else 0)),
                request.prompt,
                request.prompt - cached,
                request.output if monolithic else 0,
                remote=False,
                admitted=admitted,
                ended=lambda: self._decoded(one),
                computed=lambda: self._prefilled(one, tuple(blocks)),
                first=(lambda at: self._first(one, at)) if monolithic else None,
            )
        )

    def _prefilled(self, one: Try, blocks: tuple[int, ...]) -> None:
        one.prefilled_at = self.timeline.now
        if one.decode is one.prefill:
            return
        self.load[one.prefill.name] -= 1
        if self.settings.design is Design.PUSH_EARLY:
            assert one.transfer is not None, "both legs are sent at once"
            self.handover.computed(one.transfer, blocks)
            return
        later = nanoseconds(self.settings.link.proxy_s)
        self.timeline.after(later, lambda: self._answered(one, blocks))

    def _answered(self, one: Try, blocks: tuple[int, ...]) -> None:
        """The router has prefill's answer: only now it sends the decode leg."""
        if one is not one.request.now:
            return
        self._second_leg(one)
        if self.settings.design is Design.PUSH_LATE and one.transfer is not None:
            self.handover.arrived(one.transfer)
            self.handover.computed(one.transfer, blocks)

    # -- decode

    def _decode(self, one: Try) -> None:
        request, engine, transfer = one.request, one.decode, one.transfer
        assert engine is not None, "decode is chosen"
        assert transfer is not None, "and what it is to get"
        cached = transfer.start // self.settings.engine.block_tokens

        def admitted(blocks: tuple[int, ...], held: int) -> int:
            one.admitted_at = self.timeline.now
            if self.settings.design not in PUSHES:
                return self._read(one, transfer, held)
            self._holding[one.name] = engine
            self.handover.offered(transfer, blocks[: self._blocks(transfer.tokens)])
            return 0

        one.waits_at = self.timeline.now
        one.decode_job = Job(
            one.name,
            self._blocks(request.prompt + request.output) - cached,
            request.prompt,
            0,
            request.output,
            remote=True,
            admitted=admitted,
            ended=lambda: self._decoded(one),
            first=lambda at: self._first(one, at),
            may_admit=lambda: self._may_admit(transfer),
        )
        engine.submit(one.decode_job)

    def _may_admit(self, transfer: Transfer) -> bool:
        if self.settings.design not in PUSHES:
            return True
        return self.handover.may_offer(transfer.target, self._blocks(transfer.tokens))

    def _read(self, one: Try, transfer: Transfer, held: int) -> int:
        """Pull: prepare a READ, in the engine's loop or beside it, and wait for its bytes."""
        link = self.settings.link
        takes = nanoseconds(link.post_s(transfer.tokens))

        def read() -> None:
            later = nanoseconds(link.control_s)
            self.timeline.after(later, lambda: self._source_free(one.name))
            self._delivered(one.name)

        def posted() -> None:
            size = transfer.tokens * link.token_bytes
            self.fabric.start(transfer.source, transfer.target, size, read)

        if self.settings.design is Design.PULL_THREAD:
            self._posters[transfer.target].post(takes, posted)
            return 0
        self.timeline.after(held + takes, posted)
        return takes

    def _first(self, one: Try, at: int) -> None:
        one.request.first_at = at

    def _decoded(self, one: Try) -> None:
        engine = one.decode
        assert engine is not None, "decode is chosen"
        engine.pool.give_back(one.name)
        self.load[engine.name] -= 1
        self.end(one.request)

    # -- what the hand-over tells

    def _delivered(self, name: str) -> None:
        one = self.tries[name]
        if one is not one.request.now:
            return
        assert one.decode is not None, "KV came to decode"
        assert one.decode_job is not None, "for a job"
        one.delivered_at = self.timeline.now
        one.decode.ready(one.decode_job)

    def _source_free(self, name: str) -> None:
        if name in self.lost_sources:
            return
        engine = self.tries[name].prefill
        engine.pool.give_back(name)
        engine.wake()

    def _not_delivered(self, name: str) -> None:
        one = self.tries[name]
        if one is one.request.now:
            self.try_again(one)

    def _blocks_free(self, name: str) -> None:
        """Nothing can write there any more: of what was delivered the job still has the blocks."""
        engine = self._holding.pop(name)
        if self.tries[name].delivered_at < 0:
            engine.pool.give_back(name)
        engine.wake()

    def try_again(self, one: Try) -> None:
        """Its prefill engine is lost, or the hand-over is: go elsewhere, or fail.

        The decode engine is told at once. Its blocks follow when the machines say so.
        """
        request = one.request
        request.now = None
        if one.prefilled_at < 0:
            self.load[one.prefill.name] -= 1
        if one.decode is not None:
            self.load[one.decode.name] -= 1
            if one.decode_job is not None and not one.decode.withdraw(one.decode_job):
                assert one.transfer is not None, "the job has one"
                self.handover.cancelled(one.transfer)
        if request.tries > self.settings.faults.restarts_most:
            request.failed = True
            self.end(request)
        else:
            self.dispatch(request)
