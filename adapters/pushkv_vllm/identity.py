"""Who a request is, and who the model is: the only place of pushkv that parses a request id.

Both engines must come to the same transfer id for the two legs of one request, without talking to
each other first. A router that names the transfer (`transfer_id`) decides it. One that does not
still sends both legs the same ``X-Request-Id``, from which vLLM makes its own ids:

=====================  =====================================================
completion             ``cmpl-<X-Request-Id>-<index of the prompt>-<8 hex>``
chat completion        ``chatcmpl-<X-Request-Id>-<8 hex>``
`AsyncLLM.generate`    ``<request id>-<8 hex>``
one of n > 1 samples   ``<index of the sample>_<any of these>``
=====================  =====================================================

So the derived id names the router's request id, the prompt digest, the prompt's and the sample's
index. A wrong guess costs a transfer, never correctness: a producer refuses a registration whose
prompt digest is not the one it computed.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from attrs import frozen

from pushkv.core.ids import TransferId

__all__ = [
    "PromptRequest",
    "RequestName",
    "model_identity",
    "prompt_digest",
    "read_name",
    "transfer_id",
]

_SAMPLE = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)
_RANDOM = re.compile(r"(.+)-[0-9a-f]{8}", re.DOTALL)
_COMPLETION = re.compile(r"cmpl-(.+)-(\d{1,9})", re.DOTALL)
_CHAT = "chatcmpl-"

DIGEST_BYTES = 32
"""Length of a prompt digest in bytes."""
LOCAL_KEYS = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Entries of a model's configuration that say where it came from, not what it computes."""


class PromptRequest(Protocol):
    """What of `vllm.v1.request.Request` makes its prompt's KV cache what it is."""

    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Any
    lora_request: Any
    mm_features: Sequence[Any]
    cache_salt: str | None


@frozen
class RequestName:
    """An engine's request id, taken apart.

    Attributes:
        base: The request id that the caller gave.
        prompt: Index of the prompt in a completion request of several.
        sample: Index of the sample where a request asks for several (`n`).
    """

    base: str
    prompt: int = 0
    sample: int = 0


def read_name(request_id: str, *, randomized: bool = True) -> RequestName:
    """Take an engine's request id apart.

    Args:
        request_id: As the scheduler knows it.
        randomized: Whether vLLM appended its 8 random hexadecimal digits.
    """
    sample = 0
    if match := _SAMPLE.fullmatch(request_id):
        sample, request_id = int(match[1]), match[2]
    if randomized and (match := _RANDOM.fullmatch(request_id)):
        request_id = match[1]
    if match := _COMPLETION.fullmatch(request_id):
        return RequestName(match[1], int(match[2]), sample)
    return RequestName(request_id.removeprefix(_CHAT), 0, sample)


def transfer_id(given: str | None, name: RequestName, digest: bytes) -> TransferId:
    """The name of the hand-over, the same at both engines.

    Args:
        given: The `transfer_id` of the request's `kv_transfer_params`, if any.
        name: The request's name; at a consumer, `base` is the router's id of both legs.
        digest: The prompt digest.
    """
    if given is None:
        base = name.base.encode("utf-8", "surrogatepass")
        given = "derived-" + hashlib.sha256(base + b"\0" + digest).hexdigest()[:32]
    if name.prompt == name.sample == 0:
        return TransferId(given)
    return TransferId(f"{given}/{name.prompt}.{name.sample}")


def prompt_digest(request: PromptRequest) -> bytes:
    """SHA-256 of everything that a prompt's KV cache depends on beside the model.

    Token ids, LoRA adapter (name and path, as in vLLM's own block hashes), multimodal inputs (hash
    and place), prompt embeddings and cache salt. Requests of one digest may share their KV cache.
    """
    lora, tokens = request.lora_request, request.prompt_token_ids
    record = (
        None if tokens is None else array("q", tokens).tobytes(),
        None if request.prompt_embeds is None else _tensor_digest(request.prompt_embeds),
        None if lora is None else (lora.lora_name, lora.lora_path),
        [
            (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
        ],
        request.cache_salt or None,
    )
    return hashlib.sha256(msgspec.msgpack.encode(record)).digest()


def _tensor_digest(tensor: Any) -> bytes:
    """SHA-256 of a tensor's type, shape and bytes, wherever it lies."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    head = f"{plain.dtype}{tuple(plain.shape)}".encode()
    return hashlib.sha256(head + plain.view(torch.uint8).numpy().tobytes()).digest()


def model_identity(config: Any, model: str | None, weights_epoch: str) -> dict[str, str]:
    """What must be equal at both engines before a byte of KV moves; compared, and named, at HELLO.

    Args:
        config: The engine's `VllmConfig`.
        model: The model's name; None for the name the engine was started with.
        weights_epoch: The version of weights that change at run time.
    """
    model_config = config.model_config
    hf_config = model_config.hf_config.to_dict()
    rope = {key: value for key, value in hf_config.items() if key.startswith("rope_")}
    return {
        "model": model or str(model_config.model),
        "revision": str(model_config.revision or ""),
        "dtype": str(model_config.dtype),
        "quantization": str(model_config.quantization or ""),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "rope": _digest(rope),
        "config": _digest({k: v for k, v in hf_config.items() if k not in LOCAL_KEYS}),
        "weights_epoch": weights_epoch,
    }


def _digest(mapping: Mapping[str, object]) -> str:
    """16 hexadecimal digits of a mapping's canonical JSON."""
    text = json.dumps(mapping, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
