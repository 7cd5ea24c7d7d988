"""What an operator asks of a running engine, and may tell it to do. Needs ``pushkv[admin]``.

`state` is what it answers, `snapshot` makes that of the machines, `commands` does what is told,
`server` speaks HTTP. All of it runs in the runtime's thread, between two turns of its loop.
"""

from .state import EngineState

__all__ = ["EngineState"]
