"""A transport over plain TCP: one connection to each peer, one WRITE after the other.

A WRITE travels as a whole: its name, where it goes, its bytes. The peer looks where it goes before
it copies anything, and answers when all is copied. KV crosses the network in clear.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from pushkv.core.capabilities import Capabilities
from pushkv.core.errors import TransportError
from pushkv.core.ids import AttemptId, Worker
from pushkv.transport import Arrival, Completion, Region, Segments, Write, WriteOutcome

__all__ = ["TcpTransport"]

CAPABILITIES = Capabilities("tcp-example", done_means_visible=True, reaches_successor=False)
"""No bounds: TCP delivers what it holds whenever it can, also when the writer has died."""
SECRET_BYTES = 16
LENGTHS = struct.Struct("<QQ")
READY_S = 0.001
DONE, REFUSED = b"\x01", b"\x00"


class Memory(msgspec.Struct, frozen=True):
    """What a peer needs to write here."""

    host: str
    port: int
    secret: bytes


class Header(msgspec.Struct, frozen=True):
    """What comes before the bytes of a WRITE."""

    attempt: AttemptId
    part: int
    token: int
    segments: list[tuple[int, int]]


class TcpTransport:
    """Moves host memory between processes over TCP. Options: the `host` that peers connect to."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()
        self._news: deque[Completion] = deque()
        self._arrivals: deque[Arrival] = deque()
        self._looks = self._closed = False
        self._open = 0
        self._lanes: dict[Worker, Lane] = {}
        self._threads: list[threading.Thread] = []
        self._incoming: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What it promises."""
        return CAPABILITIES

    @property
    def version(self) -> str:
        """Of what it sends."""
        return "1"

    def start(
        self,
        worker: Worker,
        regions: Sequence[Region],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """Listen."""
        if self._listener is not None:
            raise TransportError("started already: make a new transport")
        self._regions, self.clock, self._wake = tuple(regions), clock, wake
        self._listener = socket.create_server((self._host, 0), backlog=64)
        self._begin(self._accept, self._listener)

    def memory(self) -> bytes:
        """Where we listen, and the secret that only this incarnation has."""
        port = self._started().getsockname()[1]
        return msgspec.msgpack.encode(Memory(self._host, port, self._secret))

    def add_peer(self, peer: Worker, memory: bytes) -> None:
        """Keep the lane to this peer, unless it has other memory now."""
        self._started()
        lane = self._lanes.get(peer)
        if lane is None or lane.memory != memory:
            self.remove_peer(peer)
            self._lanes[peer] = Lane(self, memory)
            self._begin(self._lanes[peer].run)

    def remove_peer(self, peer: Worker) -> None:
        """Let the lane end once it has told what is open."""
        self._started()
        lane = self._lanes.pop(peer, None)
        if lane is not None:
            lane.orders.put(None)

    def post(self, write: Write) -> None:
        """Queue it for its peer's lane; what is wrong with it is its outcome."""
        self._started()
        self._open += 1
        cause = self._problem(write)
        if cause:
            self.tell(write, WriteOutcome.FAILED, cause)
        else:
            self._lanes[write.peer].orders.put(write)

    def _problem(self, write: Write) -> str:
        if self._closed:
            return "the transport is closed"
        if write.peer not in self._lanes:
            return f"{write.peer} is not known: add_peer comes first"
        source, destination = write.source, write.destination
        if source.shape != destination.shape or (source[:, 1] != destination[:, 1]).any():
            return "source and destination differ in their segments"
        return "" if self.covers(source) else "the source is not registered"

    def covers(self, segments: Segments) -> bool:
        """Whether registered memory holds all of these segments; those of no bytes are anywhere."""
        begin = segments[:, 0]
        inside = segments[:, 1] == 0
        for region in self._regions:
            room = np.uint64(region.length_bytes)
            offset = begin - np.uint64(region.address)  # wraps where it begins before the region
            inside |= (offset <= room) & (segments[:, 1] <= room - np.minimum(offset, room))
        return bool(inside.all())

    def tell(self, write: Write, outcome: WriteOutcome, cause: str = "") -> None:
        """Its one completion. Any thread."""
        done = write.length_bytes if outcome is WriteOutcome.DONE else 0
        with self._lock:
            self._open -= 1
            self._news.append(Completion(write.attempt, write.part, outcome, done, cause))
        self._wake()

    def look_for_arrivals(self, active: bool) -> None:
        """Arrivals that came before are told now."""
        self._started()
        self._looks = active
        if active and self._arrivals:
            self._wake()

    def poll(self) -> Sequence[Completion | Arrival]:
        """What has happened."""
        self._started()
        with self._lock:
            told: list[Completion | Arrival] = list(self._news)
            self._news.clear()
            if self._looks:
                told += self._arrivals
                self._arrivals.clear()
        return told

    def close(self, timeout_s: float) -> bool:
        """End what was not posted, wait for what was, then stop to listen."""
        if self._listener is None:
            return True
        self._closed = True
        for lane in self._lanes.values():
            lane.orders.put(None)
        until = self.clock() + int(timeout_s * 1e9)
        _shut(self._listener)
        for connection in tuple(self._incoming):
            _shut(connection)
        for thread in self._threads:
            thread.join(max(0, until - self.clock()) / 1e9)
        return self._open == 0

    @property
    def is_closed(self) -> bool:
        """Whether nothing more may be posted."""
        return self._closed

    def _started(self) -> socket.socket:
        if self._listener is None:
            raise TransportError("not started: call start first")
        return self._listener

    def _begin(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    # -- the consumer's side

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                self._incoming.add(connection)
                self._begin(self._receive, connection)

    def _receive(self, connection: socket.socket) -> None:
        """Copy one WRITE after the other; whoever does not know the secret is hung up on."""
        with connection:
            try:
                if secrets.compare_digest(_read(connection, SECRET_BYTES), self._secret):
                    while not self._closed:
                        connection.sendall(self._land(connection))
            except (OSError, msgspec.DecodeError, MemoryError):
                pass  # the writer is told by the end of the connection
        self._incoming.discard(connection)

    def _land(self, connection: socket.socket) -> bytes:
        header_bytes, body_bytes = LENGTHS.unpack(_read(connection, LENGTHS.size))
        if body_bytes > sum(region.length_bytes for region in self._regions):
            raise OSError("more bytes than there is memory")
        header = msgspec.msgpack.decode(_read(connection, header_bytes), type=Header)
        body = _read(connection, body_bytes)
        segments = np.array(header.segments, np.uint64).reshape(-1, 2)
        if int(segments[:, 1].sum()) != body_bytes or not self.covers(segments):
            return REFUSED
        at = 0
        for address, length in header.segments:
            ctypes.memmove(address, body[at : at + length], length)
            at += length
        with self._lock:
            self._arrivals.append(Arrival(header.attempt, header.part, header.token, body_bytes))
        if self._looks:
            self._wake()
        return DONE


class Lane:
    """The thread that writes to one peer."""

    def __init__(self, transport: TcpTransport, memory: bytes) -> None:
        self.memory = memory
        self.orders: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._transport = transport
        self._connection: socket.socket | None = None

    def run(self) -> None:
        """Until None was ordered and nothing is left. WRITEs that wait are overtaken."""
        waiting: list[Write] = []
        ends = False
        while waiting or not ends:
            try:
                order = self.orders.get(timeout=READY_S if waiting else None)
            except queue.Empty:
                waiting = [each for each in waiting if not self._try(each)]
                continue
            if order is None:
                ends = True
            elif not self._try(order):
                waiting.append(order)
        self._hang_up()

    def _try(self, write: Write) -> bool:
        """Whether it is over; otherwise its source is not ready."""
        transport = self._transport
        try:
            ready = write.ready is None or write.ready()
        except Exception as error:  # noqa: BLE001 - the caller's code; it harms its WRITE only
            transport.tell(write, WriteOutcome.FAILED, f"ready() raised {error!r}")
            return True
        if transport.is_closed:
            transport.tell(write, WriteOutcome.FAILED, "the transport is closed")
        elif not write.permit.allows(transport.clock(), CAPABILITIES):
            transport.tell(write, WriteOutcome.REFUSED, "the permit does not last")
        elif not ready:
            return False
        else:
            transport.tell(write, *self._send(write))
        return True

    def _send(self, write: Write) -> tuple[WriteOutcome, str]:
        """FAILED while the peer cannot have all of it, and it copies nothing before; then UNKNOWN.

        An answer that does not come proves nothing.
        """
        pairs = write.destination.tolist()
        header = Header(write.attempt, write.part, write.arrival_token, pairs)
        head = msgspec.msgpack.encode(header)
        body = b"".join(ctypes.string_at(*each) for each in write.source.tolist())
        try:
            connection = self._connect()
            if not write.permit.allows(self._transport.clock(), CAPABILITIES):
                return WriteOutcome.REFUSED, "the permit does not last"
            connection.sendall(LENGTHS.pack(len(head), len(body)) + head + body)
        except (OSError, msgspec.DecodeError) as error:
            self._hang_up()
            return WriteOutcome.FAILED, f"not all was sent: {error!r}"
        try:
            answer = _read(connection, 1)
        except OSError as error:
            self._hang_up()
            return WriteOutcome.UNKNOWN, f"no answer: {error!r}"
        if answer == DONE:
            return WriteOutcome.DONE, ""
        return WriteOutcome.FAILED, "the destination is not registered"

    def _connect(self) -> socket.socket:
        if self._connection is None:
            memory = msgspec.msgpack.decode(self.memory, type=Memory)
            self._connection = socket.create_connection((memory.host, memory.port))
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.sendall(memory.secret)
        return self._connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _shut(connection: socket.socket) -> None:
    """Wake whoever sleeps in it."""
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket, length: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        OSError: They did not come.
    """
    found = bytearray(length)
    view = memoryview(found)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the peer hung up")
        view = view[count:]
    return bytes(found)
