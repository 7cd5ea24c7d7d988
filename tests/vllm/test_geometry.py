"""Blocks that vLLM's own CPU kernel filled, mapped to blocks of another size and other heads.

What arrives must be what the kernel itself puts into blocks of that shape: so what is said of the
packing is checked against who packs.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)

from pushkv.block_map import block_map
from pushkv.core.ids import Blocks
from pushkv.layout import CacheLayout, Cells
from pushkv.rank_plan import RankPlan, Ranks
from pushkv_vllm.geometry import Engine, cache_layout
from vllm import _custom_ops as ops

pytestmark = pytest.mark.vllm

HEADS, SIZE, TOKENS, COUNT = 4, 32, 150, 12
NAME = "model.layers.3.attn"


class Cache:
    """One rank's cache of one layer, filled by the kernel or empty."""

    def __init__(self, block: int, ranks: int, rank: int, dtype: torch.dtype, page: int) -> None:
        self.block, self.heads = block, HEADS // ranks
        self.page, self.dtype = page, dtype
        self.first = rank * self.heads
        self.tensor = torch.zeros(COUNT * block // page, self.heads, page, 2 * SIZE, dtype=dtype)
        spec = FullAttentionSpec(
            block_size=block, num_kv_heads=self.heads, head_size=SIZE, dtype=dtype
        )
        caches = KVCacheConfig(
            num_blocks=COUNT, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([NAME], spec)]
        )
        layer = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={NAME: layer}),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            model_config=SimpleNamespace(dtype=dtype, get_total_num_kv_heads=lambda: HEADS),
        )
        engine = Engine(config, Ranks(ranks), rank)
        self.layout: CacheLayout = cache_layout(caches, {NAME: self.tensor}, engine)

    def fill(self, blocks: Blocks, start: int, end: int) -> None:
        """What the kernel makes of the same tokens, whoever asks."""
        generator = torch.Generator().manual_seed(1)
        both = torch.randn(2, TOKENS, HEADS, SIZE, generator=generator).to(self.dtype)
        keys, values = both[:, start:end, self.first : self.first + self.heads]
        slots = [
            blocks[0][(at - start) // self.block] * self.block + (at - start) % self.block
            for at in range(start, end)
        ]
        halves = self.tensor.view(len(self.tensor), self.heads, 2 * self.page, -1)
        ops.cpu_attn_reshape_and_cache(
            keys.contiguous(),
            values.contiguous(),
            *halves.chunk(2, dim=2),
            torch.tensor(slots),
            _get_attn_isa(self.dtype, self.block, SIZE, "auto"),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize(
    ("sizes", "start"),
    [
        ((16, 128), 0),
        ((128, 16), 0),
        ((32, 64), 0),
        ((64, 32), 32),
        ((128, 32), 96),
        ((48, 32), 0),
        ((64, 64), 64),
        ((128, 128), 0),
    ],
)
def test_what_arrives_is_what_the_kernel_would_have_written(
    sizes: tuple[int, int], start: int, ranks: tuple[int, int], dtype: torch.dtype
) -> None:
    ours = (tuple(range(-(-TOKENS // sizes[0])))[::-1],)
    theirs = (tuple(range(1, 1 - (start - TOKENS) // sizes[1])),)
    sources = [Cache(sizes[0], ranks[0], rank, dtype, sizes[0]) for rank in range(ranks[0])]
    for source in sources:
        source.fill(ours, 0, TOKENS)
    plan = RankPlan((HEADS,), Ranks(ranks[0]), Ranks(ranks[1]))
    for rank in range(ranks[1]):
        target, expected = (Cache(sizes[1], ranks[1], rank, dtype, sizes[1]) for _ in range(2))
        expected.fill(theirs, start, TOKENS)
        for producer in plan.producers_of(rank):
            source = sources[producer]
            move(source, target, (ours, 0, theirs, start, start, TOKENS))
        assert torch.equal(target.tensor, expected.tensor)


def move(source: Cache, target: Cache, what: Any) -> None:
    for here, there in zip(*block_map(source.layout, target.layout, *what), strict=True):
        ctypes.memmove(int(there[0]), int(here[0]), int(here[1]))


def test_pages_of_a_backend_are_seen_inside_the_schedulers_blocks() -> None:
    """A block of 64 that the kernel sees as two of 32."""
    source = Cache(64, 1, 0, torch.float32, 32)
    target, expected = (Cache(128, 1, 0, torch.float32, 128) for _ in range(2))
    blocks: Blocks = ((3, 1, 2),)
    source.fill(blocks, 0, TOKENS)
    expected.fill(((0, 1),), 0, TOKENS)
    move(source, target, (blocks, 0, ((0, 1),), 0, 0, TOKENS))
    assert torch.equal(target.tensor, expected.tensor)


def test_what_backend_is_unknown_is_opaque() -> None:
    cache = Cache(32, 1, 0, torch.float32, 32)
    (group,) = cache.layout.groups
    assert group.cells is not None
    assert group.layers == (3,)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=SIZE, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=COUNT, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([NAME], spec)]
    )
    stranger = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={NAME: stranger})
    )
    opaque = cache_layout(caches, {NAME: cache.tensor}, Engine(config, Ranks(2), 1))
    assert opaque.groups[0].cells is None
    assert (opaque.tensor_parallel_size, opaque.tensor_parallel_rank) == (2, 1)


@pytest.mark.parametrize("shape", [(COUNT, 16, 576), (COUNT, 1, 16, 576)])
def test_a_latent_is_one_head_that_every_rank_holds(shape: tuple[int, ...]) -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=COUNT, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([NAME], spec)]
    )
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_MLA"))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={NAME: layer})
    )
    layout = cache_layout(caches, {NAME: torch.zeros(shape)}, Engine(config, Ranks(2), 1))
    (group,) = layout.groups
    assert group.cells == Cells("HN", 1, 16)
    assert layout.heads_here(group) == range(1)
    assert group.cell_bytes(1) == (576 * 4,)
