"""The proxy between real HTTP servers: both dispatch orders, every way a leg can fail."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import httpx
import pytest
from attrs import define
from tests.demo.backends import (
    SEQUENTIAL_PARAMS,
    WAIT_S,
    Behaviour,
    DiedError,
    Engine,
    Exchange,
    answers,
    dies,
    engine,
    hangs,
    refuses,
    serving,
    streams,
    wait_for,
)

from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import TransferId
from pushkv.demo.proxy import Backend, Dispatch, ProxyConfig, create_app, main
from pushkv.demo.supervise import free_ports
from pushkv.observe.traceparent import trace_of

ORDERS: tuple[Dispatch, ...] = ("concurrent", "sequential")
TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNLIMITED = httpx.Limits(max_connections=None)
ERROR_400 = {"error": {"message": "prompt too long", "type": "BadRequestError", "code": 400}}


@define
class Stage:
    """One prefill and one decode engine with the proxy before them."""

    dispatch: Dispatch
    prefill: Engine
    decode: Engine
    client: httpx.Client

    def ask(self, headers: dict[str, str] | None = None, **more: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": "baba", "max_tokens": 8} | more
        return self.client.post("/v1/completions", json=body, headers=headers)

    def stream(self) -> contextlib.AbstractContextManager[httpx.Response]:
        body = {"model": "tiny", "prompt": "baba", "max_tokens": 8, "stream": True}
        return self.client.stream("POST", "/v1/completions", json=body)

    @property
    def legs(self) -> dict[str, Engine]:
        return {"prefill": self.prefill, "decode": self.decode}

    def other(self, leg: str) -> Engine:
        return self.decode if leg == "prefill" else self.prefill


@contextlib.contextmanager
def stage(dispatch: Dispatch, unreachable: str | None = None, **settings: float) -> Iterator[Stage]:
    with engine() as prefill, engine() as decode:
        urls = {"prefill": prefill.url, "decode": decode.url}
        if unreachable is not None:
            urls[unreachable] = f"http://127.0.0.1:{free_ports(1)[0]}"
        config = ProxyConfig(
            prefill=[Backend(urls["prefill"], "10.0.0.1", 7000, "P-1")],
            decode=[Backend(urls["decode"])],
            dispatch=dispatch,
            **settings,
        )
        with (
            serving(create_app(config)) as url,
            httpx.Client(base_url=url, timeout=WAIT_S, limits=UNLIMITED, trust_env=False) as client,
        ):
            yield Stage(dispatch, prefill, decode, client)


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[Dispatch, Stage]]:
    """Kept for all tests: a server takes half a second to stop."""
    with stage("concurrent") as first, stage("sequential") as second:
        yield {"concurrent": first, "sequential": second}


def as_new(each: Stage) -> Stage:
    for leg in each.legs.values():
        leg.reset()
    each.decode.behave = after_prefill(each.prefill, each.decode, answers)
    return each


def after_prefill(prefill: Engine, decode: Engine, behave: Behaviour) -> Behaviour:
    """Like a decode engine: has nothing to say before the prompt has reached its partner."""

    async def wait_first(exchange: Exchange) -> None:
        while len(prefill.seen) < len(decode.seen):
            await anyio.sleep(0.002)
        await behave(exchange)

    return wait_first


@pytest.fixture
def concurrent(stages: dict[Dispatch, Stage]) -> Stage:
    return as_new(stages["concurrent"])


@pytest.fixture
def sequential(stages: dict[Dispatch, Stage]) -> Stage:
    return as_new(stages["sequential"])


@pytest.fixture(params=ORDERS)
def either(request: pytest.FixtureRequest, stages: dict[Dispatch, Stage]) -> Stage:
    return as_new(stages[request.param])


# -- what each leg is sent


def test_both_legs_of_a_concurrent_request(concurrent: Stage) -> None:
    response = concurrent.ask({"X-Request-Id": "mine", "Authorization": "Bearer key"}, n=2)
    assert response.json()["text"] == "words"
    (first,), (second,) = concurrent.prefill.seen, concurrent.decode.seen
    transfer_id = first.params["transfer_id"]
    assert first.body == {
        "model": "tiny",
        "prompt": "baba",
        "max_tokens": 1,
        "n": 2,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        },
    }
    assert second.body == {
        "model": "tiny",
        "prompt": "baba",
        "max_tokens": 8,
        "n": 2,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": "P-1",
            "remote_host": "10.0.0.1",
            "remote_port": 7000,
            "tp_size": 1,
        },
    }
    for seen in (first, second):
        assert seen.path == "/v1/completions"
        assert seen.headers["x-request-id"] == "mine"
        assert seen.headers["authorization"] == "Bearer key"
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-pushkv-transfer-id"] == transfer_id


def test_sequential_parameters_reach_the_decode_engine_as_they_are(sequential: Stage) -> None:
    assert sequential.ask().status_code == 200
    (first,), (second,) = sequential.prefill.seen, sequential.decode.seen
    assert first.params["do_remote_decode"] is True
    assert second.params == SEQUENTIAL_PARAMS


def test_the_prefill_leg_of_a_chat_is_one_token_and_no_stream(either: Stage) -> None:
    either.decode.behave = after_prefill(either.prefill, either.decode, streams)
    body = {
        "messages": [],
        "max_completion_tokens": 9,
        "min_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = either.client.post("/v1/chat/completions", json=body)
    assert response.text.endswith("data: [DONE]\n\n")
    (first,), (second,) = either.prefill.seen, either.decode.seen
    assert first.path == second.path == "/v1/chat/completions"
    first.body.pop("kv_transfer_params")
    assert first.body == {
        "messages": [],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
    }
    second.body.pop("kv_transfer_params")
    assert second.body == body


def test_the_transfers_of_a_traced_request_are_named_by_its_trace(concurrent: Stage) -> None:
    for given in (TRACED, TRACED, "garbage"):
        assert concurrent.ask({"traceparent": given}).status_code == 200
    for leg in concurrent.legs.values():
        assert [seen.headers["traceparent"] for seen in leg.seen] == [TRACED, TRACED, "garbage"]
        first, second, other = (str(seen.params["transfer_id"]) for seen in leg.seen)
        assert str(trace_of(TransferId(first))) == str(trace_of(TransferId(second))) == TRACED
        assert first != second
        assert "garbage" not in other


def test_every_dispatch_has_its_own_transfer_id(concurrent: Stage) -> None:
    for _ in range(3):
        concurrent.ask({"X-Request-Id": "the same"})
    sent = [[seen.params["transfer_id"] for seen in leg.seen] for leg in concurrent.legs.values()]
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 3
    assert "the same" not in sent[0]


def test_both_legs_share_a_fresh_request_id_if_the_client_sends_none(either: Stage) -> None:
    either.ask()
    either.ask()
    first, second = ([s.headers["x-request-id"] for s in leg.seen] for leg in either.legs.values())
    assert first == second
    assert len(set(first)) == 2


def test_transfer_parameters_of_a_client_are_dropped(concurrent: Stage) -> None:
    concurrent.ask(kv_transfer_params={"remote_host": "evil", "transfer_id": "guessed"})
    (first,), (second,) = concurrent.prefill.seen, concurrent.decode.seen
    assert first.params["transfer_id"] != "guessed"
    assert second.params["remote_host"] == "10.0.0.1"


def test_engines_are_taken_in_turn() -> None:
    with contextlib.ExitStack() as stack:
        prefill, decode = ([stack.enter_context(engine()) for _ in range(2)] for _ in range(2))
        for first, second in zip(prefill, decode, strict=True):
            second.behave = after_prefill(first, second, answers)
        config = ProxyConfig(
            [Backend(each.url, "h", 1 + i, f"P-{i}") for i, each in enumerate(prefill)],
            [Backend(each.url) for each in decode],
        )
        url = stack.enter_context(serving(create_app(config)))
        for _ in range(4):
            httpx.post(f"{url}/v1/completions", json={}).raise_for_status()
        assert [len(each.seen) for each in prefill + decode] == [2, 2, 2, 2]
        ports = [seen.params["remote_port"] for each in decode for seen in each.seen]
        ids = [seen.params["remote_engine_id"] for each in decode for seen in each.seen]
        assert sorted(zip(ids, ports, strict=True)) == [
            ("P-0", 1),
            ("P-0", 1),
            ("P-1", 2),
            ("P-1", 2),
        ]


# -- order and streaming


@pytest.mark.parametrize("waits", ["prefill", "decode"])
def test_concurrent_legs_do_not_wait_for_each_other(concurrent: Stage, waits: str) -> None:
    other = concurrent.other(waits)

    async def after_the_other(exchange: Exchange) -> None:
        await wait_for(other.arrived)
        await answers(exchange)

    concurrent.legs[waits].behave = after_the_other
    assert concurrent.ask().status_code == 200


def test_many_requests_wait_together(concurrent: Stage) -> None:
    count = 120
    all_decoding = threading.Event()
    arrivals = itertools.count(1)

    async def register(exchange: Exchange) -> None:
        if next(arrivals) == count:
            all_decoding.set()
        while not all_decoding.is_set():
            await anyio.sleep(0.01)
        await answers(exchange)

    concurrent.decode.behave = register
    with ThreadPoolExecutor(count) as pool:
        responses = list(pool.map(lambda _: concurrent.ask(), range(count)))
    assert {response.status_code for response in responses} == {200}


def test_a_decode_leg_waits_for_a_sequential_prefill(sequential: Stage) -> None:
    seen_early = []

    async def look(exchange: Exchange) -> None:
        seen_early.append(sequential.decode.arrived.is_set())
        await answers(exchange)

    sequential.prefill.behave = look
    assert sequential.ask().status_code == 200
    assert seen_early == [False]


def test_events_pass_as_they_come(either: Stage) -> None:
    first_was_read = threading.Event()

    async def stepwise(exchange: Exchange) -> None:
        await exchange.start(200, "text/event-stream")
        await exchange.chunk(b'data: {"text": "one"}\n\n')
        await wait_for(first_was_read)
        await exchange.chunk(b"data: [DONE]\n\n", last=True)

    either.decode.behave = stepwise
    with either.stream() as response:
        assert response.headers["content-type"] == "text/event-stream"
        chunks = response.iter_raw()
        assert next(chunks) == b'data: {"text": "one"}\n\n'
        first_was_read.set()
        assert b"".join(chunks) == b"data: [DONE]\n\n"


def test_a_complete_answer_does_not_wait_for_the_prefill_leg(concurrent: Stage) -> None:
    concurrent.prefill.behave = hangs
    assert concurrent.ask().status_code == 200
    assert concurrent.prefill.seen[0].left.wait(WAIT_S)


# -- failures


def message_of(response: httpx.Response) -> str:
    message = response.json()["error"]["message"]
    assert isinstance(message, str)
    return message


def after(arrived: threading.Event, behave: Behaviour) -> Behaviour:
    async def wait_first(exchange: Exchange) -> None:
        await wait_for(arrived)
        await behave(exchange)

    return wait_first


async def begins_a_stream_and_dies(exchange: Exchange) -> None:
    await exchange.start(200, "text/event-stream")
    raise DiedError


FAILURES = {
    "500": (refuses(500), "answered 500"),
    "503": (refuses(503), "answered 503"),
    "dies in its answer": (dies, "RemoteProtocolError"),
    "dies before a token": (begins_a_stream_and_dies, "RemoteProtocolError"),
}


@pytest.mark.parametrize("failing", ["prefill", "decode"])
@pytest.mark.parametrize(("behave", "reason"), FAILURES.values(), ids=FAILURES)
def test_the_first_failing_leg_is_named_and_cancels_the_other(
    concurrent: Stage, failing: str, behave: Behaviour, reason: str
) -> None:
    other = concurrent.other(failing)
    other.behave = hangs
    concurrent.legs[failing].behave = after(other.arrived, behave)
    response = concurrent.ask()
    assert response.status_code == 502
    assert response.headers["x-pushkv-failed-leg"] == failing
    assert message_of(response).startswith(f"{failing} leg: http://127.0.0.1:")
    assert reason in message_of(response)
    assert other.seen[0].left.wait(WAIT_S)


@pytest.mark.parametrize("failing", ["prefill", "decode"])
@pytest.mark.parametrize(("behave", "reason"), FAILURES.values(), ids=FAILURES)
def test_a_failing_leg_of_a_sequential_request_is_named(
    sequential: Stage, failing: str, behave: Behaviour, reason: str
) -> None:
    sequential.legs[failing].behave = behave
    response = sequential.ask()
    assert response.status_code == 502
    assert response.headers["x-pushkv-failed-leg"] == failing
    assert reason in message_of(response)
    assert len(sequential.decode.seen) == (failing == "decode")


@pytest.mark.parametrize("dispatch", ORDERS)
@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_an_engine_that_cannot_be_reached_is_named(dispatch: Dispatch, failing: str) -> None:
    with stage(dispatch, unreachable=failing) as each:
        each.other(failing).behave = hangs if dispatch == "concurrent" else answers
        response = each.ask()
        assert response.status_code == 502
        assert message_of(response).startswith(f"{failing} leg: ")
        assert "ConnectError" in message_of(response)


class ClosesWhatIsIdle(http.server.BaseHTTPRequestHandler):
    """Closes a connection just as a second request comes over it, as a server may at any time."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.rfile.read(length)
        data = json.dumps({"text": "words", "kv_transfer_params": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.rfile.read1()  # until the next request begins, or the proxy has closed
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Nothing: the proxy's answers tell."""


@pytest.mark.parametrize("dispatch", ORDERS)
def test_a_request_needs_no_connection_that_its_engine_may_be_closing(dispatch: Dispatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ClosesWhatIsIdle) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        config = ProxyConfig(
            [Backend(url, "10.0.0.1", 7000, "P-1")], [Backend(url)], dispatch=dispatch
        )
        try:
            with serving(create_app(config)) as proxy:
                body = {"model": "tiny", "prompt": "baba", "max_tokens": 8}
                said = [
                    httpx.post(f"{proxy}/v1/completions", json=body, trust_env=False)
                    for _ in range(3)
                ]
        finally:
            server.shutdown()
            thread.join()
    assert [each.status_code for each in said] == [200, 200, 200], said[-1].text


@pytest.mark.parametrize("dispatch", ORDERS)
@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_an_engine_that_is_silent_too_long_is_named(dispatch: Dispatch, failing: str) -> None:
    with stage(dispatch, read_timeout_s=0.3) as each:
        each.legs[failing].behave = hangs
        if dispatch == "concurrent" and failing == "prefill":
            each.decode.behave = trickles
        response = each.ask()
        assert response.status_code == 502
        assert message_of(response).startswith(f"{failing} leg: ")
        assert "timed out (ReadTimeout)" in message_of(response)
        assert each.legs[failing].seen[0].left.wait(WAIT_S)


async def trickles(exchange: Exchange) -> None:
    """Never silent for long, never done."""
    await exchange.start(200, "application/json", length=1_000_000)
    async with anyio.create_task_group() as tasks:

        async def send_spaces() -> None:
            while True:
                await exchange.chunk(b" ")
                await anyio.sleep(0.05)

        tasks.start_soon(send_spaces)
        await exchange.hang()
        tasks.cancel_scope.cancel()


def test_a_wrong_request_gets_the_prefill_engines_own_answer(either: Stage) -> None:
    if either.dispatch == "concurrent":
        either.decode.behave = hangs
    either.prefill.behave = after(
        either.decode.arrived if either.dispatch == "concurrent" else either.prefill.arrived,
        refuses(400, ERROR_400),
    )
    response = either.ask()
    assert (response.status_code, response.json()) == (400, ERROR_400)
    for seen in either.decode.seen:
        assert seen.left.wait(WAIT_S)


def test_a_4xx_of_the_decode_engine_is_the_proxys_failure(either: Stage) -> None:
    either.decode.behave = refuses(400, ERROR_400)
    if either.dispatch == "concurrent":
        either.prefill.behave = hangs
    response = either.ask()
    assert response.status_code == 502
    assert "prompt too long" in message_of(response)


@pytest.mark.parametrize("answer", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": [1]}])
def test_a_prefill_answer_without_parameters_is_refused(
    sequential: Stage, answer: dict[str, object]
) -> None:
    async def forget(exchange: Exchange) -> None:
        await exchange.answer(answer)

    sequential.prefill.behave = forget
    response = sequential.ask()
    assert response.status_code == 502
    assert "kv_transfer_params" in message_of(response)
    assert sequential.decode.seen == []


def test_an_error_as_the_first_event_is_a_status(either: Stage) -> None:
    async def fail_in_band(exchange: Exchange) -> None:
        await exchange.start(200, "text/event-stream")
        await exchange.chunk(b'data: {"error": {"message": "no KV came"}}\n\n')
        await exchange.chunk(b"data: [DONE]\n\n", last=True)

    either.decode.behave = fail_in_band
    with either.stream() as response:
        response.read()
        assert response.status_code == 502
        assert "no KV came" in message_of(response)


async def begins_an_event_and_dies(exchange: Exchange) -> None:
    await exchange.start(200, "text/event-stream")
    await exchange.chunk(b'data: {"text": "one"}\n\n')
    await exchange.chunk(b'data: {"text": "tw')
    raise DiedError


async def stops_without_done(exchange: Exchange) -> None:
    await exchange.start(200, "text/event-stream")
    await exchange.chunk(b'data: {"text": "one"}\n\n', last=True)


@pytest.mark.parametrize(
    ("behave", "reason"),
    [(begins_an_event_and_dies, "RemoteProtocolError"), (stops_without_done, "without [DONE]")],
)
def test_a_broken_stream_ends_with_an_error_event(
    either: Stage, behave: Behaviour, reason: str
) -> None:
    either.decode.behave = after_prefill(either.prefill, either.decode, behave)
    if either.dispatch == "concurrent":
        either.prefill.behave = hangs
    with either.stream() as response:
        assert response.status_code == 200
        events = response.read().decode().split("\n\n")
    assert events[0] == 'data: {"text": "one"}'
    error = json.loads(events[1].removeprefix("data: "))["error"]
    assert error["code"] == 502
    assert error["message"].startswith("decode leg: ")
    assert reason in error["message"]
    assert events[2:] == [""]
    if either.dispatch == "concurrent":
        assert either.prefill.seen[0].left.wait(WAIT_S)


def test_a_prefill_leg_that_fails_late_ends_the_stream(concurrent: Stage) -> None:
    first_was_read = threading.Event()

    async def begin_and_hang(exchange: Exchange) -> None:
        await exchange.start(200, "text/event-stream")
        await exchange.chunk(b'data: {"text": "one"}\n\n')
        await exchange.hang()

    concurrent.decode.behave = begin_and_hang
    concurrent.prefill.behave = after(first_was_read, refuses(500))
    with concurrent.stream() as response:
        chunks = response.iter_raw()
        assert next(chunks) == b'data: {"text": "one"}\n\n'
        first_was_read.set()
        rest = b"".join(chunks).decode()
    assert "prefill leg: " in rest
    assert "[DONE]" not in rest
    assert concurrent.decode.seen[0].left.wait(WAIT_S)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_cancels_both_legs(concurrent: Stage, streaming: bool) -> None:
    concurrent.prefill.behave = concurrent.decode.behave = hangs
    leave_after(concurrent, [concurrent.prefill, concurrent.decode], streaming)
    for leg in concurrent.legs.values():
        assert leg.seen[0].left.wait(WAIT_S)


@pytest.mark.parametrize("hanging", ["prefill", "decode"])
def test_a_client_that_leaves_cancels_the_running_leg(sequential: Stage, hanging: str) -> None:
    sequential.legs[hanging].behave = hangs
    leave_after(sequential, [sequential.legs[hanging]], streaming=False)
    assert sequential.legs[hanging].seen[0].left.wait(WAIT_S)
    assert len(sequential.decode.seen) == (hanging == "decode")


def leave_after(each: Stage, engines: list[Engine], streaming: bool) -> None:
    """Ask, wait until all of `engines` were asked, and close the connection."""
    body = json.dumps({"stream": streaming}).encode()
    with socket.create_connection((each.client.base_url.host, each.client.base_url.port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        for leg in engines:
            assert leg.arrived.wait(WAIT_S)


# -- the rest


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff"])
def test_what_is_no_request_reaches_no_engine(either: Stage, body: bytes) -> None:
    response = either.client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert message_of(response).startswith("body")
    assert either.prefill.seen == either.decode.seen == []


def test_a_body_that_is_too_large_is_refused(
    either: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pushkv.demo.proxy.MAX_BODY_BYTES", 100)
    assert either.ask(prompt="x" * 100).status_code == 413
    assert either.prefill.seen == either.decode.seen == []


def test_health_needs_one_ready_engine_of_each_kind(either: Stage) -> None:
    assert either.client.get("/health").status_code == 200
    either.decode.healthy = False
    response = either.client.get("/health")
    assert response.status_code == 503
    assert response.json() == {
        "prefill": {either.prefill.url: True},
        "decode": {either.decode.url: False},
    }


P = Backend("http://p:1/", "p", 2, "P-1")
D = Backend("http://d:1")


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("prefill", lambda: ProxyConfig([], [D])),
        ("decode", lambda: ProxyConfig([P], [])),
        ("prefill", lambda: ProxyConfig([D], [D])),
        ("dispatch", lambda: ProxyConfig([P], [D], "both")),  # type: ignore[arg-type]
        ("read_timeout_s", lambda: ProxyConfig([P], [D], read_timeout_s=0)),
        ("url", lambda: Backend("p:1")),
    ],
)
def test_a_wrong_setting_is_named(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.field == field


def test_a_prefill_engine_needs_no_control_address_in_sequential_dispatch() -> None:
    assert ProxyConfig([D], [D], "sequential").prefill == [D]


def test_the_command_line_says_what_a_prefill_engine_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--prefill", "http://p:1,host", "--decode", "http://d:1", "--port", "1"])
    assert "expected URL,HOST,PORT,ENGINE" in capsys.readouterr().err
