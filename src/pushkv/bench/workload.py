"""Which requests come when: lengths, arrivals, shared prefixes and cancellations, from one seed.

A workload is a trace (`trace_file.TraceRow`), made here or read from a file, and what a trace does
not hold: the tokens behind its block ids and which clients leave. Equal seeds give equal workloads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from attrs import evolve, field, frozen

from pushkv.core.errors import ConfigurationError

from .trace_file import TraceRow, blocks_of

__all__ = ["Cell", "Lengths", "Request", "generate", "parse_cell", "parse_lengths", "split"]

BLOCK_TOKENS = 128
"""Tokens per hash id of a generated trace: vLLM's block on CPUs, so that a prefix of so many ids is
one that vLLM can share."""
FIRST_NEW_ID = 1 << 40
MOST_BLOCKS = 1 << 20
CANCEL_AFTER = (0.1, 1.5)
"""A client that leaves does so after this share of the time that a request is expected to take."""


@frozen
class Lengths:
    """A mix of lengths.

    Attributes:
        tokens: The lengths, each at least 1.
        weights: How often each is drawn, in proportion.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __attrs_post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.weights):
            raise ConfigurationError("lengths", self.tokens, "one weight for each length")
        for tokens in self.tokens:
            if tokens < 1:
                raise ConfigurationError("lengths", tokens, "at least 1 token")
        for weight in self.weights:
            if not 0 < weight < math.inf:
                raise ConfigurationError("weight", weight, "more than 0")

    @property
    def mean(self) -> float:
        """Mean length, in tokens."""
        pairs = zip(self.tokens, self.weights, strict=True)
        return sum(tokens * weight for tokens, weight in pairs) / sum(self.weights)

    def draw(self, chance: random.Random) -> int:
        """One length."""
        return chance.choices(self.tokens, self.weights)[0]


@frozen
class Cell:
    """One point of load.

    Attributes:
        prompt: Prompt lengths.
        output: Output lengths.
        qps: Mean arrivals per second, exponential gaps; 0: each comes when the last is answered.
        shared: Tokens that all prompts begin with; a multiple of `BLOCK_TOKENS`.
        cancel_share: The share of clients that leave before they have everything.
        name: Its title, if it is not to be made from the rest.
    """

    prompt: Lengths
    output: Lengths
    qps: float = 0.0
    shared: int = 0
    cancel_share: float = field(default=0.0)
    name: str = ""

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.qps < math.inf:
            raise ConfigurationError("qps", self.qps, "0 (one at a time) or more")
        if not 0 <= self.cancel_share <= 1:
            raise ConfigurationError("cancel_share", self.cancel_share, "0 to 1")
        shortest = min(self.prompt.tokens)
        if self.shared < 0 or self.shared % BLOCK_TOKENS or self.shared >= shortest:
            raise ConfigurationError(
                "shared",
                self.shared,
                f"a multiple of {BLOCK_TOKENS} below the shortest prompt, {shortest}",
            )

    @property
    def title(self) -> str:
        """The cell in a few words."""
        if self.name:
            return self.name
        mix = ",".join(str(tokens) for tokens in self.prompt.tokens)
        load = f"@ {self.qps:g}/s" if self.qps else "one at a time"
        return f"{mix} {load}" + (f", {self.shared} shared" if self.shared else "")


