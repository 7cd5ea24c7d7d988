"""The tiny model: the same bytes for the same seed, and a shape that loaders understand.

That its tokens depend on the whole context is shown on a real engine, by the integration test.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pushkv.core.errors import ConfigurationError
from pushkv.demo.tiny_model import TinyModel, make_prompt, vocabulary, write_tiny_model

SMALL = TinyModel(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, words=40)


def files(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    first, again, other = (
        files(write_tiny_model(tmp_path / str(index), seed=seed, shape=SMALL))
        for index, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}
    assert set(first) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_weights_fit_the_configuration(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    config = json.loads((write_tiny_model(tmp_path, shape=SMALL) / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 + 9 * config["num_hidden_layers"]
    layer = "model.layers.1.self_attn"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert tensors[f"{layer}.q_proj.weight"].shape == (heads * config["head_dim"], 32)
    for name in ("k_proj", "v_proj"):
        assert tensors[f"{layer}.{name}.weight"].shape == (kv_heads * config["head_dim"], 32)
    assert tensors["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    assert not tensors["lm_head.weight"][:3].any()
    assert tensors["lm_head.weight"][3:].any(axis=1).all()


def test_hidden_and_layers_stand_for_a_shape(tmp_path: Path) -> None:
    config = json.loads((write_tiny_model(tmp_path, 0, 64, 1) / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 1)


@pytest.mark.parametrize("length", [1, 5, 1000])
def test_a_prompt_has_exactly_its_length_in_tokens(tmp_path: Path, length: int) -> None:
    from tokenizers import Tokenizer

    write_tiny_model(tmp_path, shape=SMALL)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = make_prompt(length, seed=7, shape=SMALL)
    ids = tokenizer.encode(prompt).ids
    assert len(ids) == length
    assert min(ids) >= 3
    assert tokenizer.decode(ids) == prompt
    assert prompt == make_prompt(length, seed=7, shape=SMALL)


def test_prompts_of_different_seeds_differ_from_the_start() -> None:
    assert len({make_prompt(5, seed) for seed in range(20)}) == 20


def test_words_are_different() -> None:
    words = vocabulary(TinyModel(words=3000))
    assert len(set(words)) == len(words) == 2997


def test_kv_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert SMALL.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("kv_heads", 3), ("words", 3), ("words", 10_000)]
)
def test_an_impossible_shape_is_named(field: str, value: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TinyModel(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="length = 0"):
        make_prompt(0, seed=1)
