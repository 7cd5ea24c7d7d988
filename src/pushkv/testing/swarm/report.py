"""Which run, and what came of it."""

from __future__ import annotations

from attrs import frozen

from pushkv.core.errors import ConfigurationError

from .virtual import Backend
from .weather import Kind

__all__ = ["SwarmReport", "SwarmSettings", "Violation"]


@frozen
class SwarmSettings:
    """One run: equal settings are equal runs, event by event.

    Attributes:
        seed: Of every choice.
        transfers: Requests in all.
        engines: Half of them prefill, half decode; at least two.
        backend: Whose event loop the runtimes live in.
        weather: What is drawn from the seed besides.

    Raises:
        ConfigurationError: A number is too small.
    """

    seed: int
    transfers: int = 2000
    engines: int = 20
    backend: Backend = Backend.ASYNCIO
    weather: Kind = Kind.MIXED

    def __attrs_post_init__(self) -> None:
        for name, least in (("seed", 0), ("transfers", 1), ("engines", 2)):
            if getattr(self, name) < least:
                raise ConfigurationError(name, getattr(self, name), f"at least {least}")

    @property
    def command(self) -> str:
        """What runs it again."""
        return (
            f"pushkv swarm --seed {self.seed} --transfers {self.transfers} "
            f"--engines {self.engines} --backend {self.backend} --weather {self.weather}"
        )


@frozen
class Violation:
    """What did not hold, and when in virtual time."""

    invariant: str
    detail: str
    at_s: float


@frozen
class SwarmReport:
    """What happened in a run.

    Attributes:
        digest: Over every step of every machine, report, post and landing, in order.
        events: How many of those there were.
        outcomes: How often each outcome was told to a client.
        counters: How often each fault, reason and repair was counted.
        rows: How often each row of a table was stepped through.
        live_most: Most attempts at one time whose blocks were offered and whose outcome was not
            told yet: requests that wait for blocks are not among them.
        open_most: Most requests at one time whose client was not told yet.
        quarantined: Blocks not back at the end, for want of a proof.
        virtual_s: How long it took in virtual time; `wall_s` in real time.
    """

    settings: SwarmSettings
    transport: str
    digest: str
    events: int
    outcomes: dict[str, int]
    counters: dict[str, int]
    rows: dict[str, int]
    live_most: int
    open_most: int
    quarantined: int
    virtual_s: float
    wall_s: float
    violation: Violation | None
