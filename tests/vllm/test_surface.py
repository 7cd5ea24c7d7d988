"""Both supported vLLM versions' connector surface against the class, and what it refuses at start.

`connector_surface.json` holds the signatures of vLLM's base classes, read from its sources.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm.harness import BLOCK, kv_cache_config, vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    supports_hma,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import NO_BLOCK, block_count
from pushkv.rank_plan import Ranks
from pushkv_vllm import PushKVConnector, register
from pushkv_vllm.blocks import held, numbers
from pushkv_vllm.config import Options
from pushkv_vllm.geometry import cache_layout
from pushkv_vllm.worker import WorkerHalf

pytestmark = pytest.mark.vllm

SURFACE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "connector_surface.json").read_text()
)
VERSIONS = sorted(SURFACE)
METHODS = {
    version: {name: each for base in SURFACE[version].values() for name, each in base.items()}
    for version in VERSIONS
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_abstract_method_is_there(version: str) -> None:
    abstract = {name for name, each in METHODS[version].items() if each["abstract"]}
    own = set(vars(PushKVConnector))
    assert abstract
    assert abstract <= own


@pytest.mark.parametrize("version", VERSIONS)
def test_every_method_takes_what_vllm_passes(version: str) -> None:
    checked = 0
    for name, theirs in METHODS[version].items():
        if name not in vars(PushKVConnector):
            continue
        own = inspect.getattr_static(PushKVConnector, name)
        assert isinstance(own, classmethod) == (theirs["kind"] == "classmethod"), name
        assert isinstance(own, property) == (theirs["kind"] == "property"), name
        signature = inspect.signature(own.__func__ if isinstance(own, classmethod) else own)
        names = [
            each.name
            for each in signature.parameters.values()
            if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        assert names == theirs["arguments"], name
        takes_more = any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()
        )
        assert takes_more == (theirs["keywords"] is not None), name
        checked += 1
    assert checked >= 20


def test_no_public_method_is_unknown_to_the_newest_version() -> None:
    """A hook that vLLM renamed would be dead code here."""
    public = {
        name
        for name, each in vars(PushKVConnector).items()
        if not name.startswith("_") and (callable(each) or isinstance(each, classmethod))
    }
    assert public <= set(METHODS[VERSIONS[-1]])


def test_the_hybrid_manager_stays_on() -> None:
    assert supports_hma(PushKVConnector)


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("PushKVConnector") is PushKVConnector


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_unknown_option_stops_the_engine_at_start(role: KVConnectorRole) -> None:
    with pytest.raises(ConfigurationError, match=r"laese_s.*lease_s"):
        PushKVConnector(vllm_config(laese_s=3), role, kv_cache_config())


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_ranks_that_share_a_sequence_are_refused_at_start(role: KVConnectorRole) -> None:
    config = vllm_config()
    config.parallel_config = SimpleNamespace(decode_context_parallel_size=2)
    with pytest.raises(ConfigurationError, match="decode_context_parallel_size = 2"):
        PushKVConnector(config, role, kv_cache_config())


FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
CHUNKED_LOCAL = ChunkedLocalAttentionSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
)
STATE = MambaSpec(block_size=BLOCK, shapes=((4, 64),), dtypes=(torch.float32,))


@pytest.mark.parametrize("spec", [CHUNKED_LOCAL, STATE], ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_groups_of_another_kind_are_refused_at_start(role: KVConnectorRole, spec: Any) -> None:
    groups = [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], spec)]
    caches = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(ConfigurationError, match=rf"{type(spec).__name__}.*hybrid"):
        PushKVConnector(vllm_config(), role, caches)


class Stranger(KVConnectorHandshakeMetadata):
    """What a connector beside ours would say of where it listens."""


def test_what_another_connector_says_of_itself_is_refused_at_start() -> None:
    ours = PushKVConnector(vllm_config(), KVConnectorRole.SCHEDULER, kv_cache_config())
    with pytest.raises(ConfigurationError, match="connectors = 'Stranger'"):
        ours.set_xfer_handshake_metadata_pp_aware({(0, 0): Stranger()})


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(2), Ranks(2, 2)])
def test_every_worker_of_a_group_has_its_own_port_and_file(ranks: Ranks) -> None:
    ports, files = [], []
    for engine in range(3):
        config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=engine))
        half = WorkerHalf(Options(), config, kv_cache_config())
        for rank in range(ranks.count):
            ports.append(half._port(7_000, rank, ranks))
            files.append(half._own_file(Path("/run/trace.ndjson"), rank, ranks))
            assert half._port(0, rank, ranks) == 0
            assert half._own_file(None, rank, ranks) is None
    assert ports == list(range(7_000, 7_000 + 3 * ranks.count))
    assert len(set(files)) == len(files)


def test_the_null_block_is_no_block() -> None:
    """It stands where a block left a sliding window, and no engine may write into it."""
    pool = BlockPool(8, enable_caching=False, hash_block_size=BLOCK)
    assert pool.blocks[0].is_null
    assert numbers([0, 0, 3], pool) == (NO_BLOCK, NO_BLOCK, 3)
    assert numbers([5, 3], pool) == (5, 3)
    assert [each.block_id for each in held(((NO_BLOCK, 3), (2,)), pool)] == [3, 2]
    assert block_count(((NO_BLOCK, 3), (2,))) == 2


# -- the geometry of real tensors


def caches(count: int = 10, layers: int = 12) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Layers as vLLM lays them out: views [blocks, heads, tokens, 2 * size] of one allocation."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    names = [f"model.layers.{layer}.attn" for layer in range(layers)]
    config = KVCacheConfig(
        num_blocks=count, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )
    storage = torch.zeros(layers, count, 2, BLOCK, 64)
    return config, dict(zip(names, storage, strict=True))


def test_a_layout_names_every_block_of_every_layer_in_the_order_of_the_layers() -> None:
    config, tensors = caches()
    layout = cache_layout(config, dict(reversed(tensors.items())))
    (group,) = layout.groups
    assert group.block_tokens == BLOCK
    assert [region.address for region in group.regions] == [
        tensor.data_ptr() for tensor in tensors.values()
    ]
    for region, tensor in zip(group.regions, tensors.values(), strict=True):
        assert region.block_bytes == tensor[0].nbytes
        assert region.block_count == 10
        assert region.address + 3 * region.block_stride_bytes == tensor[3].data_ptr()
        assert region.device == -1
    assert layout.dtype == "float32"


def test_layers_that_share_a_cache_are_written_once() -> None:
    config, tensors = caches(layers=2)
    shared = dict.fromkeys(tensors, tensors["model.layers.0.attn"])
    assert len(cache_layout(config, shared).groups[0].regions) == 1


def test_a_backend_with_smaller_blocks_is_seen_in_the_schedulers_blocks() -> None:
    config, tensors = caches()
    halves = {name: each.reshape(20, 2, BLOCK // 2, 64) for name, each in tensors.items()}
    whole, split = cache_layout(config, tensors), cache_layout(config, halves)
    assert split.groups == whole.groups
    assert split.description() != whole.description(), (
        "the bytes inside a block are in another order"
    )


def test_interleaved_layers_keep_their_stride() -> None:
    config, _ = caches(layers=2)
    storage = torch.zeros(10, 2, 2, BLOCK, 64)
    tensors = {f"model.layers.{layer}.attn": storage[:, layer] for layer in range(2)}
    regions = cache_layout(config, tensors).groups[0].regions
    assert regions[1].address - regions[0].address == regions[0].block_bytes
    assert regions[0].block_stride_bytes == 2 * regions[0].block_bytes


def test_blocks_that_are_not_dense_are_refused() -> None:
    config, tensors = caches()
    scattered = {name: each.transpose(1, 2) for name, each in tensors.items()}
    with pytest.raises(ConfigurationError, match=r"KV cache of model\.layers\.0\.attn"):
        cache_layout(config, scattered)
