"""Full steps per second of the core, beside three libraries of state machines.

    python bench/core_steps.py [--rounds 7] [--lives 4000] [--json FILE] [--profile]

A *full step* is what the runtime pays for an event: the row is looked up, its action computes the
new state and the effects, and the status it ended in is checked against the table. The life that is
measured is that of a registration: the link is there, REGISTERED, PROGRESS twice, COMPLETE.

Each library runs the same life: the same statuses and events, a callback per event that computes
the same two deadlines, keeps them, and returns what is to be sent. Each life is a machine of its
own, made outside the measured time. Rounds go round over all, and the clock is that of this
thread's CPU, so that what else the machine does hits nobody. Medians over rounds.

Bars: 500,000 full steps a second; 10 times python-statemachine; 3 times transitions. Automat is
reported. Needs requirements/bench.txt; a library that is not there is left out.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from pushkv.core import consumer_actions
from pushkv.core.capabilities import Capabilities
from pushkv.core.consumer import DELIVERED, Consumer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import LinkUp
from pushkv.core.ids import (
    AttemptId,
    Duration,
    EngineId,
    Epoch,
    Incarnation,
    Instant,
    Part,
    TransferId,
    Worker,
)
from pushkv.core.messages import Complete, Progress, Register, Registered
from pushkv.core.policy import Policy
from pushkv.core.table import Rules

EVENTS = ("link_up", "registered", "progress", "progress", "complete")
RESEND, WAITING = 1_000_000_000, 30_000_000_000
BARS = {"steps_per_s": 500_000, "over python-statemachine": 10, "over transitions": 3}
Runner = Callable[[int], float]
"""Runs so many lives and gives the CPU seconds that their events took."""


def timed(lives: list[Callable[[], object]]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    for live in lives:
        live()
    return time.thread_time() - began


class Core:
    """The consumer's table."""

    def __init__(self) -> None:
        policy = Policy()
        self.rules = Rules(policy, Capabilities("bench", done_means_visible=True))
        attempt = AttemptId(EngineId("d"), Incarnation(1), 0, 0, TransferId("t"), 1)
        register = Register(
            attempt=attempt,
            blocks=(tuple(range(16)),),
            start=0,
            end=2048,
            prompt_digest=b"prompt",
            layout_digest=b"layout",
            producer_ranks=(0,),
            consumer_ranks=(0,),
            arrival_token=7,
            deadline=Duration(policy.waiting),
        )
        self.state, _ = consumer_actions.offer(register, Instant(0), self.rules)
        self.events = (
            LinkUp(Epoch(1, 2), Worker(EngineId("p"), Incarnation(2), 0)),
            Registered(attempt),
            Progress(attempt, 512),
            Progress(attempt, 1024),
            Complete(attempt, (Part(0, 0, 2048),)),
        )

    def __call__(self, lives: int) -> float:
        """Runs so many lives."""
        step, rules, events = CONSUMER.step, self.rules, self.events
        began = time.thread_time()
        now = Instant(1)
        state: Consumer = self.state
        for _ in range(lives):
            state = self.state
            for event in events:
                state = step(state, event, now, rules).state
        took = time.thread_time() - began
        assert state.status is DELIVERED, state
        return took


class Data:
    """What the callbacks of the libraries compute: the deadlines, and what is to be sent."""

    def __init__(self) -> None:
        self.timer_at = self.deadline_at = 0
        self.sent: tuple[str, ...] = ()

    def renew(self, message: str) -> None:
        """As the actions of `link_up`, `registered` and `progress` do."""
        now = 1
        self.timer_at, self.deadline_at = now + RESEND, now + WAITING
        self.sent = (message,)

    def end(self) -> None:
        """As the action of `complete` does."""
        self.timer_at = self.deadline_at = 2**63 - 1
        self.sent = ("told", "freed", "received")


def python_statemachine() -> Runner:
    """python-statemachine, synchronous."""
    from statemachine import State, StateMachine

    class Machine(StateMachine):
        registering = State(initial=True)
        waiting = State()
        delivered = State(final=True)
        link_up = registering.to.itself(on="renewed")
        registered = registering.to(waiting, on="renewed")
        progress = waiting.to.itself(on="renewed")
        complete = waiting.to(delivered, on="ended")

        def __init__(self) -> None:
            self.data = Data()
            super().__init__()

        def renewed(self) -> None:
            self.data.renew("message")

        def ended(self) -> None:
            self.data.end()

    def run(lives: int) -> float:
        machines = [Machine() for _ in range(lives)]
        took = timed([getattr(machine, name) for machine in machines for name in EVENTS])
        assert all(machine.delivered.is_active for machine in machines)
        return took

    return run


