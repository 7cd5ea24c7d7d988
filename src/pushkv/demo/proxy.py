"""A small proxy in front of prefill and decode engines: few features, correct under faults.

One request of a client becomes two legs. The *prefill leg* computes the prompt (one token, no
stream); the *decode leg* gives the client's answer. In **concurrent** dispatch both go out at once:
the proxy names the transfer with a fresh id and tells the decode engine the producer's control
address, so that it registers its blocks while the prompt is being computed. In **sequential**
dispatch the prefill leg goes first, and the `kv_transfer_params` of its response go to the decode
engine as they are.

A request needs both of its legs. The first that fails cancels the other at once, by closing its
connection, which an engine takes as an abort; a client that leaves cancels both. The client gets
one status: a 4xx of the prefill engine as it is (the request itself is wrong), else 502, naming the
leg. Once a stream has started its status is spent, so an error ends the stream with an error event
and without ``[DONE]``. Nothing is retried: a client that retries gets a new transfer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import cycle
from typing import Literal, NamedTuple, TypeGuard, get_args
from uuid import uuid4

import anyio
import httpx
import uvicorn
from attrs import field, frozen
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pushkv.core.errors import ConfigurationError
from pushkv.observe.traceparent import read_traceparent

__all__ = ["Backend", "Dispatch", "ProxyConfig", "create_app", "main"]

Dispatch = Literal["concurrent", "sequential"]
Leg = Literal["prefill", "decode"]
Json = dict[str, object]

MAX_BODY_BYTES = 32 << 20
MAX_EVENT_BYTES = 1 << 20
HEALTH_TIMEOUT_S = 2.0

logger: logging.Logger = logging.getLogger(__name__)


def _without_slash(url: str) -> str:
    return url.rstrip("/")


@frozen
class Backend:
    """One engine's server.

    Attributes:
        url: Base of its HTTP API, without ``/v1``.
        control_host: Where its pushkv control channel listens; needed of a prefill engine when
            dispatch is concurrent, as are the next two.
        control_port: Its port.
        engine_id: As in its transfer configuration.
    """

    url: str = field(converter=_without_slash)
    control_host: str | None = None
    control_port: int | None = None
    engine_id: str | None = None

    def __attrs_post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigurationError("url", self.url, "http://HOST:PORT")


@frozen
class ProxyConfig:
    """Which engines the proxy serves and how.

    Attributes:
        prefill: Prefill engines, taken in turn.
        decode: Decode engines, taken in turn.
        dispatch: Both legs at once, or the prefill leg first.
        connect_timeout_s: To reach an engine, in seconds.
        read_timeout_s: Without a byte from an engine that works on a request, in seconds; longer
            than anything an engine itself waits for.
    """

    prefill: Sequence[Backend]
    decode: Sequence[Backend]
    dispatch: Dispatch = "concurrent"
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0

    def __attrs_post_init__(self) -> None:
        for role in ("prefill", "decode"):
            if not getattr(self, role):
                raise ConfigurationError(role, (), "at least one backend")
        if self.dispatch not in get_args(Dispatch):
            raise ConfigurationError("dispatch", self.dispatch, "concurrent or sequential")
        for name in ("connect_timeout_s", "read_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(name, getattr(self, name), "more than 0")
        if self.dispatch == "concurrent":
            for backend in self.prefill:
                if not (backend.control_host and backend.control_port and backend.engine_id):
                    raise ConfigurationError(
                        "prefill", backend, "control_host, control_port and engine_id"
                    )


def create_app(config: ProxyConfig) -> Starlette:
    """The proxy as an ASGI application: completions, chat completions and ``/health``."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[Mapping[str, httpx.AsyncClient]]:
        timeout = httpx.Timeout(config.read_timeout_s, connect=config.connect_timeout_s, pool=None)
        # Without a bound on connections, or waiting legs would keep their partners out. None is
        # used again: its server may be closing it, as when this process was stopped for a while,
        # and a request sent into that close would fail; nothing is retried.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
            yield {"client": client}

    async def health(request: Request) -> JSONResponse:
        return await _health(config, request.state.client)

    completions = _Completions(config)
    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/health", health),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", completions, methods=["POST"]),
        ],
    )


async def _health(config: ProxyConfig, client: httpx.AsyncClient) -> JSONResponse:
    """200 if at least one complete pair is ready, else 503; and what each engine said."""
    answers: dict[Leg, dict[str, bool]] = {"prefill": {}, "decode": {}}

    async def ask(leg: Leg, url: str) -> None:
        answers[leg][url] = False
        with contextlib.suppress(httpx.HTTPError):
            response = await client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)
            answers[leg][url] = response.status_code == 200

    async with anyio.create_task_group() as tasks:
        for backend in config.prefill:
            tasks.start_soon(ask, "prefill", backend.url)
        for backend in config.decode:
            tasks.start_soon(ask, "decode", backend.url)
    ready = all(any(urls.values()) for urls in answers.values())
    return JSONResponse(answers, 200 if ready else 503)


