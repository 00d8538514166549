"""The figure of `kvoffload replay --metadata-only --plot`: hit rate against capacity, by policy and hints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.replay.hits import OPTIMUM, PolicyResult
from kvoffload.replay.trace import Request
from kvoffload.terminal import figures
from kvoffload.terminal.console import CommandError
from kvoffload.terminal.figures import Series

_SERIES = {
    "prefix": Series("prefix, the default", "#d6336c", width=3.2, bold=True),
    "lru": Series("LRU", "#1c7ed6"),
    "arc": Series("ARC", "#2b8a3e"),
    "s3fifo": Series("S3-FIFO", "#e67700"),
    OPTIMUM: Series("Belady, knows the future", "#495057", ours=False),
}
_STYLES = {"none": "solid", "names": "dashed", "release": "dashdot", "due": "dotted"}  # by hints


def require(path: Path) -> None:
    """Raise CommandError unless a figure can be drawn, and written there."""
    figures.require()
    if path.suffix != ".png":
        raise CommandError(f"--plot must name a .png file, got {path}")
    figures.require_folder(str(path.parent))


def seen_before(requests: Sequence[Request]) -> float:
    """Return the percent of the blocks asked for that an earlier request had: the hits of a cache without bounds."""
    seen: set[bytes] = set()
    found = 0
    for request in requests:
        found += sum(key in seen for key in request)
        seen.update(request)
    return 100 * found / max(sum(map(len, requests)), 1)


def draw(results: Sequence[PolicyResult], requests: Sequence[Request], title: str, path: Path) -> None:
    """Write the figure of these results; `requests`: the traffic behind them."""
    from matplotlib import rc_context

    with rc_context(figures.STYLE):
        figure = make(results, seen_before(requests), title)
        try:
            figure.savefig(path, dpi=figures.DPI, facecolor="white")
        except OSError as error:
            raise CommandError(f"the figure cannot be written to {path}: {error.strerror or error}") from error


def make(results: Sequence[PolicyResult], ceiling: float, title: str) -> Any:
    """Draw the figure: percent of the blocks asked for that were found, against slots, up to the ceiling of all
    policies.
    """
    figure, (panel,) = figures.make_figure(8.2, 5.2, 1)
    slots = sorted({result.slots for result in results})
    ends, drawn = {}, {}
    for policy, hints, name in dict.fromkeys((each.policy, each.hints, each.name) for each in results):
        line = {result.slots: 100 * result.hit_rate for result in results if result.name == name}
        series = _SERIES[policy]
        if hints != "none":
            series = Series(f"{name}, {_STYLES[hints]}", series.colour)
        panel.plot(
            slots,
            [line[each] for each in slots],
            color=series.colour,
            linewidth=series.width,
            linestyle=_STYLES[hints] if series.ours else (0, (2, 1.2)),
            marker="o",
            markersize=4,
        )
        ends[name], drawn[name] = line[slots[-1]], series
    top = 1.12 * ceiling or 1.0
    panel.axhline(ceiling, color=figures.MUTED, linewidth=1)
    panel.text(slots[0], ceiling, f"seen before: {ceiling:.1f}%\n", color=figures.MUTED, va="center", fontsize=9.5)
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_xticks(slots, [f"{each:,}" for each in slots])
    panel.set_ylim(0, top)
    panel.grid(axis="y", color=figures.GRID)
    panel.set_xlabel("capacity of the cache, blocks")
    panel.set_ylabel("hit rate, % of the blocks asked for")
    for name, (value, height) in figures.spread(ends, 0.05 * top, 1.02 * top).items():
        figures.label_end(panel, slots[-1], value, height, drawn[name])
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure
