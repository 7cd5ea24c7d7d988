"""`kv_transfer_params` of a request: what a router tells each leg, strictly read.

Keys that mean what vLLM's own connectors mean by them bear their names, so that a router written
for those serves pushkv too. Keys that pushkv does not need are ignored: routers and vLLM itself add
some.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from pushkv.core.errors import RemoteProtocolError
from pushkv.rank_plan import Ranks

__all__ = ["ConsumerLeg", "ProducerLeg", "read_params"]

NAME_LENGTH_MOST = 400
"""Characters of an id; what is derived from it must still fit into a message."""
SIZE_MOST = 64
"""Ranks of a producer's tensor or pipeline parallel group."""
HOST_LENGTH_MOST = 253
"""Characters of a host name (RFC 1035)."""


@frozen
class ProducerLeg:
    """The request is prefilled here and decoded elsewhere.

    Attributes:
        transfer_id: The router's name of the hand-over, or None where it gives none.
    """

    transfer_id: str | None


@frozen
class ConsumerLeg:
    """The request is prefilled elsewhere and decoded here. One of the two ids is never None.

    Attributes:
        host: The producer's control address.
        port: The producer's control address.
        engine: The engine id expected there; "" for whoever answers.
        transfer_id: The name of the hand-over, from the router or from the producer's response.
        request_id: The router's request id (`remote_request_id`), which the producer's own holds.
        ranks: The producer's ranks; rank r listens at `port` + r.
    """

    host: str
    port: int
    engine: str
    transfer_id: str | None
    request_id: str | None
    ranks: Ranks = Ranks()  # noqa: RUF009  - frozen


def read_params(params: object) -> ProducerLeg | ConsumerLeg | None:
    """Which leg of a transfer `params` describe; None for a request without a transfer.

    Raises:
        RemoteProtocolError: A key is missing or wrong. Names the key and shows the value. Harms no
            other request.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise RemoteProtocolError("kv_transfer_params", _shown(params), "a JSON object")
    decode, prefill = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if decode and prefill:
        raise RemoteProtocolError("do_remote_prefill", True, "false where do_remote_decode is true")
    if decode:
        return ProducerLeg(_name(params, "transfer_id"))
    if not prefill:
        return None
    ranks = _ranks(params)
    transfer, request = _name(params, "transfer_id"), _name(params, "remote_request_id")
    if transfer is None and request is None:
        raise RemoteProtocolError("transfer_id", None, "a string, or remote_request_id instead")
    host = _name(params, "remote_host", HOST_LENGTH_MOST)
    if host is None:
        raise RemoteProtocolError("remote_host", None, "the producer's host name or address")
    engine = _name(params, "remote_engine_id")
    port = _port(params, ranks.count)
    return ConsumerLeg(host, port, engine or "", transfer, request, ranks)


def _flag(params: Mapping[object, object], key: str) -> bool:
    value = params.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RemoteProtocolError(key, _shown(value), "true or false")


def _name(params: Mapping[object, object], key: str, most: int = NAME_LENGTH_MOST) -> str | None:
    value = params.get(key)
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= most and value.isprintable():
        return value
    raise RemoteProtocolError(key, _shown(value), f"a string of 1 to {most} printable characters")


def _port(params: Mapping[object, object], ranks: int) -> int:
    value = params.get("remote_port")
    if isinstance(value, str) and len(value) <= 5 and value.isascii() and value.isdigit():
        value = int(value)
    most = 65_536 - ranks
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
        return value
    raise RemoteProtocolError("remote_port", _shown(value), f"an integer from 1 to {most}")


def _ranks(params: Mapping[object, object]) -> Ranks:
    """The producer's ranks; one where nothing is said."""
    sizes = []
    for key, most in (("tp_size", SIZE_MOST), ("pp_size", SIZE_MOST), ("dcp_size", 1)):
        value = params.get(key)
        if value is None:
            value = 1
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise RemoteProtocolError(key, _shown(value), f"an integer from 1 to {most}")
        sizes.append(value)
    return Ranks(sizes[0], sizes[1])


def _shown(value: object) -> str:
    """At most 80 characters of `value`, which a client chose."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  - a client's value must not harm more than its request
        text = object.__repr__(value)
    return text if len(text) <= 80 else text[:77] + "..."
