"""The worker half: owns the runtime, over the KV cache of its rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.core.ids import EngineId, Incarnation
from pushkv.core.machines import Observer, StepRecord
from pushkv.core.policy import Policy
from pushkv.observe.phases import Phases
from pushkv.rank_plan import Ranks

from . import CORES
from .bell import Bell
from .channel import Endpoint, StepMetadata, StepReports, publish, withdraw
from .config import Options
from .geometry import Engine, cache_layout
from .identity import model_identity
from .log import join, logger

if TYPE_CHECKING:
    from pushkv.observe.spans import Spans
    from pushkv.runtime import Runtime

__all__ = ["WorkerHalf", "engine_ranks"]

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
        self.rank: int = 0
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._runtime: Runtime | None = None
        self._end_metrics: Callable[[], None] = lambda: None
        self._spans: Spans | None = None
        self._bell: Bell | None = None
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
        ranks, rank = engine_ranks(config), 0
        incarnation = new_incarnation()
        if ranks.count > 1:
            rank, incarnation = _agree(incarnation)
            if not options.port and config.kv_transfer_config.is_kv_producer:
                raise ConfigurationError("port", 0, "a port: rank r listens at port + r")
        layout = cache_layout(self._kv_cache_config, kv_caches, Engine(config, ranks, rank))
        blocks = self._kv_cache_config.num_blocks
        policy = evolve(
            options.policy,
            exposed_blocks=options.exposed_blocks(blocks),
            pinned_blocks=options.pinned_blocks(blocks),
        )
        engine = EngineId(config.kv_transfer_config.engine_id)
        phases = Phases(time.monotonic_ns) if options.metrics_port else None
        self._spans = spans = _spans(options.otel_endpoint, engine, rank, policy)
        runtime = Runtime(
            RuntimeConfig(
                engine=engine,
                incarnation=incarnation,
                rank=rank,
                listen_host=options.listen_host,
                listen_port=self._port(options.port, rank, ranks),
                advertise_host=_advertised(options),
                credentials=options.credentials,
                plaintext=options.plaintext,
                model=model_identity(config, options.model, options.weights_epoch),
                layout=layout,
                policy=policy,
                write_budget_bytes=options.write_budget_bytes,
                cores=CORES,
                is_gone=options.is_gone,
                admin_socket=self._own_file(options.admin_socket, rank, ranks),
                admin_port=self._port(options.admin_port, rank, ranks),
                trace_path=self._own_file(options.trace_path, rank, ranks),
                observer=_both(
                    None if phases is None else phases.step,
                    None if spans is None else spans.observe,
                ),
                lives=None if phases is None else phases.life,
            ),
            load_transport(options.transport, options.transport_options),
        )
        self._serve_metrics(runtime, engine, rank, ranks, phases)
        runtime.start()
        host, port = runtime.address
        self._runtime, self._kv_caches = runtime, kv_caches
        self.rank = rank
        self._bell = bell = Bell()
        runtime.bridge.on_report(bell.ring)
        self.endpoint = Endpoint(engine, incarnation, host, port, layout.heads, bell.address)
        if ranks.count == 1:
            publish(incarnation, runtime.bridge, runtime.counters)
        logger.info("pushkv: engine %s listens on %s:%d", engine, host, port)

    def _serve_metrics(
        self, runtime: Runtime, engine: EngineId, rank: int, ranks: Ranks, phases: Phases | None
    ) -> None:
        port = self._port(self.options.metrics_port, rank, ranks)
        if port:
            from pushkv.observe.metrics import RuntimeCollector, serve_metrics

            collector = RuntimeCollector(runtime, engine, rank, phases)
            self._end_metrics = serve_metrics(collector, self.options.listen_host, port)

    def _port(self, port: int, rank: int, ranks: Ranks) -> int:
        return port + self._number(rank, ranks) if port else 0

    def _number(self, rank: int, ranks: Ranks) -> int:
        """Which of all workers of a data-parallel group this one is."""
        engine: int = self._vllm_config.parallel_config.data_parallel_index
        return engine * ranks.count + rank

    def _own_file(self, path: Path | None, rank: int, ranks: Ranks) -> Path | None:
        """A file for each rank of several, and for each engine of a group but the first."""
        number = self._number(rank, ranks)
        if path is None or (ranks.count == 1 and not number):
            return path
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    def submit(self, metadata: StepMetadata) -> None:
        """Hand the runtime what the scheduler half sent with a step."""
        for event in metadata.commands:
            self._running.bridge.submit(event)
        for rank, event in metadata.said:
            if rank == self.rank:
                self._running.bridge.submit(event)

    def computed(self, number: int, layer_name: str) -> None:
        """A layer has been computed in the step of that number, or will have been by its device."""
        cache = self._kv_caches.get(layer_name)
        if number and cache is not None:
            self._running.steps[number].computed(cache.data_ptr(), *_exists(cache.device))

    def all_computed(self, metadata: StepMetadata) -> None:
        """All layers have, or will have been; those too round which vLLM calls no hook."""
        if not metadata.number:
            return
        device = next(iter(self._kv_caches.values())).device
        self._running.steps[metadata.number].end(*_exists(device))
        for event in metadata.completed:
            self._running.bridge.submit(event)

    def step_over(self, metadata: StepMetadata) -> StepReports | None:
        """What the scheduler half asked to be told of this step."""
        taken = self._running.bridge.take() if metadata.relayed else []
        reports = tuple((self.rank, each) for each in taken)
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
        if self._bell is not None:
            self._bell.close()
        if not runtime.stop(self.options.stop_timeout_s):
            logger.warning("pushkv: stopped with WRITEs open; the KV cache stays until exit")
            _still_written.append(self._kv_caches)
        self._kv_caches = {}
        if self._spans is not None:
            self._spans.close()


def _both(one: Observer | None, other: Observer | None) -> Observer | None:
    if one is None or other is None:
        return one or other

    def observe(record: StepRecord) -> None:
        one(record)
        other(record)

    return observe


def _spans(endpoint: str | None, engine: EngineId, rank: int, policy: Policy) -> Spans | None:
    if endpoint is None:
        return None
    from pushkv.observe.spans import Spans, otlp_exporter

    return Spans(otlp_exporter(endpoint), engine, rank, policy.connect)


def _exists(device: Any) -> tuple[Callable[[], bool], ...]:
    """Says when all that is queued for `device` so far is done; nothing where that is now.

    Never tried on an accelerator.
    """
    if device.type == "cpu":
        return ()
    import torch

    event = torch.Event(device)
    event.record()
    return (event.query,)


def _advertised(options: Options) -> str:
    """The name by which peers reach this engine."""
    if options.advertise_host is not None:
        return options.advertise_host
    if options.listen_host not in EVERY_ADDRESS:
        return options.listen_host
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def engine_ranks(config: Any) -> Ranks:
    """The ranks of an engine with this `VllmConfig`."""
    parallel = config.parallel_config
    return Ranks(parallel.tensor_parallel_size, getattr(parallel, "pipeline_parallel_size", 1))


def _agree(incarnation: Incarnation) -> tuple[int, Incarnation]:
    """This worker's rank, and one incarnation for all workers: the first one's."""
    from vllm.distributed import get_pp_group, get_tp_group

    stages, group = get_pp_group(), get_tp_group()
    incarnation = group.broadcast_object(incarnation, src=0)
    if stages.world_size > 1:
        incarnation = stages.broadcast_object(incarnation, src=0)
    return stages.rank_in_group * group.world_size + group.rank_in_group, incarnation
