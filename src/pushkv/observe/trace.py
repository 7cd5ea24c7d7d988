"""A trace of every step as lines of JSON: what came in, which row fired, what came out.

It says enough to be run again: the rules at its start, each machine's first state, every event and
every effect. ``replay`` does so.

Times are nanoseconds of the system-wide monotonic clock, so that the traces of engines on one host
can be laid side by side. Which clock it is stands at the start: one per boot of a kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from pushkv.core.effects import Send, SendLink
from pushkv.core.errors import ConfigurationError
from pushkv.core.ids import Worker
from pushkv.core.machines import StepRecord
from pushkv.core.table import Rules
from pushkv.layout import CacheLayout, CacheRegion
from pushkv.transport import Completion

__all__ = ["TraceWriter", "numbered_lines", "tagged", "this_clock", "trace_lines"]

log: logging.Logger = logging.getLogger("pushkv.trace")


class TraceWriter:
    """Writes one endpoint's trace. One thread; writes are buffered until `flush`.

    A trace that cannot be written on, because the disk is full, ends there with a line in the log:
    no transfer fails for want of its trace.

    Args:
        clock: Names the clock of all times, see `this_clock`; "" for one that is known to nobody.

    Raises:
        ConfigurationError: `path` cannot be written.
    """

    def __init__(
        self, path: Path, worker: Worker, layout: CacheLayout, rules: Rules, clock: str = ""
    ) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("ab")
            if self._file.tell() and not path.read_bytes().endswith(b"\n"):
                self._file.write(b"\n")  # an earlier life was killed within a line
        except OSError as error:
            raise ConfigurationError(
                "trace_path", str(path), f"a file to append to ({error})"
            ) from error
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        cache = [
            {
                "block_tokens": group.block_tokens,
                "regions": [_region(each) for each in group.regions],
            }
            for group in layout.groups
        ]
        self._write(
            {
                "kind": "start",
                "worker": worker,
                "pid": os.getpid(),
                "clock": clock,
                "rules": rules,
                "cache": cache,
            }
        )

    def life(self, machine: str, key: object, state: object) -> None:
        """A machine begins in `state`, or is forgotten where that is None."""
        line = {"kind": "end" if state is None else "begin", "machine": machine, "key": key}
        self._write(line if state is None else {**line, "state": state})

    def step(self, record: StepRecord) -> None:
        """One step of one machine."""
        self._write(
            {
                "kind": "step",
                "t": record.now,
                "machine": record.machine,
                "key": record.key,
                "event": tagged(record.event),
                "row": record.row.name,
                "from": getattr(record.before, "status", ""),
                "to": getattr(record.after, "status", ""),
                "effects": [tagged(effect) for effect in record.effects],
            }
        )

    def completion(self, now: int, completion: Completion) -> None:
        """One WRITE's end, with the bytes it moved."""
        self._write({"kind": "write", "t": now, **msgspec.to_builtins(completion)})

    def counted(self, now: int, cause: str, detail: str) -> None:
        """Something was dropped, refused or survived."""
        self._write({"kind": "counted", "t": now, "cause": cause, "detail": detail})

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._try(lambda file: file.flush())

    def close(self) -> None:
        """Flush and close."""
        self._try(lambda file: file.close())

    def _write(self, line: dict[str, object]) -> None:
        data = self._encode(line) + b"\n"
        self._try(lambda file: file.write(data))

    def _try(self, act: Callable[[IO[bytes]], object]) -> None:
        if self._file.closed:
            return
        try:
            act(self._file)
        except OSError as error:
            log.error("the trace %s ends here: %s", self._path, error)
            with contextlib.suppress(OSError):
                self._file.close()


def this_clock() -> str:
    """Which monotonic clock this process reads: one per boot and time namespace; "" if unknown.

    Times of two traces can be compared where this is equal and not "".
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


def trace_lines(path: Path) -> Iterator[bytes]:
    """The lines of a trace, without those that their writer was killed in, or still writes.

    Raises:
        ConfigurationError: `path` cannot be read.
    """
    return (line for _, line in numbered_lines(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The same lines as `trace_lines`, each with its number in the file, from 1.

    Raises:
        ConfigurationError: `path` cannot be read.
    """
    try:
        with path.open("rb") as file:
            number, line = 1, file.readline()
            while line:
                following = file.readline()
                cut = not following or following.startswith(b'{"kind":"start"')
                if line.endswith(b"}\n") or not cut:
                    yield number, line
                number, line = number + 1, following
    except OSError as error:
        raise ConfigurationError("trace", str(path), f"a file to read ({error})") from error


def _region(region: CacheRegion) -> dict[str, int]:
    return {
        "address": region.address,
        "block_bytes": region.block_bytes,
        "block_stride_bytes": region.block_stride_bytes,
    }


def tagged(value: object) -> dict[str, object]:
    """An event or an effect as JSON has it: its type, and its fields."""
    if isinstance(value, Send | SendLink):
        return {"type": type(value).__name__, "message": tagged(value.message)}
    built = msgspec.to_builtins(value, enc_hook=_plain)
    return {"type": type(value).__name__, **(built if isinstance(built, dict) else {})}


def _plain(value: object) -> object:
    raise NotImplementedError(f"{type(value).__name__} has no place in a trace")