class _LegError(Exception):
    """One leg failed: the status and the body that the client shall get."""

    def __init__(self, leg: Leg, reason: str, passed: httpx.Response | None = None) -> None:
        super().__init__(f"{leg} leg: {reason}")
        self.leg = leg
        self.status = 502 if passed is None else passed.status_code
        self.body = _error_body(str(self), self.status) if passed is None else passed.content


class _Plan(NamedTuple):
    """What one request of a client is to become.

    Both legs replace `kv_transfer_params` in its body: where KV comes from and where it goes is not
    for a client to say.
    """

    path: str
    body: Json
    headers: dict[str, str]
    transfer_id: str
    prefill: Backend
    decode: Backend


class _Completions:
    """The endpoint of both kinds of completions; an ASGI application, to see the client leave."""

    def __init__(self, config: ProxyConfig) -> None:
        self._dispatch = config.dispatch
        self._prefill = cycle(config.prefill)
        self._decode = cycle(config.decode)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await _read_body(request)
        except ClientDisconnect:
            return
        if isinstance(body, JSONResponse):
            await body(scope, receive, send)
            return
        plan = self._plan(request, body)
        reply = _Reply(send, plan)
        client: httpx.AsyncClient = request.state.client
        async with anyio.create_task_group() as tasks:

            async def cancel_when_client_leaves() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel_when_client_leaves)
            try:
                if self._dispatch == "concurrent":
                    await _concurrent(client, plan, reply)
                else:
                    await _sequential(client, plan, reply)
            except _LegError as failure:
                logger.warning(
                    "request %s, transfer %s: %s",
                    plan.headers["X-Request-Id"],
                    plan.transfer_id,
                    failure,
                )
                await reply.fail(failure)
            tasks.cancel_scope.cancel()

    def _plan(self, request: Request, body: Json) -> _Plan:
        headers = {
            # An id of the client's choice may come twice; it names log lines, never a transfer.
            "X-Request-Id": request.headers.get("X-Request-Id") or uuid4().hex,
            "Content-Type": "application/json",
        }
        for name in ("Authorization", "traceparent"):
            if name in request.headers:
                headers[name] = request.headers[name]
        # Engines make their spans in the trace that the transfer's name begins with.
        trace = read_traceparent(headers.get("traceparent"))
        return _Plan(
            path=request.url.path,
            body=body,
            headers=headers,
            transfer_id=f"{trace}-{uuid4().hex}" if trace else uuid4().hex,
            prefill=next(self._prefill),
            decode=next(self._decode),
        )


async def _concurrent(client: httpx.AsyncClient, plan: _Plan, reply: _Reply) -> None:
    """Both legs at once; over when the decode leg is, or at the first failure, which is raised."""
    failure: _LegError | None = None
    async with anyio.create_task_group() as legs:

        async def prefill() -> None:
            nonlocal failure
            try:
                await _prefill_leg(client, plan)
            except _LegError as reason:
                failure = failure or reason
                legs.cancel_scope.cancel()

        legs.start_soon(prefill)
        try:
            await _decode_leg(
                client,
                plan,
                {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": plan.transfer_id,
                    "remote_engine_id": plan.prefill.engine_id,
                    "remote_host": plan.prefill.control_host,
                    "remote_port": plan.prefill.control_port,
                    "tp_size": 1,
                },
                reply,
            )
        except _LegError as reason:
            failure = failure or reason
        # After the whole answer, a prefill leg that still runs has nobody left to run for.
        legs.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _sequential(client: httpx.AsyncClient, plan: _Plan, reply: _Reply) -> None:
    """The prefill leg, then the decode leg with the parameters that the first one answered."""
    params = (await _prefill_leg(client, plan)).get("kv_transfer_params")
    if not _is_json_object(params):
        raise _LegError(
            "prefill",
            f"{plan.prefill.url} answered kv_transfer_params = {params!r}: expected an object; "
            "does its engine run a KV connector as producer?",
        )
    await _decode_leg(client, plan, params, reply)


async def _prefill_leg(client: httpx.AsyncClient, plan: _Plan) -> Json:
    """Have the prompt computed. Returns the engine's answer."""
    body = plan.body | {
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": plan.transfer_id,
        },
    }
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    for key in ("stream_options", "min_tokens"):  # not valid with no stream, or with one token
        body.pop(key, None)
    async with _leg("prefill", client, plan.prefill, plan, body) as response:
        await response.aread()
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not _is_json_object(answer):
        raise _LegError("prefill", f"{plan.prefill.url} answered what is no JSON object")
    return answer


