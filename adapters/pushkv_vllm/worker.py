"""The worker half: owns the runtime, over the KV cache of its rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from attrs import evolve

from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.core.events import EngineEvent
from pushkv.core.ids import EngineId
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion

from . import CORES
from .channel import Endpoint, StepMetadata, StepReports, publish, withdraw
from .config import Options
from .identity import model_identity
from .log import join, logger

if TYPE_CHECKING:
    from pushkv.runtime import Runtime

__all__ = ["WorkerHalf", "cache_layout"]

EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104  - recognized, not listened on

_still_written: list[Mapping[str, Any]] = []
"""KV caches of runtimes that stopped with WRITEs open: never freed while the process lives."""


class WorkerHalf:
    """See the module. Every method is called by `PushKVConnector` on the model runner's thread.

    Args:
        options: The engine's options.
        vllm_config: The engine's `VllmConfig`.
        kv_cache_config: The engine's `KVCacheConfig`.
    """

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any) -> None:
        self.options = options
        self.endpoint: Endpoint | None = None
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._runtime: Runtime | None = None
        self._end_metrics: Callable[[], None] = lambda: None
        self._kv_caches: Mapping[str, Any] = {}

    def start(self, kv_caches: Mapping[str, Any]) -> None:
        """Start the runtime over `kv_caches`; returns when it listens.

        Args:
            kv_caches: Tensor of each layer, shape (blocks, ...), any dtype, on one device.

        Raises:
            ConfigurationError: The cache has a geometry that pushkv does not know, or an option is
                wrong.
            TransportError: The transport cannot start; the message says what to do.
        """
        if self._runtime is not None:
            raise LocalProtocolError("register_kv_caches was called twice")
        from pushkv.runtime import Runtime, RuntimeConfig, new_incarnation
        from pushkv.transport import load_transport

        join()
        config, options = self._vllm_config, self.options
        layout = cache_layout(self._kv_cache_config, kv_caches)
        blocks = self._kv_cache_config.num_blocks
        policy = evolve(
            options.policy,
            exposed_blocks=options.exposed_blocks(blocks),
            pinned_blocks=options.pinned_blocks(blocks),
        )
        engine = EngineId(config.kv_transfer_config.engine_id)
        incarnation = new_incarnation()
        runtime = Runtime(
            RuntimeConfig(
                engine=engine,
                incarnation=incarnation,
                rank=0,
                listen_host=options.listen_host,
                listen_port=self._port(options.port),
                advertise_host=_advertised(options),
                credentials=options.credentials,
                plaintext=options.plaintext,
                model=model_identity(config, options.model, options.weights_epoch),
                layout=layout,
                policy=policy,
                cores=CORES,
                is_gone=options.is_gone,
                trace_path=options.trace_path,
            ),
            load_transport(options.transport, options.transport_options),
        )
        self._serve_metrics(runtime, engine)
        runtime.start()
        host, port = runtime.address
        self._runtime, self._kv_caches = runtime, kv_caches
        self.endpoint = Endpoint(engine, incarnation, host, port)
        publish(incarnation, runtime.bridge, runtime.counters)
        logger.info("pushkv: engine %s listens on %s:%d", engine, host, port)

    def _serve_metrics(self, runtime: Runtime, engine: EngineId) -> None:
        port = self._port(self.options.metrics_port)
        if port:
            from pushkv.observe.metrics import RuntimeCollector, serve_metrics

            collector = RuntimeCollector(runtime, engine, rank=0)
            self._end_metrics = serve_metrics(collector, self.options.listen_host, port)

    def _port(self, port: int) -> int:
        return port + self._vllm_config.parallel_config.data_parallel_index if port else 0

    def submit(self, events: Iterable[EngineEvent]) -> None:
        """Hand the runtime what the scheduler half sent with a step."""
        for event in events:
            self._running.bridge.submit(event)

    def step_over(self, metadata: StepMetadata) -> StepReports | None:
        """What the scheduler half asked to be told of this step."""
        reports = tuple(self._running.bridge.take()) if metadata.relayed else ()
        return StepReports(reports, metadata.number) if reports or metadata.number else None

    @property
    def _running(self) -> Runtime:
        assert self._runtime is not None, "register_kv_caches was not called"
        return self._runtime

    def stop(self) -> None:
        """Stop the runtime; blocks for at most the stop timeout."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        assert self.endpoint is not None
        withdraw(self.endpoint.incarnation)
        self._end_metrics()
        if not runtime.stop(self.options.stop_timeout_s):
            logger.warning("pushkv: stopped with WRITEs open; the KV cache stays until exit")
            _still_written.append(self._kv_caches)
        self._kv_caches = {}


def _advertised(options: Options) -> str:
    """The name by which peers reach this engine."""
    if options.advertise_host is not None:
        return options.advertise_host
    if options.listen_host not in EVERY_ADDRESS:
        return options.listen_host
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def cache_layout(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> CacheLayout:
    """The geometry of an engine's KV cache.

    vLLM gives each layer a view of shape (blocks, ...) whose blocks are dense, at one stride. A
    backend may cut a block of the scheduler into several of its own; these follow one another.

    Args:
        kv_cache_config: The engine's `KVCacheConfig`.
        kv_caches: Tensor of each layer.

    Raises:
        ConfigurationError: The blocks of a layer are not dense.
    """
    count = kv_cache_config.num_blocks
    groups, shapes, dtypes = [], set(), set()
    for group in kv_cache_config.transfer_groups:
        regions: dict[int, CacheRegion] = {}  # layers that share a cache have one
        for name in sorted((name for name in group.layer_names if name in kv_caches), key=_order):
            cache = kv_caches[name]
            region = _region(name, cache, count)
            regions.setdefault(region.address, region)
            shapes.add("x".join(map(str, cache.shape[1:])))
            dtypes.add(str(cache.dtype).removeprefix("torch."))
        groups.append(CacheGroup(group.kv_cache_spec.block_size, tuple(regions.values())))
    axes = kv_cache_config.kv_cache_layout or "unnamed"
    return CacheLayout(
        groups=tuple(groups),
        dtype="+".join(sorted(dtypes)),
        kv_layout=f"{axes} {'+'.join(sorted(shapes))}"[:64],
    )


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
