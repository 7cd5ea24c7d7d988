"""What a configuration is: who is there, what they want, what may go wrong and how often."""

from __future__ import annotations

from attrs import evolve, frozen

from pushkv.core.capabilities import Capabilities
from pushkv.core.ids import Duration
from pushkv.core.policy import Policy

__all__ = [
    "DRIFTING",
    "DRIFT_PPM",
    "FAULTS",
    "POLICY",
    "RETRYING",
    "STILL",
    "STRONG",
    "STRONG_UNBOUNDED",
    "UNIT",
    "WEAK",
    "WEAK_UNBOUNDED",
    "Configuration",
    "Transfer",
    "budgets_of",
]

FAULTS = (
    "cancel",
    "take_back",
    "abort",
    "preempt",
    "arrive_again",
    "lie",
    "lose",
    "impatience",
    "resend",
    "repeat",
    "overtake",
    "refusal",
    "write_failure",
    "unknown_outcome",
    "arrival_loss",
    "arrival_repeat",
    "crash_consumer",
    "crash_producer",
)
"""What may go wrong, each as often as a configuration's budget says.

`arrive_again` is a request whose source was released already, `lie` a message that a producer has
no right to send. `impatience` is any deadline that ends an attempt, a registration, a hold or a
link. `repeat` is a message that comes twice, `overtake` one that comes before the one in front of
it, `refusal` a WRITE whose poster finds that the permit does not last.
"""

UNIT = Duration(1)
STRONG = Capabilities("strong", done_means_visible=True, write_bound=UNIT)
STRONG_UNBOUNDED = Capabilities("strong, no bound", done_means_visible=True)
WEAK = Capabilities("weak", done_means_visible=False, write_bound=UNIT)
WEAK_UNBOUNDED = Capabilities("weak, no bound", done_means_visible=False)
POLICY = Policy(
    lease=Duration(2),
    drift_ppm=0,
    resend=UNIT,
    query=UNIT,
    waiting=Duration(2),
    settle=UNIT,
    expected=UNIT,
    hold=UNIT,
    hold_cancelled=UNIT,
    transfer=Duration(2),
    write_retries=0,
    write_backoff=UNIT,
    attempts=1,
    retry_backoff=UNIT,
    connect=Duration(2),
    connect_backoff=UNIT,
)


@frozen
class Transfer:
    """One request that is prefilled at `producer` and decoded at one of `consumers`.

    Attributes:
        consumers: Engines that may offer blocks for it, each a few times.
        tokens: Prompt tokens; a token fills one block.
        chunks: After how many tokens prefill reports; the last is the whole prompt.
        offers: How often each consumer may offer.
        again: The engine where it is offered from the second time on, and is sent as well; "" for
            `producer` alone.
    """

    name: str = "a"
    consumers: tuple[str, ...] = ("d",)
    producer: str = "p"
    tokens: int = 1
    start: int = 0
    chunks: tuple[int, ...] = (1,)
    offers: int = 1
    again: str = ""

    @property
    def producers(self) -> tuple[str, ...]:
        """The engines that prefill it, in the order in which it is offered to them."""
        return (self.producer, self.again) if self.again else (self.producer,)


@frozen
class Configuration:
    """One bounded world.

    Attributes:
        purpose: What it is there to find.
        consumers: Worker processes (engine, rank) that decode.
        producers: Worker processes (engine, rank) that prefill.
        blocks: Destination blocks of each consumer.
        budgets: How often each fault may strike; those not named never do.
        connections: How many links each pair of workers may have, one after the other.
        rates: By how much the consumers' and the producers' clocks go on in one step of
            time; (0, 0) lets it stand still, and every permit with it.
        prelude: What has happened already, as (kind of move, worker); after each, messages are
            delivered until none is left.
        proofs: Whether the death of a writer, and its silence, may be proven (R14).
        prompt: Whether time passes only when no message is on its way.
        free: Faults that have no budget, and come in the end where they may.
        eventually: What must come about in the end; see `liveness`. "" for nothing.
    """

    name: str
    purpose: str
    consumers: tuple[tuple[str, int], ...] = (("d", 0),)
    producers: tuple[tuple[str, int], ...] = (("p", 0),)
    transfers: tuple[Transfer, ...] = (Transfer(),)
    capabilities: Capabilities = STRONG
    policy: Policy = POLICY
    blocks: int = 1
    budgets: tuple[tuple[str, int], ...] = ()
    connections: int = 2
    rates: tuple[int, int] = (1, 1)
    prelude: tuple[tuple[str, int], ...] = ()
    proofs: bool = False
    prompt: bool = False
    free: tuple[str, ...] = ()
    eventually: str = ""

    def budget(self, fault: str) -> int:
        """How often `fault` may strike."""
        return dict(self.budgets).get(fault, 0)


RETRYING = evolve(POLICY, attempts=2)
DRIFT_PPM = 99_999
DRIFTING = evolve(POLICY, lease=Duration(11_000), drift_ppm=DRIFT_PPM)
"""Under the worst drift the permit lasts for five steps of the producer, the fence for six of the
consumer."""


STILL = (0, 0)


def budgets_of(**budgets: int) -> tuple[tuple[str, int], ...]:
    """Budgets by name of the fault."""
    return tuple(budgets.items())
