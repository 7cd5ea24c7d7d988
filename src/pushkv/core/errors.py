"""Every error pushkv raises. A lost link or a failed WRITE is an event, not an error.

`docs/errors.md` is made from what stands here: `make docs-tables`.
"""

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
    """The root of all errors of pushkv. Catch it to catch every one of them.

    Raised:
        By itself only by commands, when an engine that they started does not do what it should.

    What to do:
        Read the message. The commands print it and end with exit code 2; `--logs` keeps what the
        engines wrote.
    """


class LocalProtocolError(PushKVError):
    """We misused the core: an event that is illegal in this state. The state is as it was.

    Raised:
        To whoever calls the core, the model or a `Bridge` against its contract: an event in a state
        that has no row for it, a runtime started twice, block ids that fit no layout, more events
        submitted than a bridge holds. Never because of what a peer sent.

    What to do:
        Mend the caller; from an adapter that comes with pushkv it is a bug of ours. A trace
        (`trace_path`) shows the steps that led there: please report it with one.
    """


class RemoteProtocolError(PushKVError):
    """A peer sent something that is not the protocol. Names the field and the value.

    Raised:
        Where what came from elsewhere is decoded or mapped: messages, layouts, block ids, the
        metadata of a transport. Inside the runtime it is caught, counted by cause, and costs the
        request or the connection that it came with. Only who decodes by himself sees it.

    What to do:
        Compare the versions and the options of both engines. A peer that keeps sending such things
        is not pushkv, or is damaged, or is hostile: see SECURITY.md.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} = {value!r}: expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class TransportError(PushKVError):
    """A transport could not do what its contract says. The message says what to do about it.

    Raised:
        When a transport starts or stops: the library refuses, memory cannot be registered, the
        fabric is not the one that was asked for, a start takes too long. A WRITE that fails raises
        nothing: its completion says FAILED or UNKNOWN.

    What to do:
        What the message says. `pushkv doctor` tries each transport that is installed and names what
        is missing.
    """


class ConfigurationError(PushKVError, ValueError):
    """A setting is wrong. Names the field, the value, and what is expected.

    Raised:
        Before anything runs: by `Policy`, `RuntimeConfig`, credentials, layouts, transports, the
        options of the vLLM connector, and the options of the commands.

    What to do:
        Set the field as the message says. An unknown option of the connector names the closest
        known ones.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} = {value!r}: expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class MissingDependencyError(PushKVError, ImportError):
    """An optional dependency is not installed. The message says what to install.

    Raised:
        Where the dependency is needed first, never by `import pushkv`.

    What to do:
        Install what it names, mostly an extra: `pip install "pushkv[nixl]"`.
    """
