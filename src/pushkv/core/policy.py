"""Every duration and bound the machines use, in one place, validated in order."""

from __future__ import annotations

from attrs import field, fields, frozen

from .errors import ConfigurationError
from .ids import Duration, seconds

__all__ = ["Policy"]


@frozen
class Policy:
    """How long to wait, how often to ask, how much to hold. Durations in nanoseconds.

    Attributes:
        lease: For how long one GRANT lets a producer WRITE (R4). Both ends must agree; HELLO says.
        drift_ppm: ρ, the most two clocks may drift apart, in millionths (R4).
        resend: Between two REGISTERs or REVOKEs that are not answered.
        query: Between two QUERYs of a registered attempt.
        waiting: How long without news of an attempt before it is given up; news renew it.
        settle: How long a verdict waits for the arrivals it names.
        expected: How long P holds a registration of a request it was never sent.
        hold: How long P keeps finished KV that nobody registers for; one per transfer (I7).
        hold_cancelled: The same from when its consumer has given the request up for good.
        transfer: How long the WRITEs of an attempt may take, from the first.
        write_retries: How often the WRITEs of an attempt may FAIL and be ordered anew.
        write_backoff: Before a failed WRITE is ordered anew.
        attempts: Attempts per transfer, the first included.
        retry_backoff: Before a new attempt; doubles with each.
        connect_backoff: Between two dials of a peer that does not answer.
        exposed_blocks: Most destination blocks registered, being written or quarantined at once.
        pinned_blocks: Most source blocks of finished prefills pinned at once; beyond, the oldest
            that nobody has registered for is given up.
        part_tokens: Most tokens of a WRITE, unless that would make more than 1024 of them of an
            attempt; a multiple of the block's, or blocks are cut.
        transfers: Most live transfers per endpoint; more are refused.
        remembered: Most transfers that are over, and remembered for their peers (R7).
    """

    lease: Duration = seconds(10)
    drift_ppm: int = 1_000
    resend: Duration = seconds(1)
    query: Duration = seconds(2)
    waiting: Duration = seconds(30)
    settle: Duration = seconds(10)
    expected: Duration = seconds(20)
    hold: Duration = seconds(60)
    hold_cancelled: Duration = seconds(2)
    transfer: Duration = seconds(60)
    write_retries: int = 2
    write_backoff: Duration = seconds(0.05)
    attempts: int = 2
    retry_backoff: Duration = seconds(0.2)
    connect: Duration = seconds(5)
    connect_backoff: Duration = seconds(0.2)
    exposed_blocks: int = field(default=1 << 40)
    pinned_blocks: int = field(default=1 << 40)
    part_tokens: int = 1 << 40
    transfers: int = 100_000
    remembered: int = 10_000

    def __attrs_post_init__(self) -> None:
        for each in fields(Policy):
            value = getattr(self, each.name)
            least = 0 if each.name in ("drift_ppm", "write_retries") else 1
            if type(value) is not int or value < least:
                raise ConfigurationError(each.name, value, f"an integer of at least {least}")
        for lesser, greater in (
            ("drift_ppm", 100_000),
            ("resend", "waiting"),
            ("query", "waiting"),
            ("connect_backoff", "connect"),
            ("write_backoff", "transfer"),
        ):
            bound = greater if isinstance(greater, int) else getattr(self, greater)
            if getattr(self, lesser) >= bound:
                raise ConfigurationError(
                    lesser, getattr(self, lesser), f"less than {greater} = {bound}"
                )

    @property
    def ping(self) -> Duration:
        """Between two PINGs: a third of the lease, so that two may be lost."""
        return Duration(self.lease // 3)
