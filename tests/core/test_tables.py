"""Each machine alone: total tables, declared targets, and random walks with arbitrary events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pushkv.core import consumer, link, producer, request
from pushkv.core.capabilities import Capabilities
from pushkv.core.consumer_actions import offer
from pushkv.core.consumer_table import CONSUMER
from pushkv.core.effects import (
    BlocksReleased,
    Delivered,
    DialPeer,
    LinkDown,
    LinkUp,
    Member,
    MemberFreed,
    MemberOutcome,
    MemberTold,
    NotDelivered,
    PostWrite,
    RetryDue,
    Send,
    SourceFreed,
)
from pushkv.core.errors import LocalProtocolError
from pushkv.core.events import (
    ArrivalSeen,
    Arrived,
    Cancelled,
    Closed,
    Computed,
    Doubted,
    Opened,
    Permitted,
    PrefillAborted,
    PrefillPreempted,
    PrefillResumed,
    Proven,
    Readmitted,
    RegistrationReceived,
    TakenBack,
    Tick,
    Unwanted,
    Wanted,
    Withdrawn,
    WriteDone,
    WriteFailed,
    WriteRefused,
    WriterGone,
    WriteUnknown,
)
from pushkv.core.ids import (
    FOREVER,
    AttemptId,
    Duration,
    EngineId,
    Epoch,
    Incarnation,
    Instant,
    Part,
    TransferId,
    Worker,
    seconds,
)
from pushkv.core.link import LINK
from pushkv.core.messages import (
    Complete,
    Failed,
    Grant,
    Ping,
    Progress,
    Query,
    Reason,
    Received,
    Register,
    Registered,
    Revoke,
    Revoked,
    Unproven,
)
from pushkv.core.producer_table import PRODUCER
from pushkv.core.request import REQUEST
from pushkv.core.table import Row, Rules, Table
from pushkv.testing.world import POLICY, STRONG, STRONG_UNBOUNDED, WEAK, WEAK_UNBOUNDED

from .taken_out import swap

TABLES: list[Table[Any]] = [CONSUMER, REQUEST, PRODUCER, LINK]
ROWS = [(table, row) for table in TABLES for row in table.rows.values()]
A = TransferId("a")
D = Worker(EngineId("d"), Incarnation(1), 0)
P = Worker(EngineId("p"), Incarnation(2), 0)
P_AGAIN = evolve(P, incarnation=Incarnation(3))
FIRST, SECOND = Epoch(1, 1), Epoch(2, 2)
TOKEN = 99
PARTS = (Part(0, 0, 4), Part(1, 4, 8), Part(2, 4, 8), Part(3, 0, 8))
START = Instant(1_000 * seconds(1))


def attempt(number: int = 0, producer_rank: int = 0) -> AttemptId:
    return AttemptId(D.engine, D.incarnation, D.rank, producer_rank, A, number)


def register(number: int = 0, start: int = 0, end: int = 8, digest: bytes = b"a") -> Register:
    return Register(
        attempt=attempt(number),
        blocks=((0, 1),),
        start=start,
        end=end,
        prompt_digest=digest,
        layout_digest=b"",
        producer_ranks=(0,),
        consumer_ranks=(0,),
        arrival_token=TOKEN,
        deadline=Duration(seconds(10)),
    )


def rules(capabilities: Capabilities = STRONG) -> Rules:
    return Rules(POLICY, capabilities)


# -- the tables as data


def name(table: Table[Any]) -> str:
    return table.name


def row_name(value: object) -> str:
    return value.name if isinstance(value, Row | Table) else repr(value)


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_every_pair_is_decided_once(table: Table[Any]) -> None:
    assert set(table.rows) == {(s, e) for s in table.statuses for e in table.events}


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_freeze_refuses_a_gap_and_then_changes(table: Table[Any]) -> None:
    again: Table[Any] = Table(table.name, table.statuses, table.events)
    missing = next(iter(table.rows))
    for key, row in table.rows.items():
        if key != missing:
            again._decide(row)
    with pytest.raises(AssertionError, match=f"undecided: {table.rows[missing].name}"):
        again.freeze()
    again._decide(table.rows[missing])
    with pytest.raises(AssertionError, match="decided twice"):
        again._decide(table.rows[missing])
    again.freeze()
    with pytest.raises(AssertionError, match="frozen"):
        again._decide(table.rows[missing])


def test_freeze_names_a_foreign_event() -> None:
    table: Table[Any] = Table("t", request.RequestStatus, [Tick])
    with pytest.raises(AssertionError, match="Ping is not its event"):
        table.ignore(request.RECEIVING, Ping, why="")


@pytest.mark.parametrize(("table", "row"), ROWS, ids=row_name)
def test_rows_say_where_they_lead_and_why(table: Table[Any], row: Row) -> None:
    assert row.targets
    assert all(isinstance(target, table.statuses) for target in row.targets)
    assert row.why
    assert (row.action is not None) == (row.kind == "go")
    if row.kind != "go":
        assert row.targets == {row.status}


def test_an_illegal_event_raises_and_leaves_the_state() -> None:
    class Status(StrEnum):
        ONLY = "only"

    @frozen
    class State:
        status: Status = Status.ONLY

    table: Table[State] = Table("t", Status, [Tick, Closed])
    table.illegal(Status.ONLY, Tick, why="never")
    table.ignore(Status.ONLY, Closed, why="of no interest")
    table.freeze()
    state = State()
    for event, why in ((Tick(), "never"), (Proven(A), "not an event of this machine")):
        with pytest.raises(LocalProtocolError, match=why):
            table.step(state, event, START, rules())
    step = table.step(state, Closed(""), START, rules())
    assert step.state is state
    assert step.effects == ()


def test_a_row_that_leads_astray_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = offer(register(), START, rules())
    swap(
        monkeypatch,
        CONSUMER,
        [consumer.REGISTERING],
        Tick,
        lambda state, event, now, rules: (evolve(state, status=consumer.DELIVERED), ()),
    )
    key = (consumer.REGISTERING, Tick)
    monkeypatch.setitem(
        CONSUMER._rows,
        key,
        evolve(CONSUMER.rows[key], targets=frozenset([consumer.REGISTERING])),
    )
    with pytest.raises(AssertionError, match=r"ended in consumer\.delivered"):
        CONSUMER.step(state, Tick(), START, rules())


# -- random walks

times = st.sampled_from([0, 1, seconds(0.05), seconds(1), seconds(3), seconds(12), seconds(40)])
capabilities = st.sampled_from([STRONG, WEAK, STRONG_UNBOUNDED, WEAK_UNBOUNDED])
walks = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Strategies = Mapping[type, st.SearchStrategy[Any]]

numbers = st.integers(0, 3)
epochs = st.sampled_from([FIRST, SECOND])
peers = st.sampled_from([P, P, P_AGAIN])
some_parts = st.lists(st.sampled_from(PARTS), max_size=3, unique=True).map(tuple)
reasons = st.sampled_from([Reason.CANCELLED, Reason.SIBLING, Reason.WRITE, Reason.LINK_LOST])
fences = st.one_of(st.none(), st.just(Instant(START + seconds(3))))
own = st.just(attempt())

TO_CONSUMER: Strategies = {
    LinkUp: st.builds(LinkUp, epochs, peers),
    LinkDown: st.builds(LinkDown, epochs, peers, fences),
    Registered: st.builds(Registered, own),
    Progress: st.builds(Progress, own, st.just(4)),
    Complete: st.builds(Complete, own, some_parts),
    Failed: st.builds(Failed, own, some_parts, reasons),
    Revoked: st.builds(Revoked, own, some_parts),
    Unproven: st.builds(Unproven, own, some_parts),
    ArrivalSeen: st.builds(ArrivalSeen, own, numbers, st.sampled_from([TOKEN, TOKEN, 1])),
    Withdrawn: st.builds(Withdrawn, reasons),
    WriterGone: st.builds(WriterGone, peers),
    Proven: st.just(Proven(A)),
    Tick: st.just(Tick()),
}
FROM_PRODUCER = (Registered, Progress, Complete, Failed, Revoked, Unproven)
members = st.builds(attempt, st.just(0), st.sampled_from([0, 1]))
TO_REQUEST: Strategies = {
    MemberTold: st.builds(MemberTold, members, st.sampled_from(MemberOutcome), reasons),
    MemberFreed: st.builds(MemberFreed, members),
    Cancelled: st.just(Cancelled(A)),
    TakenBack: st.just(TakenBack(A)),
    Readmitted: st.just(Readmitted(A)),
    Tick: st.just(Tick()),
}
attempts = st.builds(attempt, st.integers(0, 2))
registers = st.builds(
    register,
    st.integers(0, 2),
    st.sampled_from([0, 0, 4, 8]),
    st.sampled_from([8, 8, 12]),
    st.sampled_from([b"a", b"a", b"a", b"b"]),
)
TO_PRODUCER: Strategies = {
    Arrived: st.just(Arrived(A, b"a")),
    Computed: st.builds(
        Computed, st.just(A), st.sampled_from([4, 8, 8]), st.just(((0, 1),)), st.booleans()
    ),
    PrefillPreempted: st.just(PrefillPreempted(A)),
    PrefillResumed: st.just(PrefillResumed(A)),
    PrefillAborted: st.just(PrefillAborted(A)),
    RegistrationReceived: st.builds(RegistrationReceived, registers, epochs, st.just(D)),
    Query: st.builds(Query, attempts),
    Revoke: st.builds(Revoke, attempts),
    Received: st.builds(Received, attempts),
    LinkDown: st.builds(LinkDown, epochs, st.just(D), st.none()),
    Permitted: st.builds(Permitted, epochs),
    WriteDone: st.builds(WriteDone, attempts, numbers),
    WriteFailed: st.builds(WriteFailed, attempts, numbers),
    WriteRefused: st.builds(WriteRefused, attempts, numbers),
    WriteUnknown: st.builds(WriteUnknown, attempts, numbers),
    WriterGone: st.builds(WriterGone, st.sampled_from([D, P])),
    Proven: st.just(Proven(A)),
    Tick: st.just(Tick()),
}
TO_LINK: Strategies = {
    Wanted: st.just(Wanted()),
    Unwanted: st.just(Unwanted()),
    Opened: st.builds(Opened, epochs, peers),
    Closed: st.just(Closed("")),
    Ping: st.builds(Ping, st.just(int(START))),
    Grant: st.builds(
        Grant,
        st.sampled_from([int(START), int(START + seconds(1)), 7]),
        st.just(POLICY.lease),
        st.sampled_from([P.incarnation, P_AGAIN.incarnation]),
        st.sampled_from([D.incarnation, Incarnation(9)]),
    ),
    Doubted: st.just(Doubted()),
    Tick: st.just(Tick()),
}


def walk(strategies: Strategies) -> st.SearchStrategy[list[tuple[Any, int]]]:
    return st.lists(st.tuples(st.one_of(*strategies.values()), times), max_size=40)


Seen = list[tuple[Any, Any, Any, tuple[Any, ...]]]


def run(
    table: Table[Any],
    state: Any,
    steps: list[tuple[Any, int]],
    capabilities: Capabilities,
    check: Callable[[Any, Instant], None],
) -> tuple[Any, Seen]:
    """Walk; nothing but LocalProtocolError may be raised, and ignored events change nothing."""
    now = START
    seen: Seen = []
    for event, wait in steps:
        now = Instant(now + wait)
        if isinstance(event, FROM_PRODUCER) and state.epoch is None:
            continue  # nobody can answer for what was not handed over: routing lets none through
        try:
            step = table.step(state, event, now, rules(capabilities))
        except LocalProtocolError:
            continue
        assert step.state.status in step.row.targets
        if step.row.kind == "ignore":
            assert step.state is state
            assert step.effects == ()
        seen.append((state, event, step.state, step.effects))
        state = step.state
        check(state, now)
    return state, seen


def effects_of(seen: Seen, *kinds: type) -> list[Any]:
    return [effect for *_, effects in seen for effect in effects if isinstance(effect, kinds)]


@pytest.mark.parametrize(
    ("table", "strategies"),
    [
        (CONSUMER, TO_CONSUMER),
        (REQUEST, TO_REQUEST),
        (PRODUCER, TO_PRODUCER),
        (LINK, TO_LINK),
    ],
    ids=row_name,
)
def test_the_walks_know_every_event(table: Table[Any], strategies: Strategies) -> None:
    assert set(strategies) == set(table.events)


CONSUMER_WAITS_FOR = {
    # Only a proof helps, and a known bound gives a deadline once the fence is known.
    consumer.QUARANTINED,
    # The link was suspected in the same step, and its end leads out.
    consumer.REVOKING,
}


@walks
@given(walk(TO_CONSUMER), capabilities, st.booleans())
def test_a_consumer_tells_once_frees_once_and_ends(
    steps: list[tuple[Any, int]], capabilities: Capabilities, nothing_to_write: bool
) -> None:
    begin, effects = offer(register(start=8 if nothing_to_write else 0), START, rules(capabilities))

    def check(state: consumer.Consumer, now: Instant) -> None:
        if state.next_deadline != FOREVER:
            assert state.status not in consumer.TERMINAL
        elif state.status not in consumer.TERMINAL:
            assert state.status in CONSUMER_WAITS_FOR
        told = state.status in (consumer.REVOKING, consumer.QUARANTINED, *consumer.TERMINAL)
        assert state.told or not told

    state, seen = run(CONSUMER, begin, steps, capabilities, check)
    told = [*effects, *effects_of(seen, MemberTold)]
    assert len(told) == (1 if state.told else 0)
    assert len(effects_of(seen, MemberFreed)) == (1 if consumer.is_terminal(state) else 0)
    for before, _, after, made in seen:
        if before.status in consumer.TERMINAL:
            assert after is before
            assert made == ()
        if consumer.is_terminal(after) and not consumer.is_terminal(before):
            freed = [type(effect) for effect in made]
            assert MemberFreed in freed
    delivered = any(told.outcome is MemberOutcome.DELIVERED for told in told)
    if state.status is consumer.DELIVERED:
        assert delivered


REQUEST_WAITS_FOR = {
    request.RECEIVING: "its members",
    request.RELEASING: "its members",
    request.PREEMPTED: "the engine",
}


@walks
@given(walk(TO_REQUEST), st.integers(0, 4))
def test_a_request_tells_once_and_releases_once(
    steps: list[tuple[Any, int]], failures: int
) -> None:
    begin = request.gather(A, 0, (Member(0, 0), Member(0, 1)), failures)

    def check(state: request.Request, now: Instant) -> None:
        if state.status is request.RETRYING:
            assert state.next_deadline != FOREVER
        else:
            assert state.next_deadline == FOREVER
            assert state.status in (*REQUEST_WAITS_FOR, *request.TERMINAL)

    state, seen = run(REQUEST, begin, steps, STRONG, check)
    assert len(effects_of(seen, Delivered, NotDelivered)) == (1 if state.told else 0)
    assert len(effects_of(seen, BlocksReleased)) == (1 if state.released else 0)
    assert len(effects_of(seen, RetryDue)) <= 1
    if effects_of(seen, Delivered):
        assert state.delivered == state.members
    if state.released:
        assert state.freed == state.members
    for before, _, after, made in seen:
        if before.status in request.TERMINAL:
            assert after is before
            assert made == ()
        assert not (request.is_terminal(after) and not after.released)


PRODUCER_WAITS_FOR = {
    producer.QUEUED: "the engine",
    producer.PREFILLING: "the engine",
    producer.PREEMPTED: "the engine",
    producer.DRAINING: "handles that may never close",
    producer.NOTIFYING: "RECEIVED; nothing but a memory is held",
}


@walks
@given(walk(TO_PRODUCER), capabilities)
def test_a_producer_answers_and_keeps_its_source_while_it_is_read(
    steps: list[tuple[Any, int]], capabilities: Capabilities
) -> None:
    begin = producer.produce(A, 0)

    def check(state: producer.Producer, now: Instant) -> None:
        timed = (producer.EXPECTED, producer.HOLDING, producer.WRITING, producer.RETRYING)
        if state.status in timed:
            assert state.next_deadline != FOREVER
        elif state.next_deadline == FOREVER:
            assert state.status in (*PRODUCER_WAITS_FOR, *producer.TERMINAL)
        else:
            assert state.status is producer.DRAINING
        if state.open or state.unknown:
            assert not state.freed, "R8: the source is read"
            assert state.registration is not None
        numbers = [part.number for part in (*state.open, *state.done)]
        assert len(numbers) == len(set(numbers)), "R10"
        assert len({verdict.attempt for verdict in state.ended}) == len(state.ended)

    _, seen = run(PRODUCER, begin, steps, capabilities, check)
    ended: set[AttemptId] = set()
    ordered: set[tuple[AttemptId, int]] = set()
    for before, event, after, effects in seen:
        for post in (effect for effect in effects if isinstance(effect, PostWrite)):
            assert (post.attempt, post.part.number) not in ordered, "R10: a part number is new"
            assert post.attempt not in ended, "R7: what has ended is served no more"
            ordered.add((post.attempt, post.part.number))
        ended |= {verdict.attempt for verdict in after.ended}
        if isinstance(event, Received):
            # The consumer will not name it again; a walk may.
            ended.discard(event.attempt)
            ordered = {name for name in ordered if name[0] != event.attempt}
        if isinstance(event, Revoke | Query):
            assert any(isinstance(effect, Send) for effect in effects), "R1: always answered"
        closing = (Complete, Failed, Revoked)
        for sent in (effect for effect in effects if isinstance(effect, Send)):
            if isinstance(sent.message, closing):
                assert not (after.registration and producer_serves(after, sent.message.attempt))
        if SourceFreed in [type(effect) for effect in effects]:
            assert after.freed
            assert not before.freed


def producer_serves(state: producer.Producer, name: AttemptId) -> bool:
    return state.registration is not None and state.registration.register.attempt == name


@walks
@given(walk(TO_LINK), st.booleans())
def test_a_link_ends_with_every_epoch_it_had(steps: list[tuple[Any, int]], grants: bool) -> None:
    begin = (link.dialing if grants else link.accepting)(D.incarnation)

    def check(state: link.Link, now: Instant) -> None:
        if state.status in (link.UP, link.CONNECTING):
            assert state.next_deadline != FOREVER
        else:
            assert state.next_deadline == FOREVER
        assert state.last_grant is None or state.grants
        assert len(state.stamps) <= link.STAMPS_OUTSTANDING

    if not grants:
        steps = [step for step in steps if not isinstance(step[0], Wanted)]
    state, seen = run(LINK, begin, steps, STRONG, check)
    ups, downs = effects_of(seen, LinkUp), effects_of(seen, LinkDown)
    assert len(ups) - len(downs) == (1 if state.status is link.UP else 0)
    last: Instant | None = None
    for before, event, after, effects in seen:
        if isinstance(event, Ping) and before.status is not link.UP:
            assert effects == (), "R6: no grant on a link that has ended"
        for down in (effect for effect in effects if isinstance(effect, LinkDown)):
            assert down.fence == (None if last is None else last + POLICY.lease)
            last = None
        last = after.last_grant if after.status is link.UP else None


def link_in(status: link.LinkStatus, *, wanted: bool) -> link.Link:
    state = evolve(link.dialing(D.incarnation), wanted=wanted, status=status)
    if status in (link.UP, link.SUSPECT):
        return evolve(state, epoch=FIRST, peer=P, silent_at=Instant(START + 1))
    return state


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("status", [link.CONNECTING, link.UP, link.SUSPECT])
def test_a_link_is_dialled_again_for_whoever_wants_it_last(
    status: link.LinkStatus, wanted: bool
) -> None:
    state = link_in(status, wanted=not wanted)
    event = Wanted() if wanted else Unwanted()
    state = LINK.step(state, event, START, rules()).state
    assert state.status is status
    state = LINK.step(state, Closed(""), START, rules()).state
    assert state.status is (link.CONNECTING if wanted else link.ENDED)
    due = Instant(START + POLICY.connect_backoff)
    assert state.next_deadline == (due if wanted else FOREVER)


@pytest.mark.parametrize("status", link.LinkStatus)
def test_a_newer_link_is_up_whatever_the_older_one_was(status: link.LinkStatus) -> None:
    step = LINK.step(link_in(status, wanted=True), Opened(SECOND, P), START, rules())
    downs = [LinkDown(FIRST, P, None)] if status is link.UP else []
    assert list(step.effects) == [*downs, LinkUp(SECOND, P)]
    assert step.state.status is link.UP
    assert step.state.epoch == SECOND


def test_a_link_that_stays_down_is_dialled_ever_more_rarely() -> None:
    """Twice as long each time, a lease at most; a new attempt asks again at once."""
    state = LINK.step(link.dialing(D.incarnation), Wanted(), START, rules()).state
    waits = []
    for _ in range(12):
        state = LINK.step(state, Closed("refused"), START, rules()).state
        waits.append(state.timer_at - START)
        step = LINK.step(state, Tick(), state.timer_at, rules())
        assert step.effects == (DialPeer(),)
        assert step.state.timer_at == FOREVER
        state = step.state
    base = POLICY.connect_backoff
    assert waits == [min(base << times, POLICY.lease) for times in range(12)]
    assert waits[-1] == POLICY.lease

    state = LINK.step(state, Closed("refused"), START, rules()).state
    state = LINK.step(state, Wanted(), START, rules()).state
    assert state.timer_at == START + base

    state = LINK.step(state, Opened(FIRST, P), START, rules()).state
    state = LINK.step(state, Closed("reset"), START, rules()).state
    assert state.timer_at == START + base, "the address answered: begin anew"
