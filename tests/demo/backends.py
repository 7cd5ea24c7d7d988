"""Real HTTP servers that play an engine, in threads: they answer, refuse, hang, stream and die."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping

import anyio
import anyio.to_thread
import uvicorn
from attrs import Factory, define, field
from starlette.types import ASGIApp, Receive, Scope, Send

Json = dict[str, object]
WAIT_S = 20.0


@define
class Seen:
    """One request as it arrived, and whether its sender closed the connection early."""

    path: str
    headers: dict[str, str]
    body: Json
    left: threading.Event = field(factory=threading.Event)

    @property
    def params(self) -> Json:
        params = self.body["kv_transfer_params"]
        assert isinstance(params, dict)
        return params


@define
class Exchange:
    """One request in the hands of a behaviour, with what it takes to answer."""

    seen: Seen
    receive: Receive
    send: Send

    async def answer(self, body: Mapping[str, object], status: int = 200) -> None:
        data = json.dumps(body).encode()
        await self.start(status, "application/json", len(data))
        await self.send({"type": "http.response.body", "body": data})

    async def start(self, status: int, content_type: str, length: int | None = None) -> None:
        headers = [(b"content-type", content_type.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})

    async def hang(self) -> None:
        """Until the sender closes the connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.seen.left.set()


Behaviour = Callable[[Exchange], Awaitable[None]]


class DiedError(Exception):
    """Ends a response in the middle: uvicorn closes the connection."""


async def answers(exchange: Exchange) -> None:
    """What either engine says when all is well, whatever its role."""
    await exchange.answer({"text": "words", "kv_transfer_params": SEQUENTIAL_PARAMS})


SEQUENTIAL_PARAMS: Json = {
    "do_remote_prefill": True,
    "remote_host": "10.0.0.1",
    "remote_block_ids": [[1, 2]],
    "of_another_version": {"kept": True},
}


async def streams(exchange: Exchange) -> None:
    await exchange.start(200, "text/event-stream")
    for event in (b'data: {"text": "one"}\n\n', b'data: {"text": "two"}\n\n', b"data: [DONE]\n\n"):
        await exchange.chunk(event)
    await exchange.chunk(b"", last=True)


async def hangs(exchange: Exchange) -> None:
    await exchange.hang()


async def dies(exchange: Exchange) -> None:
    await exchange.start(200, "application/json", length=1000)
    await exchange.chunk(b'{"text": "wo')
    raise DiedError


def refuses(status: int, body: Mapping[str, object] | None = None) -> Behaviour:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(body or {"error": {"message": f"status {status}"}}, status)

    return refuse


@define
class Engine:
    """A server whose every completion is decided by `behave`, which a test may change."""

    url: str = ""
    behave: Behaviour = answers
    seen: list[Seen] = Factory(list)
    arrived: threading.Event = field(factory=threading.Event)
    healthy: bool = True

    def reset(self) -> None:
        """As new, for the next test."""
        self.behave, self.seen, self.arrived, self.healthy = answers, [], threading.Event(), True

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {key.decode(): text.decode() for key, text in scope["headers"]}
        if scope["path"] == "/health":
            exchange = Exchange(Seen(scope["path"], headers, {}), receive, send)
            await exchange.answer({}, 200 if self.healthy else 503)
            return
        if scope["method"] != "POST":
            await Exchange(Seen(scope["path"], headers, {}), receive, send).answer({}, 404)
            return
        seen = Seen(scope["path"], headers, json.loads(body))
        self.seen.append(seen)
        self.arrived.set()
        await self.behave(Exchange(seen, receive, send))


async def wait_for(event: threading.Event) -> None:
    """Wait for a test's event without stopping the server's loop."""
    assert await anyio.to_thread.run_sync(event.wait, WAIT_S)


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    playing = Engine()
    with serving(playing.app) as url:
        playing.url = url
        yield playing


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """`app` behind uvicorn in a thread of its own. Yields its URL."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            interface="asgi3",
            log_config=None,
            timeout_graceful_shutdown=1,
            ws="none",
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
