"""vLLM's offloading to host memory where the KV cache is in host memory already.

vLLM's own copies need a GPU. Everything else of it, the connector, its scheduler half and the
manager of what is offloaded, is vLLM's. The engine finds this by `spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies blocks at once, and says so when it is asked."""

    def __init__(self, caches: CanonicalKVCaches, count: int) -> None:
        self.cache = [each.tensor for each in caches.tensors]
        self.host = [torch.zeros((count, each.shape[1]), dtype=each.dtype) for each in self.cache]
        self.over: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the cache."""
        return self._copy(job_id, self.cache, src_spec, self.host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Into the cache."""
        return self._copy(job_id, self.host, src_spec, self.cache, dst_spec)

    def _copy(self, job_id: int, sources: Any, src: Any, targets: Any, dst: Any) -> bool:
        there, here = torch.from_numpy(dst.block_ids).long(), torch.from_numpy(src.block_ids).long()
        assert len(there) == len(here)
        for source, target in zip(sources, targets, strict=True):
            target[there] = source[here]
        self.over.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        """What is over since the last call."""
        over, self.over = self.over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is over when it was submitted."""


class HostOffloadingSpec(CPUOffloadingSpec):
    """`CPUOffloadingSpec` with the copies above."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank."""
        return HostWorker(kv_caches, self.num_chunks)
