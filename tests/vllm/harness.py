"""The real vLLM scheduler with both halves of `PushKVConnector`, a scripted runtime and no model.

`Engine.step` is one turn of EngineCore's loop: schedule, the worker's connector hooks in vLLM's
order, and an output whose sampled tokens are made up. What crosses the process border is pickled.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import tempfile
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from attrs import evolve
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.events import (
    Arrived,
    Cancelled,
    Computed,
    EngineEvent,
    Offered,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
)
from pushkv.core.ids import EngineId, Incarnation, TransferId
from pushkv.core.messages import Reason
from pushkv.runtime.steps import Steps
from pushkv_vllm import PushKVConnector
from pushkv_vllm.bell import Bell
from pushkv_vllm.channel import Endpoint, publish, withdraw
from pushkv_vllm.identity import prompt_digest
from vllm import SamplingParams

BLOCK = 16
"""Tokens per block."""
LAYER = "layer.0"
ABORTED = RequestStatus.FINISHED_ABORTED
Writes = dict[tuple[int, int], tuple[int, int]]
"""Block and place in it → position in a prompt and its token."""
_incarnations = itertools.count(1)


class ScriptedBridge:
    """A runtime's bridge that reports what a test says, and refuses what no engine may submit."""

    def __init__(self) -> None:
        self.submitted: list[EngineEvent] = []
        self.reports: deque[Report] = deque()
        self.attempts: dict[int, Offered] = {}
        self.prefills: dict[TransferId, str] = {}
        self.digests: dict[TransferId, bytes] = {}
        self.on_computed: Callable[[Computed], None] = lambda event: None
        self.on_delivered: Callable[[Offered], None] = lambda offered: None
        self.ended: set[int] = set()
        self.listener: Callable[[], None] = lambda: None

    def submit(self, event: EngineEvent) -> None:
        self.submitted.append(event)
        match event:
            case Offered():
                assert event.attempt > max(self.attempts, default=0), "an attempt number came twice"
                self.attempts[event.attempt] = event
            case Arrived():
                assert event.transfer not in self.prefills, "a transfer arrived twice"
                self.prefills[event.transfer] = "queued"
                self.digests[event.transfer] = event.prompt_digest
            case Computed():
                assert self.prefills[event.transfer] != "over", "a prefill ended twice"
                self.prefills[event.transfer] = "over" if event.final else "running"
                self.on_computed(event)
            case PrefillPreempted():
                assert self.prefills[event.transfer] == "running"
                self.prefills[event.transfer] = "preempted"
            case PrefillResumed():
                assert self.prefills[event.transfer] == "preempted"
                self.prefills[event.transfer] = "running"
            case PrefillAborted():
                assert self.prefills[event.transfer] != "over", "a prefill ended twice"
                self.prefills[event.transfer] = "over"
            case Cancelled():
                assert any(each.transfer == event.transfer for each in self.attempts.values())
            case _:
                raise AssertionError(f"unexpected {event}")

    def take(self, limit: int = 1024) -> list[Report]:
        taken: list[Report] = []
        while self.reports and len(taken) < limit:
            taken.append(self.reports.popleft())
        return taken

    def wait(self, bound_s: float) -> bool:
        until = time.monotonic() + bound_s
        while not self.reports and time.monotonic() < until:
            time.sleep(0.0005)
        return bool(self.reports)

    def on_report(self, call: Callable[[], None]) -> None:
        self.listener = call

    def report(self, report: Report) -> None:
        self.reports.append(report)
        self.listener()

    @property
    def computed(self) -> list[Computed]:
        """The prefills that are over."""
        return [event for event in self.of(Computed) if event.final]

    def yield_source(self, transfer: TransferId) -> None:
        self.report(SourceYielded(transfer))

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.submitted if type(event) is kind]

    def deliver(self, offered: Offered, *, release: bool = True) -> None:
        if offered.attempt not in self.ended:
            self.ended.add(offered.attempt)
            self.on_delivered(offered)
        self.report(Delivered(offered.transfer, offered.attempt))
        if release:
            self.release(offered)

    def fail(
        self, offered: Offered, reason: Reason = Reason.ABORTED, *, retry: bool = False
    ) -> None:
        self.ended.add(offered.attempt)
        self.report(NotDelivered(offered.transfer, offered.attempt, reason, retry))

    def release(self, offered: Offered) -> None:
        self.report(BlocksReleased(offered.transfer, offered.attempt))

    def retry(self, offered: Offered) -> None:
        self.report(RetryDue(offered.transfer, offered.attempt))

    def release_source(self, transfer: TransferId) -> None:
        self.report(SourceReleased(transfer, None))
        del self.prefills[transfer]


