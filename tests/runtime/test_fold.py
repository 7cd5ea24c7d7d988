"""Whatever the ranks say, in whatever order, the engine hears one outcome and one release."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    NotDelivered,
    ProducerAddress,
    Report,
    RetryDue,
    SourceReleased,
    SourceYielded,
)
from pushkv.core.events import Cancelled, Offered
from pushkv.core.ids import TransferId
from pushkv.core.messages import Reason
from pushkv.fold import RankFold
from pushkv.rank_plan import Ranks

T = TransferId("t")
CAUSES = (Reason.LINK_LOST, Reason.ABORTED, Reason.SIBLING)


def offer(fold: RankFold, attempt: int) -> None:
    address = ProducerAddress("h", 1)
    fold.offer(Offered(T, attempt, (address,), ((1,),), 0, 4, b""), Ranks(1))


@st.composite
def tellings(draw: st.DrawFn, ranks: int) -> list[tuple[int, Report]]:
    """What each rank says of one attempt, in its own order, mixed with the others'."""
    queues: list[list[Report]] = []
    for _ in range(ranks):
        outcome: list[Report] = [Delivered(T, 1), BlocksReleased(T, 1)]
        if draw(st.booleans()):
            retry = draw(st.booleans())
            outcome[0] = NotDelivered(T, 1, draw(st.sampled_from(CAUSES)), retry)
            if retry:
                outcome.insert(draw(st.integers(1, 2)), RetryDue(T, 1))
        queues.append(outcome)
    said = []
    while any(queues):
        rank = draw(st.sampled_from([rank for rank, queue in enumerate(queues) if queue]))
        said.append((rank, queues[rank].pop(0)))
    return said


@given(st.integers(1, 4), st.data())
def test_an_attempt_has_one_outcome_and_one_release(ranks: int, data: st.DataObject) -> None:
    fold = RankFold((12,), Ranks(ranks))
    offer(fold, 1)
    heard: list[Report] = []
    released: set[int] = set()
    first: NotDelivered | None = None
    for rank, report in data.draw(tellings(ranks)):
        result = fold.hear(rank, report)
        heard += result.reports
        if isinstance(report, NotDelivered) and first is None:
            first = report
            assert result.reports == (report,), "the first failure is the attempt's, and at once"
            assert dict(result.events) == {
                other: Cancelled(T, Reason.SIBLING) for other in range(ranks) if other != rank
            }
        else:
            assert result.events == ()
        released |= {rank} if isinstance(report, BlocksReleased) else set()
        assert (BlocksReleased(T, 1) in heard) == (len(released) == ranks)
    outcome: Report = Delivered(T, 1) if first is None else first
    expected = [outcome, BlocksReleased(T, 1)]
    if first is not None and first.retry:
        expected.append(RetryDue(T, 1))
    assert Counter(heard) == Counter(expected)
    assert heard[0] == outcome
    assert fold.hear(0, Delivered(T, 1)).reports == (), "all is over and forgotten"
    assert not fold._attempts
    assert not fold._retrying


@given(st.permutations(range(3)), st.lists(st.sampled_from((None, Reason.EXPIRED)), min_size=3))
def test_a_source_is_free_when_every_rank_s_is(
    order: list[int], reasons: list[Reason | None]
) -> None:
    fold = RankFold((12,), Ranks(3))
    for _ in range(2):  # a transfer of this name may come again
        heard = [fold.hear(rank, SourceReleased(T, reasons[rank])).reports for rank in order]
        assert heard[:2] == [(), ()]
        given_up = [reasons[rank] for rank in order if reasons[rank] is not None]
        assert heard[2] == (SourceReleased(T, given_up[0] if given_up else None),)
    assert not fold._sources


@given(st.permutations([rank for rank in range(3) for _ in range(2)]))
def test_a_preempted_source_is_yielded_when_every_rank_has_done_so(order: list[int]) -> None:
    fold = RankFold((12,), Ranks(3))
    seen: Counter[int] = Counter()
    told = 0
    for rank in order:
        seen[rank] += 1
        told += len(fold.hear(rank, SourceYielded(T)).reports)
        assert told == min(seen[each] for each in range(3))
    for rank in range(3):
        fold.hear(rank, SourceReleased(T, None))
    assert not fold._sources


def test_a_backoff_that_nobody_waits_for_is_not_told() -> None:
    for given_up in ("cancelled", "offered again"):
        fold = RankFold((12,), Ranks(2))
        offer(fold, 1)
        failed = NotDelivered(T, 1, Reason.LINK_LOST, True)
        assert fold.hear(1, failed).reports == (failed,)
        if given_up == "cancelled":
            assert list(fold.say(Cancelled(T))) == [(0, Cancelled(T)), (1, Cancelled(T))]
        else:
            offer(fold, 2)
        assert fold.hear(1, RetryDue(T, 1)).reports == ()
        assert fold.hear(0, BlocksReleased(T, 1)).reports == ()
        assert fold.hear(1, BlocksReleased(T, 1)).reports == (BlocksReleased(T, 1),)
        assert [key[1] for key in fold._attempts] == ([] if given_up == "cancelled" else [2])


def test_every_rank_is_told_who_serves_it_and_whom_else() -> None:
    fold = RankFold((12,), Ranks(4))
    addresses = tuple(ProducerAddress("h", 1 + rank, rank) for rank in range(2))
    said = fold.offer(Offered(T, 1, addresses, ((1,),), 0, 4, b""), Ranks(2))
    assert [rank for rank, _ in said] == [0, 1, 2, 3]
    offers = [event for _, event in said if isinstance(event, Offered)]
    assert [each.producers for each in offers] == [addresses[:1]] * 2 + [addresses[1:]] * 2
    assert [each.served for each in offers] == [((0, 1),)] * 2 + [((2, 3),)] * 2
    assert {each.consumer_ranks for each in offers} == {(0, 1, 2, 3)}
