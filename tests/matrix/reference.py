"""Faults of reference engines over real NIXL, each engine a process: ``python -m tests.matrix``.

Whatever happens to whomever at whichever moment: the client has its answer, and the right one where
a healthy path exists; every block comes back; the pair works again. A router's part is played here:
when a decode engine is lost, its leg goes out again to another one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from attrs import define, evolve, field
from tests.lanes import LANES
from tests.runtime.nixl_node import BLOCKS, NixlNode

from pushkv.core.effects import ProducerAddress
from pushkv.core.ids import seconds
from pushkv.testing.reference_cache import KV_BYTES, ReferenceCache, generate
from pushkv.testing.reference_engine import Role

from .accounts import books
from .detour import Detour
from .fleet import Answer
from .rows import Row

__all__ = [
    "ACTIONS",
    "LOST",
    "MOMENTS",
    "REFERENCE_FAULTS",
    "Fault",
    "Run",
    "Stage",
    "one_run",
    "restored",
]

LAYERS = 8
TOKENS = 4
ANSWER_S = 20.0
"""Within which every client must have an answer."""
BACK_S = 15.0
"""Within which every block must be back."""
START_S = 30.0
"""Within which an engine must have found its port free."""
DEATH_BOUND_S = 0.5
PATIENT = {
    "hold": seconds(3),
    "expected": seconds(2),
    "waiting": seconds(3),
    "transfer": seconds(5),
}


@define
class Stage:
    """Warm engines of one lane; those that a fault has ended are started when they are needed.

    Attributes:
        special: What engines of these names are started with beside the usual: arguments of
            `NixlNode`.
        kept: Whatever is to be closed with the stage.
    """

    lane: str
    nodes: dict[str, NixlNode] = field(factory=dict)
    addresses: dict[str, ProducerAddress] = field(factory=dict)
    special: dict[str, Callable[[Stage], dict[str, Any]]] = field(factory=dict)
    kept: ExitStack = field(factory=ExitStack)
    detours: dict[tuple[str, int], Detour] = field(factory=dict)
    count: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes.values():
            node.kill()
        self.kept.close()

    def node(self, name: str) -> NixlNode:
        """The engine of that name, started on the port it had before."""
        if name not in self.nodes:
            special = self.special.get(name)
            more = {} if special is None else special(self)
            options = {**LANES[self.lane], "death_bound_s": DEATH_BOUND_S}
            options |= more.pop("options", {})
            changes = {**PATIENT, **more.pop("changes", {})}
            port = self.addresses[name].port if name in self.addresses else 0
            self.nodes[name] = _started(
                lambda: NixlNode(name, port, changes, LAYERS, options, **more).ready()
            )
            self.addresses[name] = self.nodes[name].address
        return self.nodes[name]

    def lose(self, name: str) -> None:
        """``kill -9``, and wait for its end."""
        self.nodes.pop(name).kill()

    def detour(self, name: str, buffer_bytes: int = 0) -> Detour:
        """A proxy before the engine of that name, with sockets that keep about so much."""
        key = name, buffer_bytes
        if key not in self.detours:
            self.node(name)
            detour = Detour(self.address(name), buffer_bytes)
            self.detours[key] = self.kept.enter_context(detour)
        return self.detours[key]

    def transfer(self) -> tuple[str, tuple[int, ...]]:
        """A new name and a new prompt."""
        self.count += 1
        chooser = random.Random(self.count)
        return f"t{self.count}", tuple(chooser.randrange(50_000) for _ in range(600))

    def address(self, name: str) -> ProducerAddress:
        """Where an engine is, or was."""
        return self.addresses[name]


def _started(start: Callable[[], NixlNode]) -> NixlNode:
    """The port of one that died may be another's for a moment: any process may dial from it."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return start()
        except EOFError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


def right(
    prompt: tuple[int, ...], tokens: int = TOKENS, kv_bytes: int = KV_BYTES
) -> tuple[int, ...]:
    """What a lone engine generates."""
    return generate(ReferenceCache(LAYERS, BLOCKS, kv_bytes=kv_bytes), prompt, tokens)


# -- the parts of a run


