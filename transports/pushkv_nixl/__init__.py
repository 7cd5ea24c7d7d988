"""pushkv's transport over NVIDIA NIXL: UCX and LIBFABRIC.

NIXL is imported when a `NixlTransport` is made, never when this package is; torch is never
imported. Memory is given as addresses (`pushkv.transport.Region`), or as tensors through
`regions_of`.

Threads
    One thread owns each NIXL agent, from creation to end; NIXL adds its own progress thread, which
    waits for events (`progress_delay_us` ≥ 1; at 0 it would spin a core). While no WRITE is open
    and nobody looks for arrivals, the owner sleeps; every 5 s it fetches notifications that nobody
    looked for, because NIXL keeps them without bound. Calls into the transport put an order into a
    queue; `poll` drains a deque. UCX is told to lock with a mutex (``USE_MT_MUTEX=y``, unless
    ``engine_config`` or ``UCX_USE_MT_MUTEX`` says otherwise): with its spinlock two threads on one
    core cost a post milliseconds.

A WRITE
    is cut into pieces of at most 1024 descriptors and 64 MiB. Before each the permit is asked
    (R5) and after it, with a known `write_bound`, the clock: a post that took longer is UNKNOWN.
    Each piece has its own handle and its own notification, which names the attempt in full (R9),
    the part, its token, and which piece of how many it is; the receiver reports an arrival when
    it has all of them. The first handle to a peer connects; no other is posted to it until that
    one is done (UCX aborts the process when more waits on a connection that is refused). A
    handle is polled until NIXL calls it over, and is never released before.
    A WRITE of no bytes is DONE; it posts nothing and nothing arrives.

What is promised, and why
    ``done_means_visible``: over UCX DONE follows the flush of the endpoint; over LIBFABRIC it
    says only that the source may be reused. ``write_bound`` is None unless the deployer gives it:
    NIXL cannot cancel, a stopped process posts late, and UCX chooses the lane. ``death_bound`` is
    ten seconds over UCX and None over LIBFABRIC: over cma the writer's own CPU copies, so its
    death ends it; bytes in TCP's buffers or on an RDMA network outlive it, but not for long.
    ``reaches_successor``: over UCX no; a successor has other keys and
    another connection, and WRITEs to the old one end in an error. (cma names a process by its
    number within one pid namespace; the numbers would have to wrap around under a live
    connection.) ``shared_memory``: yes, unless ``UCX_TLS`` names transports and none of them is
    cma, knem, xpmem, sysv, posix or cuda_ipc.

Agents
    Over UCX one agent writes and is written to. Over LIBFABRIC these are two, because a call that
    writes to a dead peer does not return. An agent that writes is replaced when it has taken down
    (UCX) or made (LIBFABRIC) `connections_most` connections, when it lost a peer that it cannot
    connect anew (LIBFABRIC), and when a call of its did not return within `call_timeout_s`. Then
    that WRITE is UNKNOWN, those that were posted there are, too, and the others go to the next
    agent; the thread that hangs is left to itself, at the lowest priority. `close` returns False
    from then on: the agent that hangs has the memory registered. After 8 hangs nothing is posted.

The fabric
    is what was asked for with `fabric`, or `start` raises an error. See `_demand`.

Limits
    * Deregistering memory fences nobody: over cma and TCP, WRITEs still land. `close` returning
      True says that *our* WRITEs are over, not those of peers into our memory.
    * A lost peer, and one that NIXL refused, is connected again by `add_peer`, or by the next WRITE
      to it, at most once a second.
    * Over TCP, UCX stops listening for good when it cannot accept for want of a file descriptor:
      no new peer can write here then until a restart. The control channel lets nobody new in with
      the last descriptors; `ulimit -n` should leave room for everything else in the process.
    * Over LIBFABRIC 255 agents can have written to one agent in its life. New peers are told of
      another in time (`memory`); those over links that stand are not.
    * A lost connection is reported only to the side that writes.
    * Peers are trusted with their own metadata: a digest catches damage, but NIXL aborts the
      process on some malformed metadata that is well wrapped. It comes over the authenticated
      channel alone.
    * A process that does not `close` does so at exit, for at most two seconds.
"""

from .tensors import regions_of
from .transport import NixlTransport

__all__ = ["NixlTransport", "regions_of"]
