"""A small Llama with random weights whose every logit depends on the whole context.

Most random weights make a poor witness: with the usual small ones the output hardly looks at the KV
cache, so a corrupted cache goes unseen. Here the attention is strong. Queries and keys are scaled
per head, from heads that attend to everything alike to heads that pick out a few positions, and
values and output projections are large beside the embeddings, so what a layer reads from the cache
outweighs what it knew. A change at one early position then moves the logits far more than the
rounding of float32 does, and the tokens of two engines can be compared one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from pushkv.core.errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TinyModel", "make_prompt", "vocabulary", "write_tiny_model"]

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""Token ids 0, 1 and 2. Their rows of the output matrix are zero, so greedy search avoids them."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

ATTENTION_SHARPNESS = (1.0, 4.0)
"""Standard deviation of the attention scores of the first and the last head; between, geometric."""
VALUE_GAIN = 2.5
"""Output over input of the value and the output projection, by standard deviation."""
MLP_GAIN = 2.0
EMBEDDING_SCALE = 2.0
HEAD_SCALE = 1.0


@frozen
class TinyModel:
    """The shape of the model.

    Attributes:
        hidden: Width of the residual stream.
        layers: Transformer layers.
        heads: Query heads per layer.
        kv_heads: Key and value heads per layer; divides `heads`.
        head_dim: Width of a head; vLLM's CPU attention takes multiples of 32.
        words: Size of the vocabulary, special tokens included.
        max_positions: Longest context, in tokens.
    """

    hidden: int = field(default=256)
    layers: int = field(default=4)
    heads: int = field(default=4)
    kv_heads: int = field(default=4)
    head_dim: int = field(default=64)
    words: int = field(default=1024)
    max_positions: int = field(default=8192)

    def __attrs_post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigurationError(name, getattr(self, name), "an integer of at least 1")
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                "kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}"
            )
        if not len(SPECIAL_TOKENS) < self.words <= len(SPECIAL_TOKENS) + len(_all_words()):
            most = len(SPECIAL_TOKENS) + len(_all_words())
            raise ConfigurationError("words", self.words, f"{len(SPECIAL_TOKENS) + 1} to {most}")

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token over all layers, in bytes, in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


def write_tiny_model(
    path: Path, seed: int = 0, hidden: int = 256, layers: int = 4, shape: TinyModel | None = None
) -> Path:
    """Write weights, configuration and tokenizer of a random Llama into the directory `path`.

    The same seed and shape give the same bytes. `hidden` and `layers` are short for a `shape` that
    differs from `TinyModel()` in nothing else. Blocks while it writes (15 MB by default).

    Returns:
        `path`, which any loader of Hugging Face models takes.

    Raises:
        MissingDependencyError: safetensors or tokenizers is not installed.
        ConfigurationError: The shape is impossible.
    """
    shape = shape or TinyModel(hidden=hidden, layers=layers)
    try:
        from safetensors.numpy import save_file
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ImportError as error:
        raise MissingDependencyError(
            f"the tiny model needs {error.name}: pip install 'pushkv[demo]'"
        ) from error

    path.mkdir(parents=True, exist_ok=True)
    save_file(_weights(shape, seed), path / "model.safetensors", metadata={"format": "pt"})

    ids = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *vocabulary(shape)))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))

    unknown, begin, end = SPECIAL_TOKENS
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": unknown,
            "bos_token": begin,
            "eos_token": end,
            "model_max_length": shape.max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write_json(path / "config.json", _configuration(shape))
    return path


def vocabulary(shape: TinyModel | None = None) -> tuple[str, ...]:
    """The words of the model, in the order of their token ids, which start at 3."""
    return _all_words()[: (shape or TinyModel()).words - len(SPECIAL_TOKENS)]


def make_prompt(length: int, seed: int, shape: TinyModel | None = None) -> str:
    """A prompt of exactly `length` tokens, random words that `seed` decides.

    Raises:
        ConfigurationError: `length` is not positive.
    """
    if length < 1:
        raise ConfigurationError("length", length, "at least 1 token")
    words = vocabulary(shape)
    picks = np.random.Generator(np.random.PCG64(seed)).integers(0, len(words), length)
    return " ".join(words[pick] for pick in picks)


def _all_words() -> tuple[str, ...]:
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    return tuple(left + right for left in syllables for right in syllables)


def _configuration(shape: TinyModel) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": shape.words,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _weights(shape: TinyModel, seed: int) -> dict[str, NDArray[np.float32]]:
    """All tensors by their Hugging Face name; each is (outputs, inputs)."""
    random = np.random.Generator(np.random.PCG64(seed))

    def matrix(outputs: int, inputs: int, gain: float) -> NDArray[np.float32]:
        """Maps inputs of standard deviation 1 to outputs of standard deviation `gain`."""
        values = random.standard_normal((outputs, inputs), dtype=np.float32)
        return values * np.float32(gain / np.sqrt(inputs))

    hidden, wide = shape.hidden, 2 * shape.hidden
    ones = np.ones(hidden, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(shape.words, hidden, EMBEDDING_SCALE * np.sqrt(hidden)),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(shape.words, hidden, HEAD_SCALE * np.sqrt(hidden)),
    }
    tensors["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0.0
    sharpness = np.geomspace(*ATTENTION_SHARPNESS, shape.heads, dtype=np.float32)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        query = matrix(shape.heads * shape.head_dim, hidden, 1.0)
        tensors |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.post_attention_layernorm.weight": ones,
            f"{name}.self_attn.q_proj.weight": query * sharpness.repeat(shape.head_dim)[:, None],
            f"{name}.self_attn.k_proj.weight": matrix(shape.kv_heads * shape.head_dim, hidden, 1.0),
            f"{name}.self_attn.v_proj.weight": matrix(
                shape.kv_heads * shape.head_dim, hidden, VALUE_GAIN
            ),
            f"{name}.self_attn.o_proj.weight": matrix(
                hidden, shape.heads * shape.head_dim, VALUE_GAIN
            ),
            f"{name}.mlp.gate_proj.weight": matrix(wide, hidden, 1.0),
            f"{name}.mlp.up_proj.weight": matrix(wide, hidden, 1.0),
            f"{name}.mlp.down_proj.weight": matrix(hidden, wide, MLP_GAIN),
        }
    return tensors


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
