"""Generated and read workloads are what was asked for, and say what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.bench.trace_file import TraceRow, blocks_of, parse_trace, read_trace, write_trace
from pushkv.bench.workload import (
    BLOCK_TOKENS,
    Cell,
    Lengths,
    generate,
    parse_cell,
    parse_lengths,
    split,
)
from pushkv.core.errors import ConfigurationError

OUTPUT = parse_lengths("32")
GOOD = {"timestamp": 3, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}

lengths = st.builds(
    lambda pairs: Lengths(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)),
    st.lists(st.tuples(st.integers(300, 3_000), st.floats(0.1, 10)), min_size=1, max_size=4),
)
cells = st.builds(
    Cell,
    prompt=lengths,
    output=st.builds(lambda n: Lengths((n,), (1.0,)), st.integers(1, 64)),
    qps=st.sampled_from([0.0, 0.5, 20.0]),
    shared=st.sampled_from([0, BLOCK_TOKENS, 2 * BLOCK_TOKENS]),
    cancel_share=st.floats(0, 1),
)
rows = st.builds(
    lambda steps, block: (
        [
            TraceRow(at, tokens, output, tuple(range(first, first + blocks_of(tokens, block))))
            for at, (_, tokens, output, first) in zip(
                _running(step[0] for step in steps), steps, strict=True
            )
        ],
        block,
    ),
    st.lists(
        st.tuples(
            st.integers(0, 10**6), st.integers(1, 5_000), st.integers(1, 900), st.integers(0, 99)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([16, 128, 512]),
)


def _running(steps: Iterable[int]) -> Iterator[int]:
    total = 0
    for step in steps:
        total += step
        yield total


@given(rows)
def test_what_is_written_is_read(case) -> None:
    trace, block = case
    assert parse_trace(write_trace(trace), block_tokens=block) == trace


@given(cells, st.integers(1, 60), st.integers(0, 2**32))
def test_a_generated_trace_is_what_the_cell_says(cell: Cell, count: int, seed: int) -> None:
    trace = generate(cell, count, seed)
    assert trace == generate(cell, count, seed)
    assert parse_trace(write_trace(trace), block_tokens=BLOCK_TOKENS) == trace
    assert len(trace) == count
    assert {row.input_length for row in trace} <= set(cell.prompt.tokens)
    assert {row.output_length for row in trace} <= set(cell.output.tokens)
    if not cell.qps:
        assert {row.timestamp_ms for row in trace} == {0}
    prefix = cell.shared // BLOCK_TOKENS
    assert all(row.hash_ids[:prefix] == tuple(range(prefix)) for row in trace)
    own = [each for row in trace for each in row.hash_ids[prefix:]]
    assert len(set(own)) == len(own)
    assert set(own).isdisjoint(range(prefix))


@given(cells, st.integers(2, 40), st.integers(1, 5), st.integers(0, 99))
def test_rounds_hold_every_request_once(cell: Cell, count: int, rounds: int, seed: int) -> None:
    trace = generate(cell, count, seed)
    rounds = min(rounds, count)
    parts = split(trace, rounds, seed=seed, cancel_share=cell.cancel_share)
    assert [r.hash_ids for part in parts for r in part] == [row.hash_ids for row in trace]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    gaps = [later.timestamp_ms - row.timestamp_ms for row, later in pairwise(trace)]
    told = [0.0]
    for part in parts:
        told += [told[-1] + each.arrival_s for each in part]
        assert all(each.arrival_s >= 0 for each in part)
    assert sum(gaps) + trace[0].timestamp_ms == pytest.approx(trace[-1].timestamp_ms)
    leaves = [r.leaves_after is not None for part in parts for r in part]
    assert cell.cancel_share > 0 or not any(leaves)
    assert cell.cancel_share < 1 or all(leaves)


def test_a_round_keeps_the_gaps_of_the_trace() -> None:
    trace = [TraceRow(at, 1, 1, (0,)) for at in (500, 1_000, 4_000, 4_000)]
    assert [[r.arrival_s for r in part] for part in split(trace, 2)] == [[0.5, 1.0], [3.0, 3.0]]


def test_poisson_arrivals_have_the_rate_asked_for() -> None:
    trace = generate(parse_cell("128@2.5", OUTPUT), 4_000, seed=1)
    gaps = [later.timestamp_ms - row.timestamp_ms for row, later in pairwise(trace)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(400, rel=0.05)
    # Of an exponential distribution the deviation is the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(
        mean, rel=0.1
    )


def test_prompts_share_the_tokens_of_the_blocks_they_share() -> None:
    cell = parse_cell("700+256", OUTPUT)
    first, second = split(generate(cell, 2, seed=3), 1)[0]
    one, two = first.token_ids("a", 3, 1023), second.token_ids("a", 3, 1023)
    assert len(one) == len(two) == 700
    assert one[:256] == two[:256]
    assert all(one[at : at + 8] != two[at : at + 8] for at in range(256, 692, 8))
    assert one != first.token_ids("b", 3, 1023)
    assert min(one) >= 3
    assert max(one) <= 1023


@given(cells, st.integers(0, 99))
def test_what_warms_up_shares_the_prefix_and_nothing_else(cell: Cell, seed: int) -> None:
    (requests,) = split(generate(cell, 6, seed), 1)
    prefix = cell.shared // BLOCK_TOKENS
    seen = {each for one in requests for each in one.hash_ids}
    for serial, one in enumerate(requests):
        new = one.with_new_blocks(cell.shared, serial)
        assert new.hash_ids[:prefix] == one.hash_ids[:prefix]
        assert (len(new.hash_ids), new.prompt_tokens) == (len(one.hash_ids), one.prompt_tokens)
        assert seen.isdisjoint(new.hash_ids[prefix:])
        assert new.leaves_after is None
        seen.update(new.hash_ids)


@pytest.mark.parametrize(
    ("text", "prompt", "qps", "shared"),
    [
        ("128", (128,), 0, 0),
        ("512@0.8", (512,), 0.8, 0),
        ("1024@0.6+768", (1024,), 0.6, 768),
        ("1024+768", (1024,), 0, 768),
        ("128x3,2048@1", (128, 2048), 1, 0),
    ],
)
def test_cells_are_read(text: str, prompt: tuple[int, ...], qps: float, shared: int) -> None:
    cell = parse_cell(text, OUTPUT)
    assert (cell.prompt.tokens, cell.qps, cell.shared) == (prompt, qps, shared)


def test_weights_decide_how_often() -> None:
    mix = parse_lengths("10x3,20x1")
    trace = generate(Cell(mix, OUTPUT), 4_000, seed=5)
    assert mix.mean == 12.5
    assert sum(row.input_length == 10 for row in trace) == pytest.approx(3_000, rel=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lengths ''"),
        ("12@x", "cell '12@x'"),
        ("12@-1", "qps -1.0"),
        ("0@1", "lengths 0"),
        ("512@1+512", "shared 512"),
        ("512@1+100", "shared 100"),
        ("512@nan", "qps nan"),
        ("512x0", "weight 0.0"),
    ],
)
def test_a_wrong_cell_is_refused_by_field_and_value(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_cell(text, OUTPUT)
    for word in said.split():
        assert word in str(caught.value)


def without(field: str) -> dict[str, object]:
    return {name: value for name, value in GOOD.items() if name != field}


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("{", "f:3", "'{'"),
        ("[1]", "f:3", "[1]"),
        (json.dumps(without("timestamp")), "f:3: timestamp", "None"),
        (json.dumps(without("hash_ids")), "f:3: hash_ids", "None"),
        (json.dumps(GOOD | {"timestamp": "3"}), "f:3: timestamp", "'3'"),
        (json.dumps(GOOD | {"timestamp": -1}), "f:3: timestamp", "-1"),
        (json.dumps(GOOD | {"timestamp": 2}), "f:3: timestamp", "2"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "f:3: timestamp", "nan"),
        (json.dumps(GOOD | {"timestamp": float("inf")}), "f:3: timestamp", "inf"),
        (json.dumps(GOOD | {"input_length": 0}), "f:3: input_length", "0"),
        (json.dumps(GOOD | {"input_length": True}), "f:3: input_length", "True"),
        (json.dumps(GOOD | {"output_length": 1.5}), "f:3: output_length", "1.5"),
        (json.dumps(GOOD | {"hash_ids": [0]}), "f:3: hash_ids", "1 ids"),
        (json.dumps(GOOD | {"hash_ids": [0, -1]}), "f:3: hash_ids", "-1"),
        (json.dumps(GOOD | {"hash_ids": "ab"}), "f:3: hash_ids", "'ab'"),
    ],
)
def test_a_wrong_line_is_refused_by_number_field_and_value(
    line: str, field: str, value: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_trace(f"{json.dumps(GOOD)}\n\n{line}\n", "f")
    assert field in str(caught.value)
    assert value in str(caught.value)


@given(st.text(max_size=200))
def test_no_text_raises_anything_else(text: str) -> None:
    with suppress(ConfigurationError):
        assert parse_trace(text)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="missing"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="binary"):
        read_trace(tmp_path / "binary")


def test_rounds_need_requests() -> None:
    with pytest.raises(ConfigurationError, match="rounds"):
        split([TraceRow(0, 1, 1, (0,))], 2)
    with pytest.raises(ConfigurationError, match="count"):
        generate(parse_cell("128", OUTPUT), 0, 0)
