"""Every error pushkv raises. A lost link or a failed WRITE is an event, not an error."""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "LocalProtocolError",
    "MissingDependencyError",
    "PushKVError",
    "RemoteProtocolError",
    "TransportError",
]


class PushKVError(Exception):
    """The root of all errors of pushkv."""


class LocalProtocolError(PushKVError):
    """We misused the core: an event that is illegal in this state. The state is as it was."""


class RemoteProtocolError(PushKVError):
    """A peer sent something that is not the protocol. Names the field and the value."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} = {value!r}: expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class TransportError(PushKVError):
    """A transport could not do what its contract says. The message says what to do about it."""


class ConfigurationError(PushKVError, ValueError):
    """A setting is wrong. Names the field, the value, and what is expected."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} = {value!r}: expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class MissingDependencyError(PushKVError, ImportError):
    """An optional dependency is not installed. The message says what to install."""
