"""Two ends that do not fit refuse each other by name, with both values."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given

from pushkv import wire
from pushkv.compatibility import ABSENT, compare
from pushkv.core.ids import Duration, EngineId, Incarnation
from pushkv.core.messages import Hello, RankAddress, Refused
from pushkv.layout import CacheGroup, CacheLayout, CacheRegion
from pushkv.testing.strategies import hellos

MODEL = {
    "dtype": "float16",
    "epoch": "3",
    "revision": "c1ea0b4",
    "rope": "theta=500000",
    "weights": "sha256:1234",
}
LAYOUT = CacheLayout(
    (
        CacheGroup(16, (CacheRegion(0, 64, 4), CacheRegion(256, 64, 4))),
        CacheGroup(32, (CacheRegion(512, 32, 4),)),
    ),
    "float16",
    "HND",
    tensor_parallel_size=2,
)


def hello(**changes: Any) -> Hello:
    plain = Hello(
        wire.PROTOCOL,
        1,
        EngineId("decode-0"),
        Incarnation(2),
        0,
        tuple(MODEL.items()),
        LAYOUT.description(),
        "nixl+ucx",
        "1.5",
        Duration(10**10),
        (),
        b"",
    )
    return attrs.evolve(plain, **changes)


def with_layout(**changes: Any) -> Hello:
    return hello(layout=attrs.evolve(LAYOUT, **changes).description())


def test_what_need_not_agree_is_not_compared() -> None:
    theirs = hello(
        nonce=9,
        engine=EngineId("prefill-3"),
        incarnation=Incarnation(8),
        rank=5,
        directory=(RankAddress(5, "h", 1),),
        memory=b"elsewhere",
        model=tuple(reversed(MODEL.items())),
    )
    assert compare(hello(), theirs) is None


@pytest.mark.parametrize("key", MODEL)
def test_another_model_is_refused_with_both_values(key: str) -> None:
    theirs = hello(model=tuple((MODEL | {key: "other"}).items()))
    assert compare(hello(), theirs) == Refused(f"model.{key}", MODEL[key], "other")
    assert compare(theirs, hello()) == Refused(f"model.{key}", "other", MODEL[key])


@pytest.mark.parametrize("key", MODEL)
def test_a_key_that_one_end_lacks_is_refused(key: str) -> None:
    theirs = hello(model=tuple((each, value) for each, value in MODEL.items() if each != key))
    assert compare(hello(), theirs) == Refused(f"model.{key}", MODEL[key], ABSENT)
    assert compare(theirs, hello()) == Refused(f"model.{key}", ABSENT, MODEL[key])


@pytest.mark.parametrize(
    ("theirs", "refusal"),
    [
        (
            with_layout(groups=(CacheGroup(8, LAYOUT.groups[0].regions), LAYOUT.groups[1])),
            Refused("layout.block_tokens[0]", "16", "8"),
        ),
        (
            with_layout(groups=(LAYOUT.groups[0], CacheGroup(16, LAYOUT.groups[1].regions))),
            Refused("layout.block_tokens[1]", "32", "16"),
        ),
        (
            with_layout(groups=LAYOUT.groups[:1]),
            Refused("layout.block_tokens[1]", "32", ABSENT),
        ),
        (
            with_layout(groups=(LAYOUT.groups[0], CacheGroup(32, (CacheRegion(0, 33, 4),)))),
            Refused("layout.region_block_bytes[1]", "1 x 32", "1 x 33"),
        ),
        (
            with_layout(
                groups=(
                    CacheGroup(16, (CacheRegion(0, 64, 4), CacheRegion(0, 65, 4))),
                    LAYOUT.groups[1],
                )
            ),
            Refused("layout.region_block_bytes[0]", "2 x 64", "1 x 64, 1 x 65"),
        ),
        (with_layout(dtype="bfloat16"), Refused("layout.dtype", "float16", "bfloat16")),
        (with_layout(kv_layout="NHD"), Refused("layout.kv_layout", "HND", "NHD")),
        (with_layout(tensor_parallel_size=4), Refused("layout.tensor_parallel_size", "2", "4")),
        (with_layout(tensor_parallel_rank=1), Refused("layout.tensor_parallel_rank", "0", "1")),
        (hello(transport="memory"), Refused("transport", "nixl+ucx", "memory")),
        (hello(transport_version="1.6"), Refused("transport_version", "1.5", "1.6")),
        (hello(lease=Duration(5)), Refused("lease", "10000000000 ns", "5 ns")),
        (hello(protocol=wire.PROTOCOL + 2), Refused("protocol", "1", "3")),
        (hello(protocol=0), Refused("protocol", "1", "0")),
    ],
    ids=lambda value: value.field if isinstance(value, Refused) else "",
)
def test_every_other_difference_is_refused_with_both_values(
    theirs: Hello, refusal: Refused
) -> None:
    assert compare(hello(), theirs) == refusal


def test_the_number_of_regions_is_described_even_where_the_bytes_agree() -> None:
    pairs = dict(LAYOUT.description())
    theirs = hello(layout=tuple((pairs | {"regions[0]": "1"}).items()))
    assert compare(hello(), theirs) == Refused("layout.regions[0]", "2", "1")


def test_the_protocol_is_compared_first_and_a_neighbour_is_spoken() -> None:
    assert compare(hello(), hello(protocol=wire.PROTOCOL + 1)) is None
    refusal = compare(hello(), hello(protocol=9, transport="memory", model=()))
    assert refusal == Refused("protocol", "1", "9")


@given(hellos(), hellos())
def test_both_ends_see_the_same_difference_and_can_say_it(ours: Hello, theirs: Hello) -> None:
    ours, theirs = (attrs.evolve(each, protocol=max(1, each.protocol)) for each in (ours, theirs))
    assert compare(ours, ours) is None
    here, there = compare(ours, theirs), compare(theirs, ours)
    assert (here is None) == (there is None)
    if here is not None and there is not None:
        assert (here.field, here.ours, here.theirs) == (there.field, there.theirs, there.ours)
        assert wire.Decoder().feed(wire.frame(here)) == [here]
