"""What an operator asks first: how many blocks are spoken for, and is there room for more."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Health"]


@frozen
class Health:
    """A runtime's blocks at one moment.

    Attributes:
        is_running: The runtime's thread is alive and takes work.
        budget_spent: Early registration was refused for want of budget, and no blocks have come
            back since: until they do, requests register late or compute their prompt themselves.
        exposed_blocks: Destination blocks registered, being written or quarantined.
        exposed_blocks_most: Their budget.
        quarantined_blocks: Those of them that only a proof gives back (R2, R14).
        pinned_blocks: Source blocks of finished prefills.
        pinned_blocks_most: Their budget.
    """

    is_running: bool
    budget_spent: bool
    exposed_blocks: int
    exposed_blocks_most: int
    quarantined_blocks: int
    pinned_blocks: int
    pinned_blocks_most: int