@define
class Run:
    """One request of a client, and what is done to the engines that serve it.

    Attributes:
        producer: The engine of its prefill leg, unless another one is named.
        decoder: The same of its decode leg.
        via: Where the consumer dials instead of the producer.
        since: When the decode leg of each request was sent first, in seconds (monotonic).
        delivered: How many of the answers came from KV that was transferred.
        problems: What else is wrong with the engines now.
        tokens: How many each client asks for.
        kv_bytes: What the engines keep for each token and layer.
        missed: How many requests came before this one that were over before the fault could come.
    """

    stage: Stage
    producer: str = "P"
    decoder: str = "D"
    via: ProducerAddress | None = None
    name: str = ""
    prompt: tuple[int, ...] = ()
    answers: list[tuple[tuple[int, ...], Answer]] = field(factory=list)
    since: dict[str, float] = field(factory=dict)
    delivered: int = 0
    problems: list[str] = field(factory=list)
    tokens: int = TOKENS
    kv_bytes: int = KV_BYTES
    missed: int = 0

    def __attrs_post_init__(self) -> None:
        for each in (self.producer, self.decoder):
            self.stage.node(each)
        self.name, self.prompt = self.stage.transfer()

    def consume(self, decoder: str = "", producer: str = "") -> None:
        """Send the decode leg."""
        self.since.setdefault(self.name, time.monotonic())
        address = self.via or self.stage.address(producer or self.producer)
        node = self.stage.node(decoder or self.decoder)
        node.call("submit", self.name, self.prompt, Role.CONSUME, self.tokens, address)

    def produce(self, producer: str = "") -> None:
        """Send the prefill leg."""
        node = self.stage.node(producer or self.producer)
        node.call("submit", self.name, self.prompt, Role.PRODUCE)

    def result(self, decoder: str = "") -> None:
        """Wait for the client's answer."""
        try:
            generation = self.stage.nodes[decoder or self.decoder].call("result", self.name)
            answer = Answer((generation.tokens,))
            self.delivered += not generation.prefilled
        except (AssertionError, EOFError, OSError, KeyError) as error:
            answer = Answer(error=repr(error)[:200])
        except TimeoutError:
            answer = Answer()
        waited_s = time.monotonic() - self.since[self.name]
        in_time = answer if waited_s <= ANSWER_S else Answer()
        answer = evolve(in_time, after_s=waited_s)
        self.answers.append((self.prompt, answer))

    def is_right(self, prompt: tuple[int, ...], answer: Answer) -> bool:
        """Whether a lone engine would have said the same."""
        return answer.tokens == (right(prompt, self.tokens, self.kv_bytes),)

    def must(self, holds: object, problem: str) -> None:
        """Without this the run shows nothing, or something is wrong."""
        if not holds:
            self.problems.append(problem)

    def end(self, victim: str) -> None:
        """An engine was told to shut down: when it has, its accounts are looked at."""
        self.problems += books(victim, self.stage.nodes[victim])
        self.stage.lose(victim)

    def bring_to(self, moment: str, delay_s: float) -> None:
        """Let the request come as far as `moment`."""
        if moment == "before":
            return
        self.consume()
        if moment == "waiting":
            time.sleep(0.05 + delay_s)
            return
        self.produce()
        if moment == "after":
            self.result()
        else:
            time.sleep(delay_s)


# -- what may happen to an engine


def killed(run: Run, victim: str) -> None:
    """``kill -9``."""
    run.stage.lose(victim)


def restarted(run: Run, victim: str) -> None:
    """``kill -9``, and a successor on the same port at once."""
    run.stage.lose(victim)
    run.stage.node(victim)


def paused(run: Run, victim: str) -> None:
    """Stopped for longer than a permit lasts, then let go on."""
    run.stage.nodes[victim].pause()
    time.sleep(1.2)
    run.stage.nodes[victim].resume()


def ended(run: Run, victim: str) -> None:
    """Shut down in order."""
    run.stage.nodes[victim].call("stop", 5.0)
    run.end(victim)


def cancelled(run: Run, victim: str) -> None:
    """That end's client, or its router, gives the request up."""
    run.stage.nodes[victim].call("cancel", run.name)


ACTIONS: dict[str, Callable[[Run, str], None]] = {
    each.__name__: each for each in (killed, restarted, paused, ended, cancelled)
}
MOMENTS = ("before", "waiting", "at a random moment", "after")
LOST = ("killed", "restarted", "ended")


def at_moment(action: str, victim: str, moment: str) -> Callable[[Stage, float], Run]:
    """One request, to one end of which something happens; its router does what routers do."""

    def fault(stage: Stage, delay_s: float) -> Run:
        run = Run(stage)
        run.bring_to(moment, delay_s)
        ACTIONS[action](run, victim)
        if moment == "after":
            return run
        if moment == "before":
            run.consume()
        if moment in ("before", "waiting") and "P" in stage.nodes:
            # The leg of a router that waits in a queue meanwhile.
            with suppress(AssertionError):
                run.produce()
        if action == "cancelled" and victim == "D" and moment != "before":
            return run  # nobody waits for an answer
        if victim == "D" and action in LOST and moment != "before":
            run.consume("E")  # the router turns to another decode engine
            run.result("E")
        else:
            run.result()
        return run

    return fault


