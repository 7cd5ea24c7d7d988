"""Other small models with the strong attention of the tiny one, for engines of other caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from pushkv.demo.tiny_model import VALUE_GAIN, TinyModel, write_tiny_model

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


def write_latent_model(folder: Path) -> None:
    """A DeepSeek whose attention (MLA) is as strong as the tiny model's.

    A token's cache is one latent of 512 numbers and 64 of the key that carries its position.
    """
    write_tiny_model(folder)
    shape, latent, plain, turned = TinyModel(), 512, 64, 64
    random = np.random.Generator(np.random.PCG64(1))

    def matrix(outputs: int, inputs: int) -> NDArray[np.float32]:
        values = random.standard_normal((outputs, inputs), dtype=np.float32)
        return values / np.float32(np.sqrt(inputs))

    weights = load_file(folder / "model.safetensors")
    tensors = {name: each for name, each in weights.items() if "self_attn" not in name}
    sharpness = np.geomspace(1.0, 4.0, shape.heads, dtype=np.float32).repeat(plain + turned)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}.self_attn"
        unpacked = matrix(shape.heads * (plain + shape.head_dim), latent)
        of_values = unpacked.reshape(shape.heads, plain + shape.head_dim, latent)[:, plain:]
        of_values *= VALUE_GAIN
        query = matrix(shape.heads * (plain + turned), shape.hidden)
        tensors |= {
            f"{name}.q_proj.weight": query * sharpness[:, None],
            f"{name}.kv_a_proj_with_mqa.weight": matrix(latent + turned, shape.hidden),
            f"{name}.kv_a_layernorm.weight": np.ones(latent, dtype=np.float32),
            f"{name}.kv_b_proj.weight": unpacked,
            f"{name}.o_proj.weight": VALUE_GAIN
            * matrix(shape.hidden, shape.heads * shape.head_dim),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _configure(
        folder,
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": plain,
            "qk_rope_head_dim": turned,
            "v_head_dim": shape.head_dim,
            "head_dim": turned,
            "first_k_dense_replace": shape.layers,
            "moe_layer_freq": 1,
            "n_routed_experts": 1,
            "num_experts_per_tok": 1,
        },
    )


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
