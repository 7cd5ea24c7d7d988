"""Figures as SVG, by matplotlib; the same figure is the same file."""

from __future__ import annotations

from pathlib import Path

from pushkv.core.errors import MissingDependencyError

from .answers import Figure

__all__ = ["write_svg"]


def write_svg(figure: Figure, path: Path) -> None:
    """Draw a figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Drawing
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib: pip install 'pushkv[bench]'"
        ) from error
    with mpl.rc_context({"svg.hashsalt": "pushkv", "svg.fonttype": "none"}):
        drawing = Drawing(figsize=(7, 4), layout="constrained")
        axes = drawing.add_subplot()
        for name, points in figure.lines.items():
            many = len(points) > 12
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, marker="o", markersize=4, label=name, linestyle="" if many else "-")
        if figure.log_x:
            axes.set_xscale("log")
        if figure.log_y:
            axes.set_yscale("log")
            low, high = axes.get_xlim()
            axes.plot([low, high], [low, high], linewidth=0.8, color="grey")
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
        axes.grid(visible=True, linewidth=0.3)
        axes.legend(fontsize="small")
        drawing.savefig(path, format="svg", metadata={"Date": None})
