"""Runs one command and lets nothing of it outlive whoever asked for it.

``python guard.py COMMAND…`` starts COMMAND in a process group of its own, prints the group's id and
waits for whichever comes first: the command ends, or standard input does. Either way it kills what
is left of the group and exits, with the command's status.

Standard input is a pipe that only the parent holds. The kernel closes it however the parent ends,
``kill -9`` included, so this needs no cooperation from a dying parent. Linux's parent death signal
would not do: it is sent when the *thread* that forked ends, and grandchildren do not inherit it,
which leaves a server's worker processes running.

Run by path, not imported: it must start in milliseconds, so it uses the standard library alone.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run `command` to its end or ours. Returns its exit status, 128 + n if signal n ended it."""
    # A service manager sends this to every process it stops. The end of the parent is what counts:
    # a guard that went first would leave its group unguarded.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, process_group=0, restore_signals=True
    )
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()

    def end_with_parent() -> None:
        while os.read(0, 1024):
            pass
        _kill_group(child.pid)

    threading.Thread(target=end_with_parent, daemon=True).start()
    status = child.wait()
    _kill_group(child.pid)
    return status if status >= 0 else 128 - status


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    status: int = main(sys.argv[1:])
    # Not sys.exit: the thread may still sit in read(), and there is nothing left to flush.
    os._exit(status)
