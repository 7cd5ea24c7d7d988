"""`PushKVConnector`: the class that vLLM loads. It only hands hooks to the half it was built as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pushkv.core.errors import ConfigurationError
from vllm import envs

from .channel import Endpoint, StepMetadata, StepReports
from .config import read_options
from .prefills import Streaming
from .scheduler import SchedulerHalf, Shape
from .stepping import Alarm
from .worker import WorkerHalf, engine_ranks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["PushKVConnector"]

UNSERVED_SIZES = (
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


class PushKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes KV cache from prefill to decode engines as prefill makes it.

    The scheduler half reads requests, pins blocks and keeps the books; the worker half owns the
    runtime. No hook of either blocks or polls.

    Raises:
        ConfigurationError: An option of `kv_connector_extra_config` is unknown or wrong, or the
            engine has a shape that this version does not serve.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        _refuse_unserved(vllm_config, kv_cache_config)
        self._layers_stream = options.streaming is Streaming.LAYERS
        self.scheduler_half: SchedulerHalf | None = None
        self.worker_half: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_half = SchedulerHalf(options, self._shape(kv_cache_config))
        else:
            self.worker_half = WorkerHalf(options, vllm_config, kv_cache_config)

    def _shape(self, kv_cache_config: KVCacheConfig) -> Shape:
        groups = kv_cache_config.transfer_group_ids
        return Shape(
            produces=self._kv_transfer_config.is_kv_producer,
            consumes=self._kv_transfer_config.is_kv_consumer,
            groups=tuple(groups),
            block_tokens=tuple(
                kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size for group in groups
            ),
            block_count=kv_cache_config.num_blocks,
            randomized=not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
            ranks=engine_ranks(self._vllm_config),
            steps_ahead=self._vllm_config.max_concurrent_batches,
        )

    @property
    def alarm(self) -> Alarm | None:
        """What an engine that waits listens to, if the runtime is in this process."""
        return None if self.scheduler_half is None else self.scheduler_half.alarm

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler_half is not None, "not the scheduler's instance"
        return self.scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker_half is not None, "not a worker's instance"
        return self.worker_half

    # -- scheduler half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Blocks are pinned here, apart from their requests."""
        self._scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Learn where the runtimes listen, by pipeline and tensor parallel rank.

        Raises:
            ConfigurationError: They are not ours: `MultiConnector` gives all of its connectors what
                the first of them that has anything to say says.
        """
        endpoints = [endpoint for _, endpoint in sorted(metadata.items())]
        for endpoint in endpoints:
            if not isinstance(endpoint, Endpoint):
                raise ConfigurationError(
                    "connectors",
                    type(endpoint).__name__,
                    "PushKVConnector without another connector that engines reach each other by",
                )
        self._scheduler.meet(endpoints)

    def on_new_request(self, request: Request) -> None:
        """Read the request's parameters; announce a prefill."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens will be pushed; changes nothing."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Every transferred group: vLLM must not zero blocks that a producer may already write."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Register the blocks, at once."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the worker reports and submits in this step."""
        return self._scheduler.step_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the reports that came from a worker in another process."""
        self._scheduler.step_output(connector_output.kv_connector_worker_meta)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are never left for vLLM to keep: what must stay is pinned."""
        return False, self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Only while events wait for a step that carries them to the worker's process."""
        return self.scheduler_half is not None and self.scheduler_half.pending()

    # -- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the runtime over the engine's KV cache."""
        self._worker.start(kv_caches)

    def get_handshake_metadata(self) -> Endpoint | None:
        """Where the runtime listens."""
        endpoint: Endpoint | None = self._worker.endpoint
        return endpoint

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Submit what the scheduler half sent with this step, before it computes anything."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker.submit(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: KV comes between steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: KV comes between steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """A layer of this step's KV exists, or will when its device has got so far."""
        metadata = self._connector_metadata
        if self._layers_stream and isinstance(metadata, StepMetadata):
            self._worker.computed(metadata.number, layer_name)

    def wait_for_save(self) -> None:
        """All of it does. Nothing is waited for: what is written stays pinned."""
        metadata = self._connector_metadata
        if self._layers_stream and isinstance(metadata, StepMetadata):
            self._worker.all_computed(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report what the scheduler half decided for this step."""
        results = KVConnectorTransferResults()
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata) and metadata.finished:
            results.finished_recving = set(metadata.finished)
            results.failed_recving = set(metadata.failed)
        return results

    def build_connector_worker_meta(self) -> StepReports | None:
        """That the step is over, where asked; reports, if the scheduler half is elsewhere."""
        metadata = self._connector_metadata
        return self._worker.step_over(metadata) if isinstance(metadata, StepMetadata) else None

    def shutdown(self) -> None:
        """Stop the runtime; waits, bounded, for WRITEs that are under way."""
        if self.worker_half is not None:
            self.worker_half.stop()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Where layers are streamed: what is replayed from a graph calls no hook."""
        return read_options(extra_config).streaming is Streaming.LAYERS

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: the transport's registration of the KV cache would not survive it."""
        return False


def _refuse_unserved(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse, loudly and at start, what would otherwise go wrong silently."""
    parallel = vllm_config.parallel_config
    for name in UNSERVED_SIZES:
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigurationError(name, size, "1 in this version of pushkv")
    lookahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
    if lookahead > 1:
        raise ConfigurationError(
            "num_prefill_lookahead_tokens",
            lookahead,
            "at most 1: no multi-module MTP in this version",
        )
    for group in kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        if not isinstance(spec, FullAttentionSpec) and type(spec) is not SlidingWindowSpec:
            raise ConfigurationError(
                "KV cache group",
                type(spec).__name__,
                "full attention or a sliding window; --disable-hybrid-kv-cache-manager may help",
            )
