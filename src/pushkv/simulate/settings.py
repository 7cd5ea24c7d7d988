"""What is simulated: designs, engines, links, deployments, traffic. Seconds, bytes and tokens."""

from __future__ import annotations

from enum import StrEnum

from attrs import AttrsInstance, field, fields, frozen

from pushkv.core.errors import ConfigurationError

__all__ = [
    "PUSHES",
    "Deployment",
    "Design",
    "EngineModel",
    "Faults",
    "LinkModel",
    "Settings",
    "Traffic",
]


class Design(StrEnum):
    """How a request's KV cache comes to where it is decoded."""

    MONOLITHIC = "monolithic"
    """It does not: one engine does both."""
    PULL = "pull"
    """After prefill the router tells decode, which allocates, prepares a READ inside its own engine
    loop, and reads."""
    PULL_THREAD = "pull-thread"
    """The same with a thread that prepares the READ."""
    PUSH_EARLY = "push-early"
    """Both legs at once: decode registers its blocks while the prompt is computed."""
    PUSH_LATE = "push-late"
    """Prefill first, then decode, which registers; prefill writes."""


PUSHES = (Design.PUSH_EARLY, Design.PUSH_LATE)


def _check(self: AttrsInstance) -> None:
    """Numbers are numbers of the right sign; zero only where it means something."""
    for each in fields(type(self)):
        value = getattr(self, each.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least, most = each.metadata.get("least", 0), each.metadata.get("most", float("inf"))
        if not least <= value <= most:
            raise ConfigurationError(each.name, value, f"{least} to {most}")


def _at_least(default: int, least: int = 1) -> int:
    made: int = field(default=default, metadata={"least": least})
    return made


def _share(default: float = 0.0) -> float:
    made: float = field(default=default, metadata={"most": 1})
    return made


@frozen
class EngineModel:
    """One engine, all its ranks together.

    A step takes `decode_step_s` and `decode_context_s` per token of context of what decodes in it,
    if anything does, and `prefill_step_s` and `prefill_token_s` per prompt token computed in it, if
    any is.

    Attributes:
        chunk_tokens: Most prompt tokens of one step (chunked prefill).
        slots: Most requests that are prefilled or decoded at once. Who waits for remote KV has
            none; where none is free, nobody who waits is looked at, as in vLLM.
        leg_s: Of an HTTP request and its answer, before the engine sees it, beside others.
        leg_token_s: The same per prompt token: tokens, hashes of blocks.
        blocks: Of the KV cache.
        block_tokens: Tokens per block.
    """

    prefill_step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0
    decode_context_s: float = 0.0
    chunk_tokens: int = _at_least(8192)
    slots: int = _at_least(8)
    leg_s: float = 0.0
    leg_token_s: float = 0.0
    blocks: int = _at_least(200_000)
    block_tokens: int = _at_least(16)

    __attrs_post_init__ = _check


@frozen
class LinkModel:
    """The network and what it takes to post.

    Attributes:
        bandwidth_bytes_s: Of one engine's adapters together, each way; shared equally by the
            transfers that are under way. A transfer gets the lesser of its two shares.
        latency_s: From posting to the first byte, and whatever a transfer takes however small.
        token_bytes: KV cache per token.
        descriptors_per_token: After adjacent blocks are merged, per rank.
        descriptor_s: To prepare and post one descriptor, on whichever thread does it.
        control_s: One control message, one way, from thread to thread.
        proxy_s: What the router takes between a prefill's answer and the decode leg.
    """

    bandwidth_bytes_s: float = field(default=50e9, metadata={"least": 1.0})
    latency_s: float = 0.0
    token_bytes: int = _at_least(262_144)
    descriptors_per_token: float = 0.0
    descriptor_s: float = 0.0
    control_s: float = 0.0
    proxy_s: float = 0.0

    __attrs_post_init__ = _check

    def post_s(self, tokens: int) -> float:
        """What posting a transfer of so many tokens takes, in seconds."""
        return tokens * self.descriptors_per_token * self.descriptor_s


@frozen
class Deployment:
    """So many engines of each kind; a monolithic one has `prefill` + `decode` of one kind.

    Attributes:
        looked_at: Of how many engines, drawn at random, the router takes the least loaded; 0 for
            all of them.
    """

    prefill: int = _at_least(1)
    decode: int = _at_least(1)
    looked_at: int = _at_least(0, 0)

    __attrs_post_init__ = _check


@frozen
class Traffic:
    """Requests of one kind.

    Attributes:
        rate_hz: Requests per second, Poisson.
        spread: How much lengths vary: each prompt's and output's is its mean times a factor whose
            logarithm is uniform in [-spread, spread], scaled to keep the mean.
        stops: Chance that an output ends before its length, per token.
        cached_prefill: Share of a prompt that the prefill engine has cached; a block is computed
            anyway.
        cached_decode: The same at the decode engine: it is not transferred.
        exact: Stretch arrivals so that the last comes at requests / rate_hz, as vLLM's benchmark
            does.
    """

    rate_hz: float = field(default=1.0, metadata={"least": 1e-9})
    requests: int = _at_least(100)
    prompt_tokens: int = _at_least(4096)
    output_tokens: int = _at_least(128)
    spread: float = field(default=0.0, metadata={"most": 3})
    stops: float = field(default=0.0, metadata={"most": 0.9})
    cached_prefill: float = _share()
    cached_decode: float = _share()
    exact: bool = False

    __attrs_post_init__ = _check


@frozen
class Faults:
    """Prefill engines that die, and clients that go away.

    Attributes:
        deaths_hz: Deaths of prefill processes per second, over all of them; each is up again at
            once under a new incarnation, and the router sends its requests elsewhere.
        proof_s: How long after a death somebody proves to the decode engines that nothing of it
            can land any more (an orchestrator, or the kernel on the same host).
        budget_share: Most of a decode engine's blocks that may be registered or quarantined.
        restarts_most: How often a request that lost its prefill engine is tried again.
    """

    deaths_hz: float = 0.0
    proof_s: float = 10.0
    budget_share: float = _share(1.0)
    restarts_most: int = _at_least(3, 0)

    __attrs_post_init__ = _check


@frozen
class Settings:
    """One run.

    Attributes:
        machines: Push with the real machines, or with their messages' latencies alone.
    """

    design: Design
    engine: EngineModel
    link: LinkModel
    deployment: Deployment = Deployment()
    traffic: Traffic = Traffic()
    faults: Faults = Faults()
    seed: int = 0
    machines: bool = True
