"""What a transport declares, as data that the machines read."""

from __future__ import annotations

from attrs import frozen

from .ids import Duration

__all__ = ["Capabilities"]


@frozen
class Capabilities:
    """What a transport promises about WRITEs, and what it does not.

    Attributes:
        name: The transport and its fabric, for HELLO and the log.
        done_means_visible: DONE at the producer means that the bytes are visible at the consumer
            (NIXL over UCX: yes; over LIBFABRIC: no).
        write_bound: How long after the check before posting a WRITE can still land, or None where
            nobody can say: then time frees nothing, only a proof does.
        death_bound: How long after the certain death of the writing process its bytes can land, or
            None where nobody can say.
        reaches_successor: Whether a WRITE aimed at a dead process can land in a later process on
            the same addresses (R13).
        shared_memory: Whether bytes cross even a cut network (UCX cma, sysv, posix).
    """

    name: str
    done_means_visible: bool
    write_bound: Duration | None = None
    death_bound: Duration | None = None
    reaches_successor: bool = True
    shared_memory: bool = False