def twice_at_once(stage: Stage, delay_s: float) -> Run:
    """The same request comes to two decode engines at once."""
    run = Run(stage)
    for decoder in ("D", "E"):
        run.consume(decoder)
    run.produce()
    for decoder in ("D", "E"):
        run.result(decoder)
    return run


def another_prompt(stage: Stage, delay_s: float) -> Run:
    """Two prompts come under one name."""
    run = Run(stage)
    mine = run.prompt
    run.consume()
    _, run.prompt = stage.transfer()
    run.produce()
    run.prompt = mine
    run.result()
    return run


def another_prefiller(stage: Stage, delay_s: float) -> Run:
    """The prefill engine is lost, and both legs go out again under a new name to another one."""
    run = Run(stage)
    stage.node("Q")
    run.bring_to("at a random moment", delay_s)
    killed(run, "P")
    run.stage.nodes["D"].call("cancel", run.name)
    run.name, run.prompt = stage.transfer()
    run.consume(producer="Q")
    run.produce("Q")
    run.result()
    return run


def too_late(stage: Stage, delay_s: float) -> Run:
    """Decode comes when the hold time of the finished prefill is over."""
    run = Run(stage)
    run.produce()
    time.sleep(4)
    run.consume()
    run.result()
    return run


def storm(stage: Stage, delay_s: float) -> Run:
    """Sixty requests, which would fill the cache many times over, are given up at any moment."""
    run = Run(stage)
    for _ in range(60):
        run.name, run.prompt = stage.transfer()
        run.consume()
        run.produce()
        time.sleep(delay_s / 10)
        stage.nodes["D"].call("cancel", run.name)
        stage.nodes["P"].call("cancel", run.name)
    run.name, run.prompt = stage.transfer()
    run.consume()
    run.produce()
    run.result()
    return run


Fault = Callable[[Stage, float], Run]
"""Does it, with a delay in seconds that is another one in each run."""

REFERENCE_FAULTS: dict[str, Fault] = {
    f"{victim} {action}, {moment}": at_moment(action, victim, moment)
    for action in ACTIONS
    for victim in ("P", "D")
    for moment in MOMENTS
    if (action, moment) not in (("cancelled", "before"), ("cancelled", "after"))
} | {
    "one request at two decode engines": twice_at_once,
    "two prompts under one name": another_prompt,
    "retried at another prefill engine": another_prefiller,
    "decode after the hold time": too_late,
    "abort storm": storm,
}


def one_run(
    stage: Stage, fault: str, seed: int, faults: Mapping[str, Fault] = REFERENCE_FAULTS
) -> Row:
    """One run of one fault; every engine is healthy before, and need not be after."""
    delay_s = random.Random(seed).uniform(0, 0.15)
    run = faults[fault](stage, delay_s)
    fits = [run.is_right(prompt, answer) for prompt, answer in run.answers]
    wrong = [answer.tokens and not fit for (_, answer), fit in zip(run.answers, fits, strict=True)]
    left = {name: _left(node) for name, node in stage.nodes.items()}
    recovered = restored(run)
    run.problems += [each for name, node in stage.nodes.items() for each in books(name, node)]
    healthy = recovered and not run.problems
    leaked = sum(left.values())
    if leaked or not healthy:
        for name in tuple(stage.nodes):
            stage.lose(name)
    return Row(
        fault,
        f"reference, {stage.lane}",
        runs=1,
        clients=len(fits),
        answered=sum(answer.came for _, answer in run.answers),
        right=sum(fits),
        wrong=sum(map(bool, wrong)),
        leaked_blocks=leaked,
        recovered=int(healthy),
        missed=run.missed,
        slowest_s=round(max((each.after_s for _, each in run.answers), default=0.0), 1),
        notes=tuple(
            dict.fromkeys(
                [answer.error for _, answer in run.answers if answer.error]
                + [f"{name}: {count} blocks lost" for name, count in left.items() if count]
                + run.problems
            )
        ),
    )


def restored(run: Run) -> bool:
    """Whether a transfer between the same engines is delivered again before long."""
    deadline = time.monotonic() + BACK_S
    while True:
        probe = Run(run.stage, run.producer, run.decoder, run.via, kv_bytes=run.kv_bytes)
        probe.consume()
        probe.produce()
        probe.result()
        ((prompt, answer),) = probe.answers
        if not probe.is_right(prompt, answer):
            return False
        if probe.delivered or time.monotonic() > deadline:
            return bool(probe.delivered)


def _left(node: NixlNode) -> int:
    """Blocks of an engine that do not come back in time."""
    deadline = time.monotonic() + BACK_S
    while True:
        missing = BLOCKS - int(node.call("free"))
        if missing == 0 or time.monotonic() > deadline:
            return missing
        time.sleep(0.05)
