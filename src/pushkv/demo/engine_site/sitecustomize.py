"""Changes to an engine's process that a measurement wants; its folder goes onto ``PYTHONPATH``.

Python imports a module of this name before anything else. It acts on what the environment asks for:

- ``PUSHKV_NIXL_PROGRESS_DELAY_US``: the pause of the progress thread that NIXL's Python API starts.
  That API has it at 0, so the thread of every agent, and with it every engine of vLLM's own NIXL
  connectors, uses a whole core. Where engines share cores that hides what else there is to compare.
- ``PUSHKV_HOOK_TIMES``: a file that gets the time the engine's thread spends in the hooks of its KV
  connector: three unsigned 64-bit numbers for each name of `HOOKS`: calls, nanoseconds, and
  nanoseconds of CPU. Hooks that hooks call count once, for the outermost.
- ``PUSHKV_HOOK_MARKS``: a file to which each of these calls adds three such numbers: which of
  `HOOKS` it was, and when it began and ended, in nanoseconds of the host's monotonic clock.

It uses the standard library alone, and touches nothing until the modules in question are imported.
"""

from __future__ import annotations

import array
import importlib.machinery
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
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
MARKS = "PUSHKV_HOOK_MARKS"

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


Note = Callable[[int, int, int, int], None]
"""Takes one call: which of `HOOKS`, when it began and ended, and its CPU, all in nanoseconds."""


def watch_hooks(makers: Sequence[Callable[[], Note]]) -> After:
    """Make vLLM's factory hand out connectors whose hooks are noted; both roles share a thread."""

    def change(factory: ModuleType) -> None:
        kind: Any = factory.KVConnectorFactory
        create = kind.create_connector
        notes: list[Note] = []
        inside = [False]
        own = _own_cpu()

        def create_connector(cls: Any, *args: Any, **kwargs: Any) -> Any:
            connector = create(*args, **kwargs)
            if not notes:
                notes.extend(make() for make in makers)
            for index, name in enumerate(HOOKS):
                if hasattr(connector, name):
                    hook = getattr(connector, name)
                    setattr(connector, name, _noted(hook, index, notes, inside, own))
            return connector

        kind.create_connector = classmethod(create_connector)

    return change


def _own_cpu() -> int:
    """What asking for the time costs by itself: more than a hook that does nothing, as most do."""
    found = []
    for _ in range(1_000):
        cpu = time.thread_time_ns()
        found.append(time.thread_time_ns() - cpu)
    return sorted(found)[len(found) // 2]


def _noted(
    hook: Callable[..., Any], index: int, notes: Sequence[Note], inside: list[bool], own: int
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            return hook(*args, **kwargs)
        inside[0] = True
        began, cpu = time.monotonic_ns(), time.thread_time_ns()
        try:
            return hook(*args, **kwargs)
        finally:
            used = max(0, time.thread_time_ns() - cpu - own)
            ended = time.monotonic_ns()
            for note in notes:
                note(index, began, ended, used)
            inside[0] = False

    return run


def _total(path: str) -> Note:
    """Adds all up in the file."""
    size = 24 * len(HOOKS)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(file, size)
    totals = memoryview(mmap.mmap(file, size)).cast("Q")
    os.close(file)

    def note(index: int, began: int, ended: int, cpu: int) -> None:
        slot = 3 * index
        totals[slot] += 1
        totals[slot + 1] += ended - began
        totals[slot + 2] += cpu

    return note


def _mark(path: str) -> Note:
    """Adds a line of numbers to the file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(index: int, began: int, ended: int, _: int) -> None:
        os.write(file, array.array("Q", (index, began, ended)).tobytes())

    return note


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
    makers = [
        partial(make, os.environ[name])
        for name, make in ((TIMES, _total), (MARKS, _mark))
        if name in os.environ
    ]
    if makers:
        factory = "vllm.distributed.kv_transfer.kv_connector.factory"
        actions[factory] = watch_hooks(makers)
    if actions:
        sys.meta_path.insert(0, AfterImport(actions))


if __name__ == "sitecustomize":
    install()
