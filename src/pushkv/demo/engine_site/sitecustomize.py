"""Changes to an engine's process that a measurement wants; its folder goes onto ``PYTHONPATH``.

Python imports a module of this name before anything else. It acts on what the environment asks for:

- ``PUSHKV_NIXL_PROGRESS_DELAY_US``: the pause of the progress thread that NIXL's Python API starts.
  That API has it at 0, so the thread of every agent, and with it every engine of vLLM's own NIXL
  connectors, uses a whole core. Where engines share cores that hides what else there is to compare.
- ``PUSHKV_HOOK_TIMES``: a file that gets the time the engine's thread spends in the hooks of its KV
  connector: three unsigned 64-bit numbers for each name of `HOOKS`: calls, nanoseconds, and
  nanoseconds of CPU. Hooks that hooks call count once, for the outermost.

It uses the standard library alone, and touches nothing until the modules in question are imported.
"""

from __future__ import annotations

import importlib.machinery
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

HOOKS = (
    "build_connector_meta",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "get_transfer_results",
    "handle_preemptions",
    "has_pending_push_work",
    "on_new_request",
    "request_finished",
    "request_finished_all_groups",
    "save_kv_layer",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
)
"""In the order of the file of `PUSHKV_HOOK_TIMES`."""
DELAY = "PUSHKV_NIXL_PROGRESS_DELAY_US"
TIMES = "PUSHKV_HOOK_TIMES"

After = Callable[[ModuleType], None]


def slow_progress(delay_us: int) -> After:
    """Make NIXL's Python API start its progress threads with a pause, in microseconds."""

    def change(api: ModuleType) -> None:
        original: Any = api.nixlBind.nixlAgentConfig
        field = original.pthrDelay

        def set_delay(config: object, asked_us: int) -> None:
            field.fset(config, delay_us)

        class Config(original):  # type: ignore[misc]
            pthrDelay = property(field.fget, set_delay)  # noqa: N815

        bindings = ModuleType(api.nixlBind.__name__)
        bindings.__dict__.update(vars(api.nixlBind), nixlAgentConfig=Config)
        api.nixlBind = bindings  # type: ignore[attr-defined]

    return change


def time_hooks(path: str) -> After:
    """Make vLLM's factory hand out connectors whose hooks are timed."""

    def change(factory: ModuleType) -> None:
        kind: Any = factory.KVConnectorFactory
        create = kind.create_connector
        timed: list[Callable[[Any], None]] = []

        def create_connector(cls: Any, *args: Any, **kwargs: Any) -> Any:
            connector = create(*args, **kwargs)
            if not timed:
                timed.append(_timer(path))
            timed[0](connector)
            return connector

        kind.create_connector = classmethod(create_connector)

    return change


def _timer(path: str) -> Callable[[Any], None]:
    """Adds up in `path` what the hooks of a connector take; both roles live in one thread."""
    size = 24 * len(HOOKS)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(file, size)
    totals = memoryview(mmap.mmap(file, size)).cast("Q")
    os.close(file)
    inside = [False]

    def wrap(hook: Callable[..., Any], slot: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return hook(*args, **kwargs)
            inside[0] = True
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                totals[slot + 2] += time.thread_time_ns() - cpu
                totals[slot + 1] += time.perf_counter_ns() - wall
                totals[slot] += 1
                inside[0] = False

        return run

    def add(connector: Any) -> None:
        for index, name in enumerate(HOOKS):
            if hasattr(connector, name):
                setattr(connector, name, wrap(getattr(connector, name), 3 * index))

    return add


class AfterImport(MetaPathFinder):
    """Calls a function with each module of `actions` as soon as it has been executed."""

    def __init__(self, actions: dict[str, After]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As the import system's own finder, for the modules of `actions`."""
        action = self._actions.get(name)
        if action is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Do what the environment asks for."""
    actions: dict[str, After] = {}
    if DELAY in os.environ:
        slow = slow_progress(int(os.environ[DELAY]))
        actions |= {f"nixl_cu{version}._api": slow for version in (12, 13)}
    if TIMES in os.environ:
        factory = "vllm.distributed.kv_transfer.kv_connector.factory"
        actions[factory] = time_hooks(os.environ[TIMES])
    if actions:
        sys.meta_path.insert(0, AfterImport(actions))


if __name__ == "sitecustomize":
    install()