async def _decode_leg(client: httpx.AsyncClient, plan: _Plan, params: Json, reply: _Reply) -> None:
    """Pass the engine's answer to the client: an event stream as it comes, else when complete."""
    body = plan.body | {"kv_transfer_params": params}
    async with _leg("decode", client, plan.decode, plan, body) as response:
        content_type = response.headers.get("Content-Type", "")
        if not content_type.startswith("text/event-stream"):
            await response.aread()
            await reply.whole(response.content, content_type)
            return
        last = b""
        async for event in _events(response):
            # An engine answers 200 before it has a token. Nothing is passed on until the first
            # event proves that there is one, so that a failed transfer still gets its own status.
            if not reply.started and (reason := _error_of(event)):
                raise _LegError("decode", f"{plan.decode.url} answered an error: {reason}")
            await reply.event(event, content_type)
            last = event
        if last.strip() != b"data: [DONE]":
            raise _LegError("decode", f"{plan.decode.url} ended its stream without [DONE]")
        await reply.end()


@contextlib.asynccontextmanager
async def _leg(
    leg: Leg, client: httpx.AsyncClient, backend: Backend, plan: _Plan, body: Json
) -> AsyncIterator[httpx.Response]:
    """One request to one engine, its body not yet read.

    Raises:
        _LegError: The engine cannot be reached, answers an error, or breaks off while the body of
            the ``async with`` reads the answer.
    """
    url = backend.url + plan.path
    try:
        async with client.stream("POST", url, json=body, headers=plan.headers) as response:
            if response.is_error:
                await response.aread()
                if leg == "prefill" and response.is_client_error:
                    raise _LegError(leg, f"{url} answered {response.status_code}", response)
                text = response.text[:500]
                raise _LegError(leg, f"{url} answered {response.status_code}: {text}")
            yield response
    except httpx.TimeoutException as error:
        raise _LegError(leg, f"{url} timed out ({type(error).__name__})") from error
    except httpx.HTTPError as error:
        raise _LegError(leg, f"{url}: {type(error).__name__}: {error}") from error


class _Reply:
    """The one answer to the client."""

    def __init__(self, send: Send, plan: _Plan) -> None:
        self._send = send
        self._headers = {
            "x-request-id": plan.headers["X-Request-Id"],
            "x-pushkv-transfer-id": plan.transfer_id,
        }
        self.started = False

    async def whole(self, body: bytes, content_type: str) -> None:
        await self._start(200, content_type, len(body))
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, event: bytes, content_type: str) -> None:
        if not self.started:
            await self._start(200, content_type)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, failure: _LegError) -> None:
        """The failure as a status of its own, or as the last event of a stream."""
        if self.started:
            error = b"data: " + failure.body + b"\n\n"
            await self._send({"type": "http.response.body", "body": error})
            return
        self._headers["x-pushkv-failed-leg"] = failure.leg
        await self._start(failure.status, "application/json", len(failure.body))
        await self._send({"type": "http.response.body", "body": failure.body})

    async def _start(self, status: int, content_type: str, length: int | None = None) -> None:
        self.started = True
        headers = self._headers | {"content-type": content_type}
        if length is not None:
            headers["content-length"] = str(length)
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(key.encode(), text.encode()) for key, text in headers.items()],
            }
        )


async def _read_body(request: Request) -> Json | JSONResponse:
    """The client's request, or what to answer to one that no engine should see."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            return _refusal(413, f"body: expected at most {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(data)
    except ValueError as error:
        return _refusal(400, f"body is no JSON: {error}")
    return body if _is_json_object(body) else _refusal(400, "body: expected a JSON object")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The server-sent events of a response, each whole: half an event is no use to a client."""
    tail = b""
    async for chunk in response.aiter_bytes():
        *events, tail = (tail + chunk).split(b"\n\n")
        for event in events:
            yield event + b"\n\n"
        if len(tail) > MAX_EVENT_BYTES:
            raise httpx.RemoteProtocolError(f"an event of more than {MAX_EVENT_BYTES} bytes")


def _error_of(event: bytes) -> str | None:
    """The message of an event that reports an error."""
    try:
        data = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return None
    return json.dumps(data["error"]) if _is_json_object(data) and data.get("error") else None


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse(json.loads(_error_body(message, status)), status)


def _error_body(message: str, status: int) -> bytes:
    """An error in the form of the OpenAI API, which clients of these engines read."""
    kind = "BadRequestError" if status < 500 else "BadGatewayError"
    return json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()


def _is_json_object(value: object) -> TypeGuard[Json]:
    return isinstance(value, dict)


def _parse_prefill(text: str) -> Backend:
    try:
        url, host, port, engine_id = text.split(",")
        return Backend(url, host, int(port), engine_id)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected URL,HOST,PORT,ENGINE") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve on 127.0.0.1 until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m pushkv.demo.proxy")
    parser.add_argument(
        "--prefill",
        action="append",
        required=True,
        type=_parse_prefill,
        metavar="URL,HOST,PORT,ENGINE",
        help="a prefill engine: its API, its control host and port, its engine id",
    )
    parser.add_argument("--decode", action="append", required=True, type=Backend, metavar="URL")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dispatch", choices=get_args(Dispatch), default="concurrent")
    options = parser.parse_args(arguments)
    config = ProxyConfig(options.prefill, options.decode, options.dispatch)
    uvicorn.run(create_app(config), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
