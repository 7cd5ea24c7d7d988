"""The reference engine's cache: KV that is a hash, and tokens that depend on every byte of it."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pushkv.core.errors import ConfigurationError
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion

__all__ = ["KV_BYTES", "VOCABULARY", "ReferenceCache", "generate", "prompt_digest"]

KV_BYTES = 64
VOCABULARY = 50_000


def prompt_digest(prompt: tuple[int, ...]) -> bytes:
    """16 bytes that name a prompt."""
    return blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=16).digest()


class ReferenceCache:
    """A paged KV cache in host memory: shape (layers, blocks, block_tokens, kv_bytes), dtype uint8.

    `kv_bytes` is a multiple of 64: the hash of a position, as often as it fits.
    """

    def __init__(
        self,
        layers: int = 8,
        block_count: int = 512,
        block_tokens: int = 16,
        kv_bytes: int = KV_BYTES,
    ) -> None:
        if kv_bytes < 1 or kv_bytes % KV_BYTES:
            raise ConfigurationError("kv_bytes", kv_bytes, f"a multiple of {KV_BYTES}")
        shape = (layers, block_count, block_tokens, kv_bytes)
        self.bytes: NDArray[np.uint8] = np.zeros(shape, dtype=np.uint8)
        self.layers = layers
        self.kv_bytes = kv_bytes
        self.block_tokens = block_tokens
        self.block_count = block_count
        self.free: list[int] = list(range(block_count))

    @property
    def layout(self) -> CacheLayout:
        """The cache's geometry, with addresses."""
        layers, count, tokens, kv_bytes = self.bytes.shape
        regions = tuple(
            CacheRegion(self.bytes[layer].ctypes.data, tokens * kv_bytes, count)
            for layer in range(layers)
        )
        return CacheLayout((CacheGroup(tokens, regions),), "uint8", "NHD")

    def allocate(self, tokens: int) -> tuple[int, ...] | None:
        """Blocks for `tokens` positions, most recently freed first; None if there are too few."""
        count = self.blocks_of(tokens)
        if count > len(self.free):
            return None
        return tuple(self.free.pop() for _ in range(count))

    def blocks_of(self, tokens: int) -> int:
        """How many blocks hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def extend(self, blocks: tuple[int, ...], at: int, token: int) -> None:
        """Write the KV of `token` at position `at`."""
        before = self.read(blocks, at - 1, at)[..., :KV_BYTES].tobytes() if at else b""
        seed = before + token.to_bytes(8, "little")
        kv = b"".join(
            blake2b(seed, digest_size=KV_BYTES, salt=bytes([layer])).digest()
            * (self.kv_bytes // KV_BYTES)
            for layer in range(self.layers)
        )
        self.write(blocks, at, np.frombuffer(kv, dtype=np.uint8).reshape(-1, self.kv_bytes))

    def next_token(self, blocks: tuple[int, ...], length: int) -> int:
        """The token that follows: a function of every byte of the first `length` positions."""
        digest = blake2b(self.read(blocks, 0, length).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % VOCABULARY

    def read(self, blocks: tuple[int, ...], start: int, end: int) -> NDArray[np.uint8]:
        """The KV of positions [start, end): shape (layers, positions, kv_bytes), dtype uint8."""
        first = start // self.block_tokens
        ids = list(blocks[first : self.blocks_of(end)])
        pages = self.bytes[:, ids].reshape(self.layers, -1, self.kv_bytes)
        skipped = first * self.block_tokens
        return pages[:, start - skipped : end - skipped]

    def write(self, blocks: tuple[int, ...], at: int, kv: NDArray[np.uint8]) -> None:
        """Set the KV of position `at`: shape (layers, kv_bytes), dtype uint8."""
        self.bytes[:, blocks[at // self.block_tokens], at % self.block_tokens] = kv


def generate(cache: ReferenceCache, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The `count` tokens that follow `prompt`, with nobody else in the cache: what is right."""
    blocks = cache.allocate(len(prompt) + count)
    assert blocks is not None, "the cache is too small for this prompt"
    for at, token in enumerate(prompt):
        cache.extend(blocks, at, token)
    tokens: list[int] = []
    for at in range(len(prompt), len(prompt) + count):
        tokens.append(cache.next_token(blocks, at))
        cache.extend(blocks, at, tokens[-1])
    cache.free.extend(blocks)
    return tuple(tokens)