@frozen
class Request:
    """One request of a client.

    Attributes:
        arrival_s: When it is sent, in seconds since its round began.
        hash_ids: The blocks of its prompt.
        prompt_tokens: Length of its prompt.
        output_tokens: Tokens it asks for.
        block_tokens: Tokens per hash id.
        leaves_after: If its client leaves: after this share of the time expected.
    """

    arrival_s: float
    hash_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    block_tokens: int = BLOCK_TOKENS
    leaves_after: float | None = None

    def token_ids(self, salt: str, lowest: int, highest: int) -> list[int]:
        """The prompt, `prompt_tokens` ids from `lowest` to `highest`.

        A block's tokens depend on `salt` and its id alone, so prompts share what their ids share.
        """
        tokens: list[int] = []
        for each in self.hash_ids:
            chance = random.Random(f"{salt}/{each}")  # noqa: S311 - repeatable by intent
            tokens += chance.choices(range(lowest, highest + 1), k=self.block_tokens)
        return tokens[: self.prompt_tokens]

    def with_new_blocks(self, shared: int, serial: int) -> Request:
        """A request at once, of these lengths, with `shared` tokens of this prompt and new ones.

        Different serial numbers give different blocks, all of them unlike those of a workload.
        """
        kept = self.hash_ids[: shared // self.block_tokens]
        first = FIRST_NEW_ID + serial * MOST_BLOCKS
        own = range(first, first + len(self.hash_ids) - len(kept))
        return evolve(self, arrival_s=0.0, hash_ids=(*kept, *own), leaves_after=None)


def parse_lengths(text: str) -> Lengths:
    """A mix such as ``512`` or ``128x3,2048x1``: lengths in tokens and their weights.

    Raises:
        ConfigurationError: It is none.
    """
    tokens, weights = [], []
    for part in text.split(","):
        length, _, weight = part.partition("x")
        try:
            tokens.append(int(length))
            weights.append(float(weight) if weight else 1.0)
        except ValueError as error:
            raise ConfigurationError("lengths", text, "TOKENS[xWEIGHT],…") from error
    return Lengths(tuple(tokens), tuple(weights))


def parse_cell(text: str, output: Lengths, cancel_share: float = 0.0) -> Cell:
    """A cell such as ``512@0.8``, ``1024@0.6+768`` (768 tokens shared) or ``128`` (one at a time).

    Raises:
        ConfigurationError: It is none.
    """
    prompt, _, load = text.partition("@")
    qps, plus, shared = load.partition("+") if load else ("0", "", "")
    if not load:
        prompt, plus, shared = prompt.partition("+")
    lengths = parse_lengths(prompt)
    try:
        rate, prefix = float(qps), int(shared) if plus else 0
    except ValueError as error:
        raise ConfigurationError("cell", text, "PROMPT[@QPS][+SHARED]") from error
    return Cell(lengths, output, rate, prefix, cancel_share)


def generate(cell: Cell, count: int, seed: int) -> list[TraceRow]:
    """`count` rows of a cell. Ids of shared blocks come first; every other block has its own.

    Raises:
        ConfigurationError: `count` is below 1.
    """
    if count < 1:
        raise ConfigurationError("count", count, "at least 1 request")
    chance = random.Random(seed)  # noqa: S311 - repeatable by intent
    prefix = tuple(range(cell.shared // BLOCK_TOKENS))
    fresh = len(prefix)
    at_s = 0.0
    rows = []
    for _ in range(count):
        if cell.qps:
            at_s += chance.expovariate(cell.qps)
        prompt = cell.prompt.draw(chance)
        own = blocks_of(prompt, BLOCK_TOKENS) - len(prefix)
        ids = (*prefix, *range(fresh, fresh + own))
        fresh += own
        rows.append(TraceRow(round(1_000 * at_s, 3), prompt, cell.output.draw(chance), ids))
    return rows


def split(
    rows: Sequence[TraceRow],
    rounds: int,
    *,
    seed: int = 0,
    cancel_share: float = 0.0,
    block_tokens: int = BLOCK_TOKENS,
) -> list[list[Request]]:
    """The rows as requests, in `rounds` consecutive parts of about equal size, each from time 0.

    A part keeps the gap before its first request, so that no two parts are glued together.

    Raises:
        ConfigurationError: There are fewer rows than rounds, or no round.
    """
    if not 1 <= rounds <= len(rows):
        raise ConfigurationError("rounds", rounds, f"1 to {len(rows)}, the number of requests")
    chance = random.Random(f"leaves/{seed}")  # noqa: S311 - repeatable by intent
    requests = [
        Request(
            arrival_s=row.timestamp_ms / 1_000,
            hash_ids=row.hash_ids,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            block_tokens=block_tokens,
            leaves_after=chance.uniform(*CANCEL_AFTER) if chance.random() < cancel_share else None,
        )
        for row in rows
    ]
    parts = []
    for number in range(rounds):
        begin, end = (len(rows) * at // rounds for at in (number, number + 1))
        offset_s = requests[begin - 1].arrival_s if begin else 0.0
        parts.append(
            [evolve(each, arrival_s=each.arrival_s - offset_s) for each in requests[begin:end]]
        )
    return parts
