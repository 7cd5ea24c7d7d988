"""The engines of every mode, all alive at once: a monolithic one and a pair per connector."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve, frozen

from pushkv.core.errors import ConfigurationError
from pushkv.demo import engine_site
from pushkv.demo.engine_site.sitecustomize import DELAY, TIMES
from pushkv.demo.engines import vllm_server
from pushkv.demo.supervise import ServerSpec, free_ports
from pushkv.demo.systems import PULL, PUSH, PUSHKV, Place, System
from pushkv.demo.tiny_model import TinyModel

__all__ = ["ENGINE_MODEL", "Fleet", "Pair", "describe_fleet", "require_memory"]

ENGINE_MODEL = TinyModel(hidden=256, layers=16, heads=16, kv_heads=16, head_dim=64)
"""128 KiB of KV per token, as a model of eight billion parameters in half precision has, over a
prefill that CPU cores can do: 24 million parameters."""
CORES = (0, 1)
"""Of the prefill (and the monolithic) and of the decode engine."""
HOLD_S = 60
START_TIMEOUT_S = 900.0
"""Seven engines at once on two cores that others use too have taken more than five minutes."""
UNSPUN_DELAY_US = 1_000
ENGINE_GIB = 0.9
"""Memory of an engine and its API server, beside the KV cache."""
SYSTEMS: Mapping[str, System] = {
    "pull": PULL,
    "push": PUSH,
    "push_sequential": PUSH,
    "pushkv": PUSHKV,
}


@frozen
class Pair:
    """A prefill and a decode engine; the same one serves both ways of `NixlPushConnector`.

    Attributes:
        system: Their connector.
        place: Control port of the prefill engine.
        prefill: Name of the prefill engine.
        decode: Name of the decode engine.
    """

    system: System
    place: Place
    prefill: str
    decode: str


@frozen
class Fleet:
    """How to start the engines.

    Attributes:
        specs: All of them; the monolithic one is called ``mono``.
        pairs: By mode.
        hooks: The file of each engine's hook times.
        traces: Where pushkv's prefill and decode engine write their traces.
    """

    specs: Sequence[ServerSpec]
    pairs: Mapping[str, Pair]
    hooks: Mapping[str, Path]
    traces: tuple[Path, Path]


def describe_fleet(
    modes: Sequence[str],
    model: Path,
    directory: Path,
    *,
    as_shipped: bool = False,
    kv_cache_gib: int = 1,
    arguments: Sequence[str] = (),
) -> Fleet:
    """The engines that `modes` need, with ports that were free a moment ago.

    Args:
        modes: As in `results.MODES`; ``mono`` is always there, for prefill-only times.
        model: Directory of the model.
        directory: Gets hook times and traces.
        as_shipped: Leave the progress threads of vLLM's connectors as they are: spinning.
        kv_cache_gib: KV cache of each engine.
        arguments: More options for every engine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    traces = directory / "prefill.ndjson", directory / "decode.ndjson"
    systems = list(dict.fromkeys(SYSTEMS[mode] for mode in modes if mode != "mono"))
    ports = free_ports(1 + 4 * len(systems))
    mono = vllm_server(
        "mono", model, CORES[0], port=ports[0], kv_cache_gib=kv_cache_gib, arguments=arguments
    )
    specs, pairs, hooks = [mono], {}, {}
    for number, system in enumerate(systems):
        control, *own = ports[1 + 4 * number : 5 + 4 * number]
        names = f"prefill-{system.name}", f"decode-{system.name}"
        place = Place(control, names[0])
        for at, name in enumerate(names):
            hooks[name] = directory / f"{name}.hooks"
            hooks[name].unlink(missing_ok=True)
            side_port = (control, own[2])[at]
            config = system.config(name, side_port, 0)
            config["kv_load_failure_policy"] = "fail"  # a failure shows as one
            extra: dict[str, object] = {system.hold_option: HOLD_S}
            if system is PUSHKV:
                extra |= {"port": control if at == 0 else 0, "trace_path": str(traces[at])}
                extra["streaming"] = "layers"  # as is right for what does nothing but prefill
            config["kv_connector_extra_config"] = extra
            specs.append(
                vllm_server(
                    name,
                    model,
                    CORES[at],
                    config,
                    port=own[at],
                    kv_cache_gib=kv_cache_gib,
                    arguments=arguments,
                    environment={
                        **system.environment(side_port),
                        **_site(hooks[name], system, as_shipped),
                    },
                )
            )
        for mode in modes:
            if SYSTEMS.get(mode) is system:
                pairs[mode] = Pair(system, place, *names)
    for trace in traces:
        trace.unlink(missing_ok=True)
    slow = [evolve(spec, start_timeout_s=START_TIMEOUT_S) for spec in specs]
    return Fleet(slow, pairs, hooks, traces)


def require_memory(engines: int, kv_cache_gib: int, available: float) -> None:
    """Refuse to start what does not fit, since the kernel would kill whatever it likes.

    Raises:
        ConfigurationError: So many engines need more than `available` GiB.
    """
    needed = engines * (ENGINE_GIB + kv_cache_gib)
    if needed > available:
        raise ConfigurationError(
            "mode",
            f"{engines} engines",
            f"fewer: they need {needed:.1f} GiB, and {available:.1f} GiB are available",
        )


def _site(hooks: Path, system: System, as_shipped: bool) -> dict[str, str]:
    folder = str(Path(engine_site.__file__).parent)
    inherited = os.environ.get("PYTHONPATH")
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, (folder, inherited))),
        TIMES: str(hooks),
    }
    if system is not PUSHKV and not as_shipped:
        found[DELAY] = str(UNSPUN_DELAY_US)
    return found
