"""The command line: `pushkv demo` and what follows."""

from __future__ import annotations

from pushkv.core.errors import MissingDependencyError

__all__ = ["main"]


def main() -> None:
    """Run the command line.

    Raises:
        MissingDependencyError: Typer or Rich is not installed.
    """
    try:
        from .app import app
    except ImportError as error:
        raise MissingDependencyError(
            f"the command line needs {error.name}: pip install 'pushkv[demo]'"
        ) from error
    app()
