"""The figure of `kvoffload replay --metadata-only --plot`: hit rate against capacity, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.cache.policies import DEFAULT_POLICY
from kvoffload.replay.metadata import OPTIMUM, PolicyResult
from kvoffload.terminal import figures
from kvoffload.terminal.console import CommandError
from kvoffload.terminal.figures import Series

_SERIES = {
    "prefix": Series("prefix", "#d6336c"),
    "lru": Series("LRU", "#1c7ed6"),
    "arc": Series("ARC", "#2b8a3e"),
    "s3fifo": Series("S3-FIFO", "#e67700"),
    OPTIMUM: Series("Belady, knows the future", "#495057", ours=False),
}


def require(path: Path) -> None:
    """Raise CommandError unless a figure can be drawn, and written there."""
    figures.require()
    if path.suffix != ".png":
        raise CommandError(f"--plot must name a .png file, got {path}")
    figures.require_folder(str(path.parent))


def draw(results: Sequence[PolicyResult], title: str, path: Path) -> None:
    """Write the figure.

    Raises:
        CommandError: it cannot be written.
    """
    from matplotlib import rc_context

    with rc_context(figures.STYLE):
        figure = make(results, title)
        try:
            figure.savefig(path, dpi=figures.DPI, facecolor="white")
        except OSError as error:
            raise CommandError(f"the figure cannot be written to {path}: {error.strerror or error}") from error


def make(results: Sequence[PolicyResult], title: str) -> Any:
    """The figure: percent of the blocks asked for that were found, against slots."""
    figure, (panel,) = figures.make_figure(8.2, 5.2, 1)
    slots = sorted({result.slots for result in results})
    rates = {
        policy: {result.slots: 100 * result.hit_rate for result in results if result.policy == policy}
        for policy in _SERIES
    }
    ends = {}
    for policy, line in rates.items():
        if line:
            series = _SERIES[policy]
            panel.plot(
                slots,
                [line[each] for each in slots],
                color=series.colour,
                linewidth=3.2 if policy == DEFAULT_POLICY else series.width,
                linestyle="-" if series.ours else (0, (2, 1.2)),
                marker="o",
                markersize=4,
            )
            ends[policy] = line[slots[-1]]
    top = 1.08 * max(max(line.values()) for line in rates.values() if line) or 1.0
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_xticks(slots, [f"{each:,}" for each in slots])
    panel.set_ylim(0, top)
    panel.grid(axis="y", color=figures.GRID)
    panel.set_xlabel("blocks that the cache holds")
    panel.set_ylabel("% of the blocks asked for that were found")
    for policy, (value, height) in figures.spread(ends, 0.05 * top, 1.02 * top).items():
        figures.label_end(panel, slots[-1], value, height, _SERIES[policy])
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure
