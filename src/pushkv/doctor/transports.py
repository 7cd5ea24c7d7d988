"""Whether bytes get across: a real WRITE between two processes, with its notification."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import PushKVError
from pushkv.testing import ConformanceError, Limits, ProcessEnds, check_transport
from pushkv.transport import load_transport

from .finding import Finding, Verdict

__all__ = ["lanes_of", "tried"]

CHECKS = ("bytes_arrive", "arrival_names_the_part")
IDLE = "idle_costs_nothing"
MEMORY_BYTES = 4 << 20
SECOND = 10**9
_CONNECTED = re.compile(r"(?:intra|inter)-node cfg#\d+ (.*)")
_LANE = re.compile(r"\w+/[\w:]+")
_PATIENT = Limits(patience_s=30.0)
SHARED_MEMORY = (
    "bytes may cross memory shared with a peer of the same host, which no cut network and no link "
    "that went down stops: a lost peer's blocks come back with its word, its certain death or yours"
)
HOLDS_UP = "a WRITE is not bounded in time: a silent peer's blocks come back with proof alone"


def tried(
    subject: str, name: str, options: Mapping[str, object], *, is_main: bool
) -> Iterator[Finding]:
    """Make two processes, WRITE from one to the other, and watch them do nothing.

    Args:
        subject: The transport and its variant, for the findings.
        name: The transport's entry point.
        options: Its options.
        is_main: Whether it is a failure if it does not work; else it is a note.
    """
    idle = Finding(f"{subject}, idle", Verdict.OK, "sleeps while nothing is written")
    with tempfile.TemporaryDirectory(prefix="pushkv-doctor-") as logs:
        environment = {
            "UCX_LOG_LEVEL": "info",
            "UCX_LOG_FILE": f"{logs}/ucx-%p.log",
            "NIXL_LOG_LEVEL": "FATAL",
        }
        ends = partial(
            ProcessEnds, partial(load_transport, name, dict(options)), environment, MEMORY_BYTES
        )
        try:
            version = check_transport(ends, CHECKS, _PATIENT).version
            try:
                check_transport(ends, (IDLE,), _PATIENT)
            except ConformanceError as error:
                idle = _restless(idle.subject, error)
        except (ConformanceError, PushKVError) as error:
            yield _broken(subject, error.__cause__ or error, is_main)
            return
        lanes = lanes_of(each.read_text(errors="replace") for each in Path(logs).iterdir())
    over = f" over {lanes}" if lanes else ""
    yield Finding(subject, Verdict.OK, f"{version}: WRITEs and notifications arrive{over}")
    yield idle
    yield from _promises(subject, load_transport(name, dict(options)).capabilities)


def lanes_of(logs: Iterable[str]) -> str:
    """The lanes that UCX chose between the two processes, as it logged them; "" if it did not."""
    lines = (line for log in logs for line in _CONNECTED.findall(log))
    return ", ".join(sorted({lane for line in lines for lane in _LANE.findall(line)}))


def _promises(subject: str, promised: Capabilities) -> Iterator[Finding]:
    if promised.shared_memory:
        yield Finding(
            f"{subject}, shared memory",
            Verdict.NOTE,
            SHARED_MEMORY,
            'fabric "tcp" or "rdma" takes it away, where cutting a network must stop WRITEs',
        )
    if promised.write_bound is None:
        death = promised.death_bound
        after = "is not known to end" if death is None else f"ends within {death / SECOND:g} s"
        yield Finding(
            f"{subject}, bounds",
            Verdict.NOTE,
            f"{HOLDS_UP}; what a dead process had posted {after}",
            "is_gone for peers on other hosts; write_bound_s only where the fabric vouches for it",
        )


def _restless(subject: str, error: ConformanceError) -> Finding:
    return Finding(
        subject,
        Verdict.WARNING,
        f"does not sleep while nothing is written: {error.__cause__ or error}",
        "a progress thread that spins takes a core from the engine: give it a delay "
        "(progress_delay_us); or something else keeps this machine busy",
    )


def _broken(subject: str, error: BaseException, is_main: bool) -> Finding:
    verdict = Verdict.FAILURE if is_main else Verdict.NOTE
    remedy = "look at UCX_TLS, UCX_NET_DEVICES and `ulimit -l`" if is_main else ""
    return Finding(subject, verdict, f"does not work here: {error}", remedy)
