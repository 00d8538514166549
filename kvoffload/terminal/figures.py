"""Common parts of all figures: matplotlib's settings, panels, and labels at the ends of lines.

matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.terminal.console import CommandError

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
DPI = 160
STYLE: Any = {  # matplotlib types the keys of its settings one by one
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.axisbelow": True,
}


class Series(NamedTuple):
    """How a line is drawn: solid if `ours`, else dashed; its label in bold type if `bold`."""

    label: str
    colour: str
    ours: bool = True
    width: float = 1.8
    bold: bool = False


def require() -> None:
    """Raise CommandError unless figures can be drawn here."""
    if find_spec("matplotlib") is None:
        raise CommandError("figures need matplotlib: pip install 'kvoffload[plot]'")


def require_folder(name: str) -> Path:
    """Make a folder if need be; CommandError unless figures can be written into it."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise CommandError(f"no figures can be written into {name}: {error.strerror}") from error


def make_figure(width: float, height: float, columns: int, **options: Any) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


def set_title(figure: Any, title: str, note: str) -> None:
    """Draw a title in bold at the top left, and below it a line in grey: the machine, the workload, the units."""
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=14, fontweight="bold")
    below = 0.98 - 0.2 / figure.get_figheight()  # 0.2 inches are a line of the title
    figure.text(0.01, below, note, ha="left", va="top", fontsize=10, color=MUTED)


def label_end(panel: Any, x: float, value: float, height: float, series: Series) -> None:
    """Label a line right of its end, at a height where labels do not overlap, and joined to it."""
    style: dict[str, Any] = {"arrowstyle": "-", "color": series.colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4}
    style["relpos"] = (0.0, 0.5)
    panel.annotate(
        series.label,
        (x, value),
        xytext=(1.05, height),
        textcoords=("axes fraction", "data"),
        color=series.colour,
        va="center",
        fontsize=9.5,
        fontweight="bold" if series.bold else "normal",
        arrowprops=style,
        annotation_clip=False,
    )


def spread(ends: Mapping[str, float], gap: float, top: float) -> dict[str, tuple[float, float]]:
    """Return value and height of each label: as near to its value as labels `gap` apart can be, between 0 and `top`."""
    ordered = sorted(ends.items(), key=lambda item: item[1])
    groups: list[list[float]] = []  # of labels that touch: the sum of where they would lie if gaps were nothing; count
    for place, (_, value) in enumerate(ordered):
        groups.append([value - place * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    bases = [total / count for total, count in groups for _ in range(int(count))]
    most = top - gap * (len(ordered) - 1)
    return {
        name: (value, min(max(base, 0.0), most) + place * gap)
        for place, ((name, value), base) in enumerate(zip(ordered, bases, strict=True))
    }