class ScriptedRuntime:
    def __init__(self, bridge: ScriptedBridge) -> None:
        self.bridge = bridge
        self.steps = Steps()


@functools.cache
def _model() -> ModelConfig:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 1_000,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    folder = Path(tempfile.mkdtemp(prefix="pushkv-"))
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=2_048
    )
    init_none_hash(sha256)
    return model


def vllm_config(
    role: str = "kv_both", policy: str = "recompute", blocks: int = 100, **extra: object
) -> VllmConfig:
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    return VllmConfig(
        model_config=_model(),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=2_048,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PushKVConnector",
            kv_connector_module_path="pushkv_vllm",
            kv_role=role,
            engine_id="engine",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
        device_config=DeviceConfig("cpu"),
    )


def kv_cache_config(blocks: int = 100, groups: int = 1) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{g}"], spec) for g in range(groups)],
    )


class Engine:
    """One engine; see the module."""

    def __init__(
        self,
        role: str = "kv_both",
        policy: str = "recompute",
        blocks: int = 100,
        direct: bool = True,
        ahead: int = 0,
        **extra: object,
    ) -> None:
        config = vllm_config(role, policy, blocks, **extra)
        caches = kv_cache_config(blocks)
        self.bridge = ScriptedBridge()
        self.counters: Counter[str] = Counter()
        self.worker = PushKVConnector(config, KVConnectorRole.WORKER, caches)
        half = self.worker.worker_half
        assert half is not None
        self.runtime = ScriptedRuntime(self.bridge)
        half._runtime = self.runtime  # type: ignore[assignment]
        half._kv_caches = {LAYER: torch.zeros(1)}
        self.running: defaultdict[int, list[Computed]] = defaultdict(list)
        bell = Bell()
        weakref.finalize(self, bell.close)
        self.bridge.on_report(bell.ring)
        endpoint = Endpoint(
            EngineId("engine"),
            Incarnation(next(_incarnations)),
            "127.0.0.1",
            4711,
            bell=bell.address,
        )
        half.endpoint = endpoint
        if direct:
            publish(endpoint.incarnation, self.bridge, self.counters)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))}
        )
        withdraw(endpoint.incarnation)
        self.half = self.connector.scheduler_half
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.total = self.pool.get_num_free_blocks()
        self.finish_reasons: dict[str, str] = {}
        self.responses: dict[str, dict[str, Any] | None] = {}
        self.told: list[tuple[str, bool]] = []
        self.abort_in_step: str | None = None
        self.ahead = ahead
        self.under_way: deque[tuple[Any, Writes, list[str]]] = deque()
        self.prompts: dict[bytes, list[int]] = {}
        self.content: Writes = {}
        """What every place of every block holds: a position of some prompt, and its token."""
        self.bridge.on_computed = self._check
        self.bridge.on_delivered = self._written

    # -- what EngineCore does

    def add(
        self,
        request_id: str,
        prompt: int | list[int],
        params: object = None,
        max_tokens: int = 1,
        **more: Any,
    ) -> Request:
        tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **more,
        )
        self.scheduler.add_request(request)
        self.prompts[prompt_digest(request)] = tokens
        return request

    def step(self) -> Any:
        """One turn of EngineCore's loop. Returns the scheduler's output.

        Up to `ahead` steps are scheduled before the first of them is computed.
        """
        output = self.scheduler.schedule()
        ends = [name for name in output.num_scheduled_tokens if self._computes_last_token(name)]
        self.under_way.append((output, self._writes(output), ends))
        while len(self.under_way) > (self.ahead if output.total_num_scheduled_tokens else 0):
            self._compute(*self.under_way.popleft())
        return output

    def _writes(self, output: Any) -> Writes:
        """What a step writes, and where."""
        writes = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            end = request.num_computed_tokens
            for at in range(end - count, min(end, request.num_prompt_tokens)):
                place = (table[at // BLOCK], at % BLOCK)
                writes[place] = (at, request.prompt_token_ids[at])
        return writes

    def _written(self, offered: Offered) -> None:
        """A producer has written an attempt's blocks, which a prefix cache may give to others."""
        prompt = self.prompts.get(offered.prompt_digest, ())
        (blocks,) = offered.blocks
        for at in range(offered.start, min(offered.end, len(prompt))):
            block, place = divmod(at - offered.start, BLOCK)
            self.content[blocks[block], place] = (at, prompt[at])

    def _check(self, event: Computed) -> None:
        """What is announced as computed is there, or will be when its step is over."""
        if event.step and not self.runtime.steps[event.step].is_over:
            self.running[event.step].append(event)
            return
        prompt = self.prompts[self.bridge.digests[event.transfer]]
        (blocks,) = event.blocks
        for at in range(event.tokens):
            place = (blocks[at // BLOCK], at % BLOCK)
            assert self.content.get(place) == (at, prompt[at]), f"token {at} is not in {place}"
            assert self.pool.blocks[place[0]].ref_cnt > 0, f"{place} is free"

    def _compute(self, output: Any, writes: Writes, ends: list[str]) -> None:
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self.worker.bind_connector_metadata(metadata)
        self.content.update(writes)
        self.worker.start_load_kv(None)
        if metadata.number in self.running:
            self._by_layer(metadata.number)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        reports = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        assert results.failed_recving <= results.finished_recving
        assert not results.finished_sending
        self.told += [(name, name in results.failed_recving) for name in results.finished_recving]
        if self.abort_in_step is not None:
            self.abort(self.abort_in_step)
            self.abort_in_step = None
        self._update(output, ends, results, reports)

    def _by_layer(self, number: int) -> None:
        """What was announced with this step exists when the worker says that the layer does."""
        half = self.worker.worker_half
        assert half is not None
        step, layer = self.runtime.steps[number], half._kv_caches[LAYER]
        assert step.exists((layer.data_ptr(),)) is None
        self.worker.save_kv_layer(LAYER, layer, None)
        exists = step.exists((layer.data_ptr(),))
        assert exists is not None
        assert exists()
        assert not step.is_over
        for event in self.running.pop(number):
            self._check(evolve(event, step=0))

    def _update(self, output: Any, ends: list[str], results: Any, reports: Any) -> None:
        scheduled = list(output.num_scheduled_tokens)
        produced = [[7] if name in ends else [] for name in scheduled]
        outputs = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=scheduled,
                req_id_to_index={name: index for index, name in enumerate(scheduled)},
                sampled_token_ids=produced,
                kv_connector_output=KVConnectorOutput(
                    finished_recving=results.finished_recving,
                    failed_recving=results.failed_recving,
                    kv_connector_worker_meta=pickle.loads(pickle.dumps(reports)),
                ),
            ),
        )
        for each in outputs.values():
            for one in each.outputs:
                if one.finish_reason is not None:
                    self.finish_reasons[one.request_id] = str(one.finish_reason)
                    self.responses[one.request_id] = one.kv_transfer_params

    def _computes_last_token(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and request.num_computed_tokens >= request.num_tokens

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, ABORTED)

    def preempt(self) -> None:
        """What vLLM does where a request that runs longer needs blocks."""
        self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0, drop_stale_output=True)

    def run(self, most: int = 200) -> int:
        """Step while vLLM would. Returns the number of steps."""
        for steps in range(most):
            if not self.scheduler.has_requests():
                return steps
            self.step()
        raise AssertionError("the engine never comes to rest")

    # -- what tests ask

    def status(self, request_id: str) -> RequestStatus:
        return self.scheduler.requests[request_id].status

    @property
    def used(self) -> int:
        """Blocks that are not free."""
        return int(self.total - self.pool.get_num_free_blocks())

    @property
    def offered(self) -> Offered:
        """The last offer of blocks."""
        event: Offered = self.bridge.of(Offered)[-1]
        return event


def remote(transfer: str = "t1", **more: object) -> dict[str, object]:
    """The parameters of a decode leg."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "10.0.0.1",
        "remote_port": 4_711,
        "transfer_id": transfer,
        **more,
    }


def prefill(transfer: str | None = "t1", **more: object) -> dict[str, object]:
    """The parameters of a prefill leg."""
    named = {} if transfer is None else {"transfer_id": transfer}
    return {"do_remote_decode": True, "do_remote_prefill": False, **named, **more}
