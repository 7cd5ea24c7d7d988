"""Request traces in the form that the Mooncake traces have: one JSON object per line.

``timestamp`` is the arrival in milliseconds since the first one, ``input_length`` and
``output_length`` are tokens, and ``hash_ids`` names the prompt's blocks: two prompts that begin
with the same ids begin with the same tokens. The published traces count 512 tokens per id; the last
block of a prompt may be partial.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from pushkv.core.errors import ConfigurationError

__all__ = [
    "MOONCAKE_BLOCK_TOKENS",
    "TraceRow",
    "blocks_of",
    "parse_trace",
    "read_trace",
    "write_trace",
]

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per hash id in the published traces."""
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
SHOWN_CHARACTERS = 80


@frozen
class TraceRow:
    """One request of a trace.

    Attributes:
        timestamp_ms: When it arrives, in milliseconds since the trace began.
        input_length: Tokens of its prompt, at least 1.
        output_length: Tokens it asks for, at least 1.
        hash_ids: One id for each block of its prompt.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def blocks_of(tokens: int, block_tokens: int) -> int:
    """How many blocks hold so many tokens; the last may be partial."""
    return -(-tokens // block_tokens)


def write_trace(rows: Iterable[TraceRow]) -> str:
    """The trace as text, one line per row."""
    return "".join(
        json.dumps(
            {
                "timestamp": row.timestamp_ms,
                "input_length": row.input_length,
                "output_length": row.output_length,
                "hash_ids": list(row.hash_ids),
            }
        )
        + "\n"
        for row in rows
    )


def parse_trace(
    text: str, name: str = "trace", block_tokens: int = MOONCAKE_BLOCK_TOKENS
) -> list[TraceRow]:
    """The rows of a trace, checked one by one. Fields that are not of the schema are ignored.

    Args:
        text: The file's content.
        name: The file's name, for errors.
        block_tokens: Tokens per hash id.

    Raises:
        ConfigurationError: A line is not a row, with its number, the field and the value; or there
            is none.
    """
    rows: list[TraceRow] = []
    earliest_ms = 0.0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = _row(f"{name}:{number}", line, block_tokens)
        if row.timestamp_ms < earliest_ms:
            raise ConfigurationError(
                f"{name}:{number}: timestamp",
                row.timestamp_ms,
                f"at least that of the row before, {earliest_ms:g}",
            )
        earliest_ms = row.timestamp_ms
        rows.append(row)
    if not rows:
        raise ConfigurationError(name, text[:SHOWN_CHARACTERS], "at least one row")
    return rows


def read_trace(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[TraceRow]:
    """The rows of a trace file.

    Raises:
        ConfigurationError: As `parse_trace`, or the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("trace", str(path), f"a readable file ({error})") from error
    return parse_trace(text, str(path), block_tokens)


def _row(where: str, line: str, block_tokens: int) -> TraceRow:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:SHOWN_CHARACTERS]
        raise ConfigurationError(where, shown, f"a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ConfigurationError(where, line[:SHOWN_CHARACTERS], "a JSON object")
    for field in FIELDS:
        if field not in found:
            raise ConfigurationError(f"{where}: {field}", None, "this field")
    prompt = _length(f"{where}: input_length", found["input_length"])
    output = _length(f"{where}: output_length", found["output_length"])
    ids = found["hash_ids"]
    wanted = blocks_of(prompt, block_tokens)
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigurationError(f"{where}: hash_ids", ids, "a list of integers of at least 0")
    if len(ids) != wanted:
        raise ConfigurationError(
            f"{where}: hash_ids",
            f"{len(ids)} ids",
            f"{wanted}, one per {block_tokens} tokens of input_length = {prompt}",
        )
    return TraceRow(_timestamp(where, found["timestamp"]), prompt, output, tuple(ids))


def _length(where: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigurationError(where, value, "an integer of at least 1")
    return value


def _timestamp(where: str, value: object) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value < float("inf")
    ):
        raise ConfigurationError(f"{where}: timestamp", value, "milliseconds, at least 0")
    return value
