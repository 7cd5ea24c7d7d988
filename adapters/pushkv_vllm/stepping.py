"""How often an engine steps while all that its requests do is wait for their KV cache.

vLLM has no event for "a connector has news": its EngineCore steps, and while a step finds nothing
to run it sleeps a millisecond and steps again. Each such step runs the scheduler, every connector
hook and an output to the API server, so that an engine that does nothing costs a quarter of a core,
which on shared cores it takes from whoever prefills for it.

`WhileWaiting` lists the ways out. To sleep takes the place of one method of vLLM, so it is done
only where that method is, to the letter, one that was read, and by an engine that steps for itself.

Who is there to sleep can also save a step: vLLM takes what was received from the output of a step,
so that news wait for the step that runs, and for a whole one after it, before their request is
scheduled. Told between two steps, it is scheduled in the next.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
import time
from collections.abc import Callable
from enum import StrEnum
from queue import Queue
from typing import TYPE_CHECKING, Any

from attrs import define, field
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

__all__ = ["KNOWN_STEPS", "PAUSE_S", "SLEEP_MOST_S", "Alarm", "WhileWaiting", "install"]

KNOWN_STEPS = {
    "797ca0cb37ae12b19900ef906a977889310e8b62898fa91656115599d9123f73": "0.32",
    "5a50a1995b6cd69fbfc43c64b67670fc22faabf51af06e11c7ea0c2ae955142a": "0.33",
}
"""SHA-256 of the source of each `EngineCoreProc._process_engine_step` that can be replaced, and the
vLLM that has it."""
KNOWN_RECEIPTS = {"b191f7559a47c4ec7304ffffaf63ee24114dcfba0f0c85674efeced7db691e12": "0.32"}
"""The same of each `Scheduler._update_from_kv_xfer_finished`: it takes a step's word for what was
received, and may be told the same between two steps."""
SLEEP_MOST_S = 1.0
"""The engine steps at least so often, whatever has been overlooked."""
PAUSE_S = 0.005
"""What a request that comes during a pause may lose."""
SETTLED_STEPS = 3
"""Empty steps in a row after which nothing is left that the engine could do by itself: one brings
reports, the next says what is due, and one more acts on it."""
ENDS_BY_INPUT = frozenset(
    {
        RequestStatus.WAITING,
        RequestStatus.PREEMPTED,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    }
)
"""Where nothing runs, only a report or a client moves such a request on. Not here: what a thread of
vLLM's own works on, which tells nobody when it is done (grammars)."""


class WhileWaiting(StrEnum):
    """What an engine does while its requests wait for their KV cache and for nothing else."""

    SLEEP = "sleep"
    """EngineCore's loop waits for its own inputs and for the runtime's reports at once; where it
    cannot, as `PAUSE`."""
    PAUSE = "pause"
    """An empty step's hook waits for reports, `PAUSE_S` at most: nothing of vLLM is touched."""
    STEP = "step"
    """As vLLM does: a step every millisecond."""


@define
class Alarm:
    """What an engine that waits listens to. `ring` may come from any thread, the rest from one.

    Attributes:
        news: Whether there is something to step for.
        received: Takes the ids whose KV cache has come, or can no more, with nothing else to say.
        attended: The engine's loop looks at it.
        empty_steps: Steps without a token since something happened.
    """

    news: Callable[[], bool]
    received: Callable[[], frozenset[str]] = frozenset
    attended: bool = False
    empty_steps: int = 0
    _inputs: Queue[Any] | None = field(default=None, init=False)

    def ring(self) -> None:
        """Something has been reported: it is where `news` finds it. Never blocks for long."""
        inputs = self._inputs
        if inputs is not None:
            with inputs.mutex:
                inputs.not_empty.notify_all()

    def sleep(self, inputs: Queue[Any], most_s: float) -> None:
        """Until there is an input, or news, or for `most_s` seconds."""
        with inputs.not_empty:
            # Set first, asked after: a report that `ring` keeps to itself came before, and is seen.
            self._inputs = inputs
            try:
                if not inputs.queue and not self.news():
                    inputs.not_empty.wait(most_s)
            finally:
                self._inputs = None

    def settled(self, in_flight: int) -> bool:
        """Whether nothing is left to do, where `in_flight` steps may be scheduled ahead."""
        return self.empty_steps >= SETTLED_STEPS + in_flight


def only_waits(scheduler: Scheduler) -> bool:
    """Whether nothing but an input or a report can give the scheduler something to run."""
    return (
        not scheduler.running
        and scheduler.ec_connector is None
        and all(
            each.status in ENDS_BY_INPUT or RequestStatus.is_finished(each.status)
            for each in scheduler.requests.values()
        )
    )


def install() -> bool:
    """Let the engines of this process sleep while they wait. More than once is harmless.

    Engines whose connector has no alarm, and those of a data-parallel group, which step in time
    with each other, go on as ever.

    Returns:
        Whether this vLLM's loop is a known one; else nothing has been touched.
    """
    from vllm.v1.engine.core import EngineCoreProc

    current = EngineCoreProc._process_engine_step
    if getattr(current, "is_pushkvs", False):
        return True
    if _digest(current) not in KNOWN_STEPS:
        return False
    EngineCoreProc._process_engine_step = _replacement(current)
    return True


def _digest(method: Callable[..., object]) -> str:
    """SHA-256 of its source, or "" where there is none."""
    try:
        source = textwrap.dedent(inspect.getsource(method))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()


def _replacement(vllms: Callable[[EngineCoreProc], bool]) -> Callable[[EngineCoreProc], bool]:
    """`_process_engine_step`, the same but for what follows a step that ran no model."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core as module
    from vllm.v1.outputs import KVConnectorOutput

    feed = getattr(module, "get_watch_dog", None)  # from 0.33 on
    tells = _digest(Scheduler._update_from_kv_xfer_finished) in KNOWN_RECEIPTS

    def step(self: EngineCoreProc) -> bool:
        alarm = getattr(self.scheduler.get_kv_connector(), "alarm", None)
        if not isinstance(alarm, Alarm):
            return vllms(self)
        alarm.attended = True
        if isinstance(self, module.DPEngineCoreProc):
            return vllms(self)
        if feed is not None:
            feed().feed()
        if tells:
            received = alarm.received()
            if received:
                news = KVConnectorOutput(finished_recving=set(received))
                self.scheduler._update_from_kv_xfer_finished(news)
        outputs, executed = self.step_fn()
        for output in outputs.items() if outputs else ():
            self.output_queue.put_nowait(output)
        self.post_step(executed)
        if executed or not self.scheduler.has_requests():
            alarm.empty_steps = 0
            return bool(executed)
        _wait(self, alarm)
        return False

    step.is_pushkvs = True  # type: ignore[attr-defined]
    return step


def _wait(core: EngineCoreProc, alarm: Alarm) -> None:
    """After an empty step: no pause while it may have changed something, then all the time."""
    alarm.empty_steps += 1
    if not alarm.settled(0 if core.batch_queue is None else core.batch_queue_size):
        return
    if only_waits(core.scheduler):
        alarm.sleep(core.input_queue, SLEEP_MOST_S)
        alarm.empty_steps = 0
    else:
        time.sleep(0.001)
