"""The kept corpus of the fuzzer: what once reached something new, and every finding of the past."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.targets import TARGETS
from hypothesis import given
from hypothesis import strategies as st

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"


@pytest.mark.parametrize("target", TARGETS)
def test_every_kept_input_is_survived(target: str) -> None:
    kept = sorted((CORPUS / target).iterdir())
    assert kept, "a target without a corpus"
    for path in kept:
        TARGETS[target](path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
def test_what_a_kept_input_may_become_is_survived(target: str, data: st.DataObject) -> None:
    """A few mutations of one, on every run of the tests."""
    kept = sorted((CORPUS / target).iterdir())
    whole = bytearray(data.draw(st.sampled_from(kept)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole)))
        cut = data.draw(st.integers(0, 8))
        whole[at : at + cut] = data.draw(st.binary(max_size=8))
    TARGETS[target](bytes(whole))


def test_no_corpus_is_left_over() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
