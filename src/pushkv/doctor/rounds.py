"""All that is looked at, in the order in which it matters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from attrs import field, frozen

from . import engine, machine, transports
from .finding import Finding

__all__ = ["Patient", "examine"]


Look = Callable[[], Iterable[Finding]]


@frozen
class Patient:
    """What to examine beside the machine.

    Attributes:
        transport: The transport in the entry point group ``pushkv.transports``.
        variants: Its options, by the name under which each is shown.
        connector: `kv_connector_extra_config` of an engine; None to look at no engine's options.
        engine: Whether to look at vLLM.
    """

    transport: str = "nixl"
    variants: Mapping[str, Mapping[str, object]] = field(
        factory=lambda: {"UCX": {"backend": "UCX"}, "LIBFABRIC": {"backend": "LIBFABRIC"}}
    )
    connector: Mapping[str, object] | None = None
    engine: bool = True


def examine(patient: Patient, news: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Look at everything; blocks for some ten seconds, most of them in other processes.

    Args:
        patient: What to examine.
        news: Told what is looked at next.
    """
    found: list[Finding] = []
    for what, look in _looks(patient):
        news(what)
        found += look()
    return found


def _looks(patient: Patient) -> Iterator[tuple[str, Look]]:
    yield "Python and packages", engine.packages
    yield "limits of this process", machine.limits
    yield "clocks", machine.clocks
    yield "network devices and accelerators", machine.devices
    if patient.engine:
        yield "vLLM", engine.vllm
    needed = set(patient.variants) - (set() if machine.EFA in machine.drivers() else {"LIBFABRIC"})
    for name, options in patient.variants.items():
        subject = f"{patient.transport} {name}"
        yield (
            f"{subject}: a WRITE between two processes",
            partial(transports.tried, subject, patient.transport, options, is_main=name in needed),
        )
    if patient.connector is not None:
        yield "the engine's options", partial(engine.options, patient.connector)
