"""A run as one page of HTML: plots drawn as SVG in it, nothing loaded, no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain

from .bars import Ratio, bars
from .results import CellResult, ModeResult, Results

__all__ = ["page"]

COLOURS: Mapping[str, str] = {
    "mono": "#777777",
    "pull": "#0072b2",
    "push": "#d55e00",
    "push_sequential": "#e69f00",
    "pushkv": "#009e73",
}
"""Of a palette that colour-blind readers can tell apart."""
WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 22, 24, 54
LINE, CHARACTER = 13, 6.3
STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd;
        --missed: #b00020; --met: #00704a; --noise: #775500; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --page: #1b1b1b; --line: #444;
          --missed: #ff8a95; --met: #4fd1a5; --noise: #e0b050; }
}
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: var(--text); background: var(--page); }
div { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; min-width: 460px; height: auto; margin: .4rem .4rem .4rem 0; }
svg text { font-size: 11px; fill: var(--text); }
svg line { stroke: var(--line); } svg line.alone { stroke: var(--text); }
.missed { color: var(--missed); } .met { color: var(--met); } .noise { color: var(--noise); }
"""


def page(results: Results) -> str:
    """The whole page. Well-formed as XML too, but for its first line."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />',
        '<meta name="viewport" content="width=device-width" />',
        f"<title>pushkv bench</title><style>{STYLE}</style></head><body>",
        "<h1>pushkv bench</h1>",
        (
            "<p>TTFT less the time of prefill alone is what a hand-over costs a client. The cells "
            "were replayed over one system after the other, in turns, within one run.</p>"
        ),
        f"<div>{_excess_plot(results.cells)}</div>",
        _bars_table(bars(results)),
        *chain.from_iterable(map(_cell, results.cells)),
        "<h2>CPU while nobody asks</h2>",
        _table(
            ("mode", "share of a core"),
            [(mode, f"{100 * share:.1f} %") for mode, share in results.idle_cpu_share.items()],
        ),
        "<h2>Configuration</h2>",
        _table(("", ""), [(k, _plain(v)) for k, v in results.configuration.items()]),
        "<h2>Machine</h2>",
        _table(("", ""), [(k, _plain(v)) for k, v in results.machine.items()]),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _cell(cell: CellResult) -> list[str]:
    rows = []
    for mode, one in cell.modes.items():
        times = [
            "" if found is None else f"{_ms(found.p50)} / {_ms(found.p95)} / {_ms(found.p99)}"
            for found in (one.ttft_s, one.tpot_s)
        ]
        excess = "" if one.excess_s is None else _ms(one.excess_s)
        good = f"{100 * one.good_share:.0f} %"
        counts = (str(one.n), str(one.cancelled), str(one.failed))
        rows.append((mode, times[0], excess, times[1], f"{one.cpu_s:.1f}", good, *counts))
    heads = ("mode", "TTFT, ms", "less prefill", "TPOT, ms", "CPU, s", "good")
    return [
        f"<h2>{escape(cell.title)}</h2>",
        f"<p>Prefill alone: {_ms(cell.prefill_only_s)} ms. Percentiles: p50 / p95 / p99.</p>",
        _table((*heads, "sent", "left", "failed"), rows),
        f"<div>{_distribution_plot(cell)}{_cpu_plot(cell)}</div>",
    ]


def _bars_table(found: Sequence[Ratio]) -> str:
    if not found:
        return ""
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{escape(each)}</td>" for each in (one.cell, one.figure, one.other))
        + f'<td class="{one.verdict}">{one.value:.2f} {one.verdict}</td>'
        + f"<td>{one.most:g}</td></tr>"
        for one in found
    )
    heads = "".join(f"<th>{head}</th>" for head in ("cell", "figure", "over", "pushkv", "bar"))
    return (
        "<h2>pushkv over the others</h2>"
        f"<div><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in rows
    )
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


# -- plots


def _excess_plot(cells: Sequence[CellResult]) -> str:
    """Bars, a group for each cell: median TTFT less prefill, in milliseconds."""
    groups = [
        (
            cell.title,
            [
                (mode, 1_000 * one.excess_s)
                for mode, one in cell.modes.items()
                if one.excess_s is not None and mode != "mono"
            ],
        )
        for cell in cells
    ]
    return _grouped("median TTFT less prefill alone, ms", groups, 2 * WIDTH)


def _cpu_plot(cell: CellResult) -> str:
    """Bars: CPU of the engines per request that completed, in seconds."""
    found = [
        (mode, one.cpu_s / one.completed) for mode, one in cell.modes.items() if one.completed > 0
    ]
    return _grouped("CPU per request, s", [(cell.title, found)], WIDTH)


def _grouped(
    title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], width: int
) -> str:
    values = [value for _, found in groups for _, value in found]
    if not values:
        return ""
    top = max([*values, 0.0]) or 1.0
    low = min([*values, 0.0])
    inner, tall = width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + tall * (top - value) / (top - low)

    drawn = [_axis(low, top, y, width)]
    slot = inner / len(groups)
    for at, (name, found) in enumerate(groups):
        bar = min(34.0, 0.8 * slot / max(1, len(found)))
        begin = LEFT + slot * (at + 0.5) - bar * len(found) / 2
        for index, (mode, value) in enumerate(found):
            height = abs(y(value) - y(0))
            drawn.append(
                f'<rect x="{begin + index * bar:.1f}" y="{min(y(value), y(0)):.1f}" '
                f'width="{0.9 * bar:.1f}" height="{height:.1f}" fill="{_colour(mode)}">'
                f"<title>{escape(f'{mode}: {value:.4g}')}</title></rect>"
            )
        drawn += [
            f'<text x="{LEFT + slot * (at + 0.5):.1f}" y="{HEIGHT - BOTTOM + LINE * (line + 1)}" '
            f'text-anchor="middle">{escape(text)}</text>'
            for line, text in enumerate(name.split(", "))
        ]
    present = dict.fromkeys(mode for _, found in groups for mode, _ in found)
    return _svg(title, drawn, list(present), width)


def _distribution_plot(cell: CellResult) -> str:
    """Steps: the share of completed requests, over TTFT; prefill alone as a dashed line."""
    found: dict[str, ModeResult] = {k: v for k, v in cell.modes.items() if v.ttft_each_s}
    if not found:
        return ""
    top_ms = 1_000 * max(max(one.ttft_each_s) for one in found.values())
    inner, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value_ms: float) -> float:
        return LEFT + inner * min(value_ms / top_ms, 1.0)

    def y(share: float) -> float:
        return TOP + tall * (1 - share)

    alone = x(1_000 * cell.prefill_only_s)
    drawn = [
        _axis(0.0, 1.0, y, WIDTH),
        (
            f'<line x1="{alone:.1f}" x2="{alone:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
            'class="alone" stroke-dasharray="4 3"><title>prefill alone</title></line>'
        ),
    ]
    drawn += [
        f'<text x="{x(share * top_ms):.1f}" y="{HEIGHT - BOTTOM + 14}" '
        f'text-anchor="middle">{share * top_ms:.0f}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    for mode, one in found.items():
        points = [f"{LEFT},{y(0):.1f}"]
        for rank, value in enumerate(sorted(one.ttft_each_s)):
            at = f"{x(1_000 * value):.1f}"
            points += [
                f"{at},{y(rank / len(one.ttft_each_s)):.1f}",
                f"{at},{y((rank + 1) / len(one.ttft_each_s)):.1f}",
            ]
        drawn.append(
            f'<polyline fill="none" stroke="{_colour(mode)}" stroke-width="2" '
            f'points="{" ".join(points)}"><title>{escape(mode)}</title></polyline>'
        )
    return _svg("share of requests by TTFT, ms", drawn, list(found), WIDTH)


def _axis(low: float, top: float, y: Callable[[float], float], width: int) -> str:
    lines = []
    for step in range(5):
        value = low + (top - low) * step / 4
        lines.append(
            f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" />'
            f'<text x="{LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    return "".join(lines)


def _svg(title: str, drawn: Sequence[str], modes: Sequence[str], width: int) -> str:
    keys = []
    left = float(LEFT)
    for mode in modes:
        keys.append(
            f'<rect x="{left:.1f}" y="{HEIGHT - 14}" width="10" height="10" '
            f'fill="{_colour(mode)}" />'
            f'<text x="{left + 13:.1f}" y="{HEIGHT - 5}">{escape(mode)}</text>'
        )
        left += 26 + CHARACTER * len(mode)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}">'
        f'<text x="{LEFT}" y="14">{escape(title)}</text>{"".join(drawn)}{"".join(keys)}</svg>'
    )


def _colour(mode: str) -> str:
    return COLOURS.get(mode, "#444444")


def _ms(seconds: float) -> str:
    value = 1_000 * seconds
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
