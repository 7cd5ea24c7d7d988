"""vLLM's side of pushkv: `PushKVConnector` and the plug-in entry point that registers it.

Importing this package imports neither vLLM nor torch; naming `PushKVConnector` does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pushkv.core.errors import MissingDependencyError

if TYPE_CHECKING:
    from .connector import PushKVConnector

__all__ = ["CORES", "PushKVConnector", "register"]

CONNECTOR = "PushKVConnector"

CORES = frozenset(os.sched_getaffinity(0))
"""What this process may run on, noted before vLLM pins the model's threads. A runtime that stayed
on the model's core would wait for each of its steps: 120 to 170 ms instead of 8 to 20 ms from the
end of prefill to the consumer's notice, measured on vLLM for CPU."""


def register() -> None:
    """Make vLLM know `PushKVConnector` by its name. May run any number of times in a process.

    vLLM calls this in every process through the entry point group ``vllm.general_plugins``.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        raise MissingDependencyError(
            "pushkv_vllm needs vLLM >= 0.32, < 0.34: install pushkv[vllm]"
        ) from error
    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except ValueError:
        KVConnectorFactory.register_connector(CONNECTOR, "pushkv_vllm.connector", CONNECTOR)


def __getattr__(name: str) -> object:
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .connector import PushKVConnector
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("vllm", "torch"):
            raise
        raise MissingDependencyError(
            "pushkv_vllm needs vLLM >= 0.32, < 0.34: install pushkv[vllm]"
        ) from error
    return PushKVConnector
