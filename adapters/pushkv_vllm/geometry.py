"""The geometry of vLLM's KV cache, read off its tensors and its attention backends.

vLLM gives each layer a view of shape (blocks, ...). What lies where inside a block is a backend's
own affair, and the view does not say it: vLLM's attention for CPUs keeps K transposed. So only
blocks of the backends named here are taken apart, for engines of unequal tensor parallel or block
size; those of any other are opaque, and move whole between engines of equal shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from attrs import frozen

from pushkv.core.errors import ConfigurationError
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion, Cells
from pushkv.rank_plan import Ranks

__all__ = ["Engine", "cache_layout"]

TRANSPOSING = frozenset({"vec", "vec16"})
"""Kernels of vLLM's CPU attention of which it was seen that K is transposed within a block."""


@frozen
class Engine:
    """What a cache does not say of its engine.

    Attributes:
        config: The engine's `VllmConfig`.
        ranks: Its ranks.
        rank: This one.
    """

    config: Any
    ranks: Ranks
    rank: int


def cache_layout(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], engine: Engine | None = None
) -> CacheLayout:
    """The geometry of an engine's KV cache.

    A backend may cut a block of the scheduler into several of its own; these follow one another.

    Args:
        kv_cache_config: The engine's `KVCacheConfig`.
        kv_caches: Tensor of each layer.
        engine: The engine; None for one rank, and opaque blocks.

    Raises:
        ConfigurationError: The blocks of a layer are not dense.
    """
    count = kv_cache_config.num_blocks
    groups, shapes, dtypes = [], set(), set()
    for group in kv_cache_config.transfer_groups:
        regions: dict[int, CacheRegion] = {}  # layers that share a cache have one
        layers: list[int] = []
        cells: set[Cells | None] = set()
        for name in sorted((name for name in group.layer_names if name in kv_caches), key=_order):
            cache = kv_caches[name]
            region = _region(name, cache, count)
            if region.address not in regions:
                regions[region.address] = region
                layers.append(_layer(name, len(layers)))
                cells.add(_cells(name, cache, group.kv_cache_spec, engine))
            shapes.add("x".join(map(str, cache.shape[1:])))
            dtypes.add(str(cache.dtype).removeprefix("torch."))
        if layers != sorted(layers):  # several models, each with layers of its own
            layers = list(range(len(layers)))
        groups.append(
            CacheGroup(
                group.kv_cache_spec.block_size,
                tuple(regions.values()),
                cells.pop() if len(cells) == 1 else None,
                tuple(layers),
                _layers_total(layers, engine),
            )
        )
    axes = kv_cache_config.kv_cache_layout or "unnamed"
    ranks, rank = (Ranks(), 0) if engine is None else (engine.ranks, engine.rank)
    stage, tensor = divmod(rank, ranks.tensor)
    return CacheLayout(
        groups=tuple(groups),
        dtype="+".join(sorted(dtypes)),
        kv_layout=f"{axes} {'+'.join(sorted(shapes))}"[:64],
        tensor_parallel_size=ranks.tensor,
        tensor_parallel_rank=tensor,
        pipeline_parallel_size=ranks.pipeline,
        pipeline_parallel_rank=stage,
    )


def _layers_total(layers: list[int], engine: Engine | None) -> int:
    if engine is None or engine.ranks.pipeline == 1:
        return len(set(layers))
    return int(engine.config.model_config.get_total_num_hidden_layers())


def _cells(name: str, cache: Any, spec: Any, engine: Engine | None) -> Cells | None:
    """What a block of this layer holds, if its backend is one that we know."""
    layers = {} if engine is None else engine.config.compilation_config.static_forward_context
    if engine is None or name not in layers:
        return None
    backend = layers[name].get_attn_backend().get_name()
    if backend == "CPU_MLA" and (cache.ndim == 3 or cache.shape[1] == 1):
        return Cells("HN", 1, cache.shape[-2])
    if backend == "CPU_ATTN" and cache.ndim == 4 and _transposes(spec, cache, engine):
        return Cells("HTN", _heads_total(spec, engine), cache.shape[2], 2, cache.element_size())
    return None


def _transposes(spec: Any, cache: Any, engine: Engine) -> bool:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype = engine.config.cache_config.cache_dtype
    kernel = _get_attn_isa(cache.dtype, spec.block_size, spec.head_size, dtype)
    return (
        kernel in TRANSPOSING
        and cache.dtype == engine.config.model_config.dtype
        and spec.head_size == spec.head_size_v
        and tuple(cache.shape[1::2]) == (spec.num_kv_heads, 2 * spec.head_size)
    )


def _heads_total(spec: Any, engine: Engine) -> int:
    """KV heads of the whole model: fewer than ranks where each is held by several."""
    total = int(engine.config.model_config.get_total_num_kv_heads())
    return min(total, int(spec.num_kv_heads) * engine.ranks.tensor)


def _region(name: str, cache: Any, count: int) -> CacheRegion:
    parts = cache.shape[0] // count
    item_bytes = cache.element_size()
    block_bytes = prod(cache.shape[1:]) * item_bytes
    stride_bytes = cache.stride(0) * item_bytes
    dense = cache[0].is_contiguous() and (parts == 1 or stride_bytes == block_bytes)
    if cache.shape[0] != parts * count or not dense:
        raise ConfigurationError(
            f"KV cache of {name}",
            f"shape {tuple(cache.shape)}, strides {cache.stride()}",
            f"{count} dense blocks; set VLLM_KV_CACHE_LAYOUT to a layer-compact layout",
        )
    device = -1 if cache.device.type == "cpu" else (cache.device.index or 0)
    return CacheRegion(
        address=cache.data_ptr(),
        block_bytes=block_bytes * parts,
        block_count=count,
        device=device,
        block_stride_bytes=stride_bytes * parts,
    )


def _order(name: str) -> list[tuple[int, str]]:
    """Layers by number, so that layer 2 comes before layer 10 at both engines."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _layer(name: str, otherwise: int) -> int:
    """The layer's number, counted over all pipeline stages."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else otherwise
