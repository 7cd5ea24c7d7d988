"""Regions, and WRITEs cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import ConfigurationError
from pushkv.transport import Region, Segments
from pushkv_nixl import regions_of
from pushkv_nixl._pieces import PIECE_BYTES, PIECE_DESCRIPTORS, cut
from pushkv_nixl._regions import RegionTable

HOST = RegionTable.of([Region(1 << 20, 1 << 40)])


def segments(rows: Sequence[tuple[int, int]]) -> Segments:
    return np.array(rows, np.uint64).reshape(-1, 2)


def run(lengths: Sequence[int], base: int = 1 << 20) -> Segments:
    starts = accumulate(lengths[:-1], initial=base) if lengths else []
    return segments(list(zip(starts, lengths, strict=True)))


@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 2), max_size=30))
def test_pieces_are_the_write_in_order_within_both_limits(lengths: list[int]) -> None:
    source, destination = run(lengths), run(lengths, 1 << 30)
    pieces = cut(source, destination, HOST, HOST)
    filled = source[:, 1] > 0
    rows = [piece.source[:, :2] for piece in pieces]
    assert np.array_equal(np.concatenate(rows) if rows else segments([]), source[filled])
    rows = [piece.destination[:, :2] for piece in pieces]
    assert np.array_equal(np.concatenate(rows) if rows else segments([]), destination[filled])
    for piece in pieces:
        assert 1 <= len(piece.source) == len(piece.destination)
        assert len(piece.source) == 1 or piece.source[:, 1].sum() <= PIECE_BYTES
    for one, other in pairwise(pieces):  # none is cut for nothing
        assert one.source[:, 1].sum() + other.source[0, 1] > PIECE_BYTES


def test_pieces_have_no_more_than_so_many_descriptors() -> None:
    pieces = cut(run([8] * 5000), run([8] * 5000), HOST, HOST)
    assert [len(piece.source) for piece in pieces] == [PIECE_DESCRIPTORS] * 4 + [904]


def test_a_piece_has_one_kind_of_memory_on_each_side_and_names_the_device() -> None:
    mixed = RegionTable.of([Region(4096, 4096), Region(1 << 30, 4096, 1), Region(1 << 31, 4096, 0)])
    source = segments([(4096, 8), (1 << 30, 8), (1 << 31, 8), (4104, 8)])
    destination = segments([(1 << 20, 8), (1 << 20, 8), (1 << 20, 8), (1 << 20, 8)])
    pieces = cut(source, destination, mixed, HOST)
    assert [piece.from_device for piece in pieces] == [False, True, False]
    assert [piece.to_device for piece in pieces] == [False, False, False]
    assert [piece.source[:, 2].tolist() for piece in pieces] == [[0], [1, 0], [0]]


@pytest.mark.parametrize(
    ("source", "destination", "said"),
    [
        ([(1 << 20, 8)], [(1 << 20, 9)], "segment 0: 8 bytes to 9"),
        ([(1 << 20, 8)], [], "1 source and 0 destination"),
        ([((1 << 20) - 1, 8)], [(1 << 20, 8)], "source: segment 0"),
        ([(1 << 20, 8)], [((1 << 20) + (1 << 40) - 7, 8)], "destination: segment 0"),
        ([(1 << 20, 8)] * 2, [(1 << 20, 8), (2**64 - 1, 8)], "destination: segment 1"),
        ([(1 << 20, 2**64 - 1)], [(1 << 20, 2**64 - 1)], "source: segment 0"),
    ],
)
def test_segments_that_do_not_fit_are_named(
    source: list[tuple[int, int]], destination: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        cut(segments(source), segments(destination), HOST, HOST)


def test_segments_of_another_shape_are_refused() -> None:
    good = segments([(1 << 20, 8)])
    for bad in (good.astype(np.int64), good[:, :1], good[0]):
        with pytest.raises(ValueError, match="expected"):
            cut(bad, good, HOST, HOST)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected"):
            cut(good, bad, HOST, HOST)  # type: ignore[arg-type]


REGION = st.builds(Region, st.integers(1, 300), st.integers(1, 60))


@given(st.lists(REGION, min_size=1, max_size=8), st.integers(0, 400), st.integers(1, 50))
def test_a_segment_is_inside_if_every_byte_is(
    regions: list[Region], address: int, length: int
) -> None:
    held = {at for each in regions for at in range(each.address, each.address + each.length_bytes)}
    table = RegionTable.of(regions)
    inside = set(range(address, address + length)) <= held
    try:
        rows, device = table.locate(segments([(address, length)]))
    except ValueError:
        assert not inside
    else:
        assert inside
        assert rows.tolist() == [[address, length, 0]]
        assert not device.any()


def test_touching_regions_join_on_the_host_only() -> None:
    assert len(RegionTable.of([Region(4096, 8), Region(4104, 8)]).starts) == 1
    assert len(RegionTable.of([Region(4096, 8, 0), Region(4104, 8, 0)]).starts) == 2


@pytest.mark.parametrize(
    "regions",
    [
        [Region(0, 8)],
        [Region(8, 0)],
        [Region(2**64 - 8, 9)],
        [Region(8, 8, -2)],
        [Region(8, 8), Region(12, 8, 0)],
    ],
)
def test_regions_that_cannot_be_are_refused(regions: list[Region]) -> None:
    with pytest.raises(ConfigurationError, match="region"):
        RegionTable.of(regions)


def test_without_memory_nothing_is_inside() -> None:
    with pytest.raises(ValueError, match="no memory"):
        RegionTable.of([]).locate(segments([(8, 8)]))


class FakeTensor:
    """A tensor as far as `regions_of` looks, so that it is tested without torch."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], device: int = -1) -> None:
        self.shape = shape
        self._stride = stride
        self._device = device

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * 2

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def data_ptr(self) -> int:
        return 4096

    def get_device(self) -> int:
        return self._device


def test_tensors_become_regions_and_equal_ones_become_one() -> None:
    plain = FakeTensor((2, 3, 4), (12, 4, 1))
    permuted = FakeTensor((3, 2, 4), (4, 12, 1))
    assert regions_of([plain, permuted]) == [Region(4096, 48)]
    assert regions_of([FakeTensor((5, 1), (1, 77), 3)]) == [Region(4096, 10, 3)]


def test_tensors_with_gaps_or_without_elements_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"tensors\[1\]"):
        regions_of([FakeTensor((2,), (1,)), FakeTensor((2, 3), (4, 1))])
    with pytest.raises(ConfigurationError, match="nbytes"):
        regions_of([FakeTensor((0,), (1,))])


def test_torch_tensors_are_such_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    region = Region(tensor.data_ptr(), 48)
    assert regions_of([tensor, tensor.permute(1, 0, 2), tensor[:1]]) == [
        region,
        Region(tensor.data_ptr(), 24),
    ]
    with pytest.raises(ConfigurationError, match="stride"):
        regions_of([tensor[:, :2]])
