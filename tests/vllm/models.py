"""Other small models, for engines of other caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pushkv.demo.tiny_model import TinyModel, write_tiny_model

WINDOW = 200
"""Tokens that a layer with a window attends to."""


def write_sliding_model(folder: Path) -> None:
    """The tiny model with attention to the last few tokens only, in every layer."""
    write_tiny_model(folder)
    _configure(folder, {**_MISTRAL, "sliding_window": WINDOW})


def write_hybrid_model(folder: Path) -> None:
    """The tiny model with a window in every second layer: two KV cache groups."""
    write_tiny_model(folder)
    kinds = ["sliding_attention", "full_attention"] * (TinyModel().layers // 2)
    _configure(folder, {**_MISTRAL, "sliding_window": WINDOW, "layer_types": kinds})


def write_state_model(folder: Path) -> None:
    """The configuration of an LFM2, whose every second layer keeps a state instead of KV.

    The weights in the folder are not its own.
    """
    write_tiny_model(folder)
    shape = TinyModel()
    _configure(
        folder,
        {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * (shape.layers // 2),
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": shape.hidden,
            "block_dim": shape.hidden,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
    )


_MISTRAL: Mapping[str, object] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
}


def _configure(folder: Path, changes: Mapping[str, object]) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(changes)))
