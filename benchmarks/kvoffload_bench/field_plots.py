"""The figures of `bench field`: GB/s of each copy method by transfer, a panel for each situation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload.terminal.figures import GRID, MUTED, make_figure

Fields = Mapping[str, Any]
DIRECTIONS = ("store", "load", "both")
PANELS = {
    "idle": "idle GPU",
    "large-products": "products, 8192 x 8192",
    "small-products": "products, 2048 x 2048",
    "decode-loop": "decode-like loop",
}
_MARKS = (  # method, label, colour, marker
    ("contiguous copy", "the limit: contiguous copies", MUTED, "|"),
    ("choice", "kvoffload's choice", "#f783ac", "o"),  # larger, under the method that it is
    ("grid-stride 12, pinned", "grid-stride kernel, 12 SMs", "#495057", "s"),
    ("flat batch", "one flat batch", "#868e96", "D"),
    ("gather 4", "gather, 4 SMs", "#2b8a3e", "^"),
    ("split 2", "split, 2 SMs", "#7048e8", "v"),
    ("batch", "batch in chunks, no SM", "#e67700", "<"),
    ("strided", "strided, no SM", "#1c7ed6", ">"),
)


def figure_of(fields: Fields, direction: str) -> Any:
    """GB/s by wall clock, without what no computation was concurrent with; None if the direction was not measured."""
    cells = [cell for cell in fields["cells"] if cell["direction"] == direction and cell["gb_per_s"] is not None]
    situations = [name for name in PANELS if any(cell["situation"] == name for cell in cells)]
    if not situations:
        return None
    names = list(dict.fromkeys(map(_name, cells)))
    heights = {name: len(names) - 1 - place for place, name in enumerate(names)}
    figure, panels = make_figure(3.4 + 3.1 * len(situations), 2.2 + 0.4 * len(names), len(situations), sharey=True)
    most = max(cell["gb_per_s"] for cell in cells)
    for panel, situation in zip(panels, situations, strict=True):
        _draw_panel(panel, [cell for cell in cells if cell["situation"] == situation], heights)
        panel.set_title(PANELS[situation])
        panel.set_xlim(0, most * 1.05)
        panel.grid(axis="both", color=GRID)
        panel.tick_params(left=panel is panels[0])
    panels[0].set_yticks([heights[name] for name in names], names, fontsize=9)
    panels[0].set_ylim(-0.6, len(names) - 0.4)
    panels[0].set_xlabel("GB/s, wall clock of a series")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9.5)
    return figure


def _name(cell: Fields) -> str:
    return f"{cell['model']}, {cell['layout']}\n{cell['blocks']} blocks x {cell['planes']} x {cell['block_bytes']} B"


def _draw_panel(panel: Any, cells: Sequence[Fields], heights: Mapping[str, int]) -> None:
    for method, label, colour, marker in _MARKS:
        points = {_name(cell): cell["gb_per_s"] for cell in cells if cell["method"] == method}
        places = [heights[name] for name in points]
        size = {"o": 80, "|": 220}.get(marker, 34)
        panel.scatter(list(points.values()), places, color=colour, marker=marker, s=size, label=label, zorder=3)