def transitions() -> Runner:
    """transitions, its plain Machine, one for all models."""
    from transitions import Machine

    class Model(Data):
        state = "registering"

        def renewed(self) -> None:
            self.renew("message")

        def ended(self) -> None:
            self.end()

    machine = Machine(
        model=None,
        states=["registering", "waiting", "delivered"],
        initial="registering",
        auto_transitions=False,
        transitions=[
            ["link_up", "registering", "=", None, None, None, "renewed"],
            ["registered", "registering", "waiting", None, None, None, "renewed"],
            ["progress", "waiting", "=", None, None, None, "renewed"],
            ["complete", "waiting", "delivered", None, None, None, "ended"],
        ],
    )

    def run(lives: int) -> float:
        models = [Model() for _ in range(lives)]
        for model in models:
            machine.add_model(model)
        took = timed([getattr(model, name) for model in models for name in EVENTS])
        assert all(model.state == "delivered" for model in models)
        for model in models:
            machine.models.remove(model)
        return took

    return run


def automat() -> Runner:
    """Automat's MethodicalMachine."""
    from automat import MethodicalMachine

    class Life:
        machine = MethodicalMachine()

        def __init__(self) -> None:
            self.data = Data()

        @machine.state(initial=True)
        def registering(self) -> None:
            """Not registered."""

        @machine.state()
        def waiting(self) -> None:
            """Registered."""

        @machine.state(terminal=True)
        def delivered(self) -> None:
            """Over."""

        @machine.input()
        def link_up(self) -> None:
            """The link is there."""

        @machine.input()
        def registered(self) -> None:
            """REGISTERED came."""

        @machine.input()
        def progress(self) -> None:
            """PROGRESS came."""

        @machine.input()
        def complete(self) -> None:
            """COMPLETE came."""

        @machine.output()
        def renewed(self) -> None:
            """New deadlines."""
            self.data.renew("message")

        @machine.output()
        def ended(self) -> None:
            """No more deadlines."""
            self.data.end()

        registering.upon(link_up, enter=registering, outputs=[renewed])
        registering.upon(registered, enter=waiting, outputs=[renewed])
        waiting.upon(progress, enter=waiting, outputs=[renewed])
        waiting.upon(complete, enter=delivered, outputs=[ended])

    def run(lives: int) -> float:
        machines = [Life() for _ in range(lives)]
        took = timed([getattr(machine, name) for machine in machines for name in EVENTS])
        assert all(machine.data.sent[0] == "told" for machine in machines)
        return took

    return run


def measure(rounds: int, lives: int) -> dict[str, object]:
    """Steps per second of each, and whether the bars are met."""
    runners: dict[str, Runner] = {"pushkv": Core()}
    missing = []
    for name, make in (
        ("python-statemachine", python_statemachine),
        ("transitions", transitions),
        ("automat", automat),
    ):
        try:
            runners[name] = make()
        except ImportError:
            missing.append(name)
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            # The libraries are slower: fewer lives for the same time.
            count = lives if name == "pushkv" else max(1, lives // 8)
            rates[name].append(count * len(EVENTS) / run(count))
    found = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {f"over {name}": found["pushkv"] / rate for name, rate in found.items()}
    values = {"steps_per_s": found["pushkv"], **ratios}
    return {
        "python": platform.python_version(),
        "steps_per_s": found,
        "rounds": rates,
        "ratios": {name: value for name, value in ratios.items() if name != "over pushkv"},
        "missing": missing,
        "bars": {
            name: {"least": least, "value": values[name], "met": values[name] >= least}
            for name, least in BARS.items()
            if name in values
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lives", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="where the core's time goes")
    arguments = parser.parse_args()
    if arguments.profile:
        core = Core()
        with cProfile.Profile() as profile:
            core(arguments.lives)
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)
        return
    result = measure(arguments.rounds, arguments.lives)
    rates = result["steps_per_s"]
    assert isinstance(rates, dict)
    for name, rate in rates.items():
        print(f"{name:20} {rate:12,.0f} steps/s  pushkv is {rates['pushkv'] / rate:6.1f} times it")
    bars = result["bars"]
    assert isinstance(bars, dict)
    for name, bar in bars.items():
        told = "met" if bar["met"] else "MISSED"
        print(f"{name}: {bar['value']:,.1f}, bar {bar['least']:,}: {told}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
