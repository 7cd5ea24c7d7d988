"""Clocks that step: the one an engine is started with, and the wall clock of a whole process."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from attrs import define

__all__ = ["SteppingClock", "WallClock", "impossible"]

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile long *steps;

__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("PUSHKV_TEST_CLOCK"), O_RDONLY);
  steps = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
}

static long step(void) { return steps && steps != MAP_FAILED ? *steps : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (!failed && clock == CLOCK_REALTIME) now->tv_sec += step();
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *where) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (where) *where = exact.tv_sec;
  return exact.tv_sec;
}
"""


def impossible() -> str:
    """Why no process here can be given another wall clock; "" where it can."""
    return "" if shutil.which("cc") else "a wall clock that steps needs a C compiler, cc"


@define
class SteppingClock:
    """The monotonic clock, with steps."""

    offset: int = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.offset

    def step(self, nanoseconds: int) -> None:
        """Jump, ahead or back."""
        self.offset += nanoseconds


class WallClock:
    """What processes started with its environment take for the time of day; everything in them.

    A shim before libc, so that no other process of this machine has its clock changed.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pushkv-clock-")
        folder = Path(self._folder.name)
        self._file, library, source = folder / "steps", folder / "clock.so", folder / "clock.c"
        source.write_text(_SHIM)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"],
            check=True,
        )
        self.set(0)
        self.environment: dict[str, Any] = {
            "LD_PRELOAD": str(library),
            "PUSHKV_TEST_CLOCK": str(self._file),
        }

    def set(self, seconds_ahead: int) -> None:
        """Step to so many seconds from the true time."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(seconds_ahead.to_bytes(8, "little", signed=True))

    def close(self) -> None:
        """Remove its files."""
        self._folder.cleanup()
