"""What every command does alike: `--quiet`, `--json -`, errors in one red line, exit codes."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pushkv.core.errors import PushKVError

__all__ = ["App"]

STANDARD_OUTPUT = Path("-")
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print nothing but errors; the exit code says the rest."),
]


class App(typer.Typer):
    """A Typer whose commands keep the conventions of all.

    `--quiet` silences both streams while a command runs. `--json -` writes to standard output what
    else would go to a file, and sends to standard error what people read. A `PushKVError` is one
    red line and exit code 2; Ctrl-C is exit code 130, after everything was cleaned up.
    """

    def command(self, name: str | None = None, **named: Any) -> Callable[[Any], Any]:
        """As `typer.Typer.command`."""
        register = super().command(name, **named)

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            register(_conventional(function))
            return function

        return decorate


def _conventional(function: Callable[..., None]) -> Callable[..., None]:
    """The function with a context and `--quiet` beside its own parameters."""

    @wraps(function)
    def run(*, context: typer.Context, quiet: bool, **named: Any) -> None:
        try:
            with _streams(named, quiet):
                function(**named)
        except PushKVError as error:
            command = " ".join(["pushkv", *context.command_path.split()[1:]])
            told = Text.assemble((f"{command}: ", "bold red"), str(error))
            Console(stderr=True, soft_wrap=True).print(told, highlight=False)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    of = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [
        inspect.Parameter("context", of, annotation=typer.Context),
        *(each.replace(kind=of) for each in own),
        inspect.Parameter("quiet", of, default=False, annotation=Quiet),
    ]
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


@contextmanager
def _streams(parameters: dict[str, Any], quiet: bool) -> Iterator[None]:
    """Point standard output and error where `--quiet` and `--json -` want them."""
    output = sys.stdout
    with ExitStack() as stack:
        found: Path | None = None
        if parameters.get("json") == STANDARD_OUTPUT:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pushkv-"))
            parameters["json"] = found = Path(folder, "found.json")
            stack.enter_context(redirect_stdout(sys.stderr))
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            yield
        finally:
            if found is not None and found.exists():
                output.write(found.read_text(encoding="utf-8"))
                output.flush()
