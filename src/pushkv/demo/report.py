"""What the demo found, as a table for people and as JSON for scripts."""

from __future__ import annotations

from pathlib import Path

import msgspec
from attrs import define, field
from rich.console import Console
from rich.table import Table

from pushkv.observe.replay import check_trace
from pushkv.observe.timeline import Timeline

__all__ = ["DemoReport", "RequestReport"]

EARLY_TOKENS = 512
EARLY_SHARE = 0.8


@define
class RequestReport:
    """One request of the demo.

    Attributes:
        prompt_tokens: Length of the prompt.
        identical: Whether its tokens are the monolithic engine's, one by one.
        failure: Why it got no answer; empty if it did.
        started_at: When the client sent it, in nanoseconds of the monotonic clock.
        first_token_at: When the client had the first token.
        timeline: What both engines' traces say about its transfer.
    """

    transfer: str
    prompt_tokens: int
    started_at: int
    bytes_expected: int = 0
    identical: bool = False
    failure: str = ""
    first_token_at: int | None = None
    timeline: Timeline = field(factory=Timeline)


@define
class DemoReport:
    """The whole run.

    Attributes:
        engine: "vllm" or "reference".
        dispatch: "concurrent" or "sequential".
        requests: In the order in which they were sent.
        local_prefills: Prompts that the decode engine computed itself.
        canary_changed: Whether one flipped byte of KV changed the tokens of a further request.
        steps_checked: Steps of both engines that were run again through the tables.
        illegal_steps: The first step of either engine that the tables do not allow.
    """

    engine: str
    dispatch: str
    requests: list[RequestReport] = field(factory=list)
    local_prefills: int = 0
    canary_changed: bool = False
    steps_checked: int = 0
    illegal_steps: list[str] = field(factory=list)

    def check_traces(self, traces: tuple[Path, Path]) -> None:
        """Run the traces of both engines again."""
        for trace in map(check_trace, traces):
            self.steps_checked += trace.steps
            if trace.illegal is not None:
                self.illegal_steps.append(f"{trace.path.stem}: {trace.illegal}")

    @property
    def identical(self) -> int:
        """Requests whose tokens all agree."""
        return sum(each.identical for each in self.requests)

    @property
    def failed(self) -> int:
        """Requests without an answer."""
        return sum(bool(each.failure) for each in self.requests)

    @property
    def bytes_written(self) -> int:
        """Bytes of all WRITEs."""
        return sum(each.timeline.bytes_written for each in self.requests)

    @property
    def bytes_expected(self) -> int:
        """Bytes that the prompts' blocks have."""
        return sum(each.bytes_expected for each in self.requests)

    @property
    def early_registrations(self) -> int:
        """Requests registered, by the producer's clock, before prefill was over."""
        return sum(each.timeline.early for each in self.requests)

    @property
    def problems(self) -> list[str]:
        """What keeps the run from proving the point; empty if nothing does."""
        found = []
        count = len(self.requests)
        if self.identical < count:
            found.append(f"{count - self.identical} of {count} requests have other tokens, or none")
        if self.local_prefills:
            found.append(f"{self.local_prefills} prompts were computed by the decode engine")
        if self.bytes_written != self.bytes_expected:
            found.append(f"{self.bytes_written} bytes written, {self.bytes_expected} expected")
        if not self.canary_changed:
            found.append("a flipped byte of KV changed no token: equal tokens prove nothing")
        if not self.steps_checked:
            found.append("no engine wrote a trace")
        return found + self.illegal_steps

    def write_json(self, path: Path) -> None:
        """Write everything, for scripts."""
        whole = {
            "engine": self.engine,
            "dispatch": self.dispatch,
            "requests": len(self.requests),
            "identical": self.identical,
            "failed": self.failed,
            "early_registrations": self.early_registrations,
            "local_prefills": self.local_prefills,
            "bytes_written": self.bytes_written,
            "bytes_expected": self.bytes_expected,
            "canary_changed": self.canary_changed,
            "steps_checked": self.steps_checked,
            "problems": self.problems,
            "timelines": [_row(each) for each in self.requests],
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")

    def show(self, console: Console) -> None:
        """Print the timelines and the summary."""
        table = Table(title=f"{self.dispatch} dispatch; milliseconds after the client's request")
        table.add_column("prompt\ntokens", justify="right")
        for name in ("regis-\ntered", "pre-\nfilled", "write", "notify", "first\ntoken"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("early")
        table.add_column("tokens", no_wrap=True)
        for each in self.requests:
            line = each.timeline
            table.add_row(
                str(each.prompt_tokens),
                *(
                    _after(each.started_at, at)
                    for at in (
                        line.registered_at,
                        line.prefilled_at,
                        line.write_began_at,
                        line.delivered_at,
                        each.first_token_at,
                    )
                ),
                "yes" if line.early else "no",
                each.failure or ("identical" if each.identical else "[red]different[/]"),
            )
        console.print(table)
        for text in self._summary():
            console.print(text, highlight=False)

    def _summary(self) -> list[str]:
        count = len(self.requests)
        long = [each for each in self.requests if each.prompt_tokens >= EARLY_TOKENS]
        early = sum(each.timeline.early for each in long)
        lines = [
            f"identical to the monolithic engine: {self.identical} of {count}",
            f"prompts computed by the decode engine: {self.local_prefills}",
            f"bytes written: {self.bytes_written:,} of {self.bytes_expected:,}",
            (
                f"registered before prefill was over: {self.early_registrations} of {count}"
                f" ({early} of {len(long)} with {EARLY_TOKENS} tokens or more)"
            ),
            f"one flipped byte of KV changes tokens: {'yes' if self.canary_changed else 'no'}",
            f"steps of both engines, run again through the tables: {self.steps_checked}",
        ]
        if self.problems:
            return [*lines, *(f"[bold red]{problem}[/]" for problem in self.problems)]
        return [*lines, "[bold green]every token is right[/]"]


def _after(start: int, at: int | None) -> str:
    return "-" if at is None else f"{(at - start) / 1e6:.1f}"


def _row(each: RequestReport) -> dict[str, object]:
    line = each.timeline

    def after_ms(at: int | None) -> float | None:
        return None if at is None else round((at - each.started_at) / 1e6, 3)

    return {
        "transfer": each.transfer,
        "prompt_tokens": each.prompt_tokens,
        "identical": each.identical,
        "failure": each.failure,
        "early": line.early,
        "bytes_written": line.bytes_written,
        "bytes_expected": each.bytes_expected,
        "registration_ms": after_ms(line.registered_at),
        "prefill_ms": after_ms(line.prefilled_at),
        "write_ms": after_ms(line.write_began_at),
        "written_ms": after_ms(line.written_at),
        "notify_ms": after_ms(line.delivered_at),
        "first_token_ms": after_ms(each.first_token_at),
    }
