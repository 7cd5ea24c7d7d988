"""Three ways to hand KV over: pushkv, and vLLM's own push and pull connectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from uuid import uuid4

from attrs import frozen

__all__ = ["ANSWER_S", "PULL", "PUSH", "PUSHKV", "SYSTEMS", "Place", "System", "new_name"]

Json = dict[str, object]
HOLD_S = 5
"""How long finished KV waits for decode, the same for all three; vLLM's default is 30 s."""
ANSWER_S = 60.0
"""Within which every client of any system must have an answer. Nothing else runs on the machine's
two cores that long; a healthy pair needs about a second."""
PUSHKV_ANSWER_S = 45.0
"""Within which every client of pushkv must have an answer, whatever became of its prefill engine:
5 s to reach a producer that may be dead (`connect_s`), 30 s without news of one that was reached
and does not answer (`waiting_s`; a death that closes its connections is known at once, a hold of
5 s or a lease of 10 s lies within), and 10 s to compute the longest prompt here, behind others. A
router that sends a request again starts the time again."""


@frozen
class Place:
    """Where the control port of the prefill engine is, which routers are configured with."""

    port: int
    engine: str = "prefill"
    host: str = "127.0.0.1"


@frozen
class System:
    """One connector, and what a router sends for one request of a client.

    Attributes:
        config: `kv_transfer_config` of the engine of that name, whose control port and port of
            metrics are given.
        environment: Its environment.
        prefill: Parameters of the prefill leg, by the name of the hand-over.
        decode: Those of a decode leg that goes out at the same time; None where the prefill leg's
            answer is needed first.
        is_zeromq: Whether its control port speaks ZeroMQ.
        hold_option: Option of its connector that bounds how long finished KV waits, in seconds.
        answer_s: Within which each of its clients must have an answer, in seconds.
        says_why: Each failure is one line of the log and one counter, with its cause.
    """

    name: str
    config: Callable[[str, int, int], Json]
    environment: Callable[[int], Mapping[str, str]]
    prefill: Callable[[str], Json]
    decode: Callable[[str, Place], Json] | None
    is_zeromq: bool
    hold_option: str
    answer_s: float = ANSWER_S
    says_why: bool = False


def new_name() -> str:
    """A name for one hand-over."""
    return uuid4().hex


def _role(engine: str) -> str:
    return "kv_producer" if engine.startswith("prefill") else "kv_consumer"


def _pushkv(engine: str, port: int, metrics: int) -> Json:
    return {
        "kv_connector": "PushKVConnector",
        "kv_role": _role(engine),
        "engine_id": engine,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"port": port, "hold_s": HOLD_S, "metrics_port": metrics},
    }


def _vllm(connector: str) -> Callable[[str, int, int], Json]:
    def config(engine: str, port: int, metrics: int) -> Json:
        found: Json = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": HOLD_S},
        }
        if engine.startswith("prefill"):  # a router must know it to dispatch at once
            found["engine_id"] = engine
        return found

    return config


def _side_channel(port: int) -> Mapping[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }


def _vllm_prefill(name: str) -> Json:
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def _push_decode(name: str, place: Place) -> Json:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": place.engine,
        "remote_host": place.host,
        "remote_port": place.port,
        "remote_request_id": name,
        "tp_size": 1,
    }


PUSHKV = System(
    "pushkv",
    _pushkv,
    lambda port: {},
    lambda name: {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name},
    lambda name, place: {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": name,
        "remote_engine_id": place.engine,
        "remote_host": place.host,
        "remote_port": place.port,
        "tp_size": 1,
    },
    is_zeromq=False,
    hold_option="hold_s",
    answer_s=PUSHKV_ANSWER_S,
    says_why=True,
)
PUSH = System(
    "NixlPushConnector",
    _vllm("NixlPushConnector"),
    _side_channel,
    _vllm_prefill,
    _push_decode,
    is_zeromq=True,
    hold_option="kv_lease_duration",
)
PULL = System(
    "NixlConnector",
    _vllm("NixlConnector"),
    _side_channel,
    _vllm_prefill,
    None,
    is_zeromq=True,
    hold_option="kv_lease_duration",
)
SYSTEMS: dict[str, System] = {each.name: each for each in (PUSHKV, PUSH, PULL)}
