"""`python -m fuzz TARGET [libFuzzer's arguments]`: coverage-guided, with atheris. Alone: names."""

from __future__ import annotations

import sys


def main() -> None:
    """Fuzz one target until a finding, or for as long as libFuzzer is told."""
    if len(sys.argv) == 1:
        from .targets import TARGETS

        print(*TARGETS)
        return
    import atheris

    packages = ["pushkv", "pushkv_nixl", "pushkv_vllm", "fuzz"]
    with atheris.instrument_imports(include=packages):
        from fuzz.targets import TARGETS
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
