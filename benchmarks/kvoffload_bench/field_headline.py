"""The figure of `bench field` in one look: one geometry's loads, GB/s and what a concurrent computation loses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvoffload.terminal.figures import GRID as GRID_COLOUR
from kvoffload.terminal.figures import INK, MUTED, make_figure
from kvoffload_bench.copy_methods import FLAT_BATCH
from kvoffload_bench.field_methods import CHOICE, GRID
from kvoffload_bench.field_plots import PANELS
from kvoffload_bench.harness import CONTIGUOUS_COPY

Fields = Mapping[str, Any]


class _Bar(NamedTuple):
    """A bar of every panel: the layout and the method of its cell."""

    label: str
    layout: str
    method: str
    colour: str


_BARS = (
    _Bar("the limit: contiguous copies", "block-major", CONTIGUOUS_COPY, "#ced4da"),
    _Bar("kvoffload, block-major", "block-major", CHOICE, "#d6336c"),
    _Bar("kvoffload, plane-major", "plane-major", CHOICE, "#f783ac"),
    _Bar("one flat batch, plane-major", "plane-major", FLAT_BATCH, "#868e96"),
    _Bar("grid-stride kernel, 12 SMs, plane-major", "plane-major", GRID, "#495057"),
)
_DIRECTION = "load"


def headline_of(fields: Fields) -> Any:
    """A panel for each situation, a bar for each method, of the first geometry; None if a layout was not measured.

    Behind each bar stands its GB/s, and how many times as long a product took meanwhile.
    """
    cells = [cell for cell in fields["cells"] if cell["direction"] == _DIRECTION]
    cells = [cell for cell in cells if cell["model"] == cells[0]["model"]]
    found = {(cell["situation"], cell["layout"], cell["method"]): cell for cell in cells}
    situations = [each for each in PANELS if all((each, layout, CHOICE) in found for layout in _layouts())]
    if not situations:
        return None
    figure, panels = make_figure(3.0 + 2.45 * len(situations), 2.6, len(situations), sharey=True)
    most = max(cell["gb_per_s"] or 0 for cell in cells)
    for panel, situation in zip(panels, situations, strict=True):
        for height, bar in enumerate(reversed(_BARS)):
            _draw_bar(panel, height, bar, found.get((situation, bar.layout, bar.method)))
        panel.set_title(PANELS[situation])
        panel.set_xlim(0, most * 1.75)
        panel.set_xticks(range(0, int(most) + 1, 20))
        panel.grid(axis="x", color=GRID_COLOUR)
        panel.tick_params(left=False)
        panel.spines["left"].set_visible(False)
    panels[0].set_yticks(range(len(_BARS)), [bar.label for bar in reversed(_BARS)])
    for label, bar in zip(panels[0].get_yticklabels(), reversed(_BARS), strict=True):
        label.set_fontweight("bold" if bar.method == CHOICE else "normal")
    panels[0].set_xlabel("GB/s, and x: time of a concurrent product over its time alone", loc="left")
    return figure


def geometry_of(fields: Fields) -> str:
    """What `headline_of` shows."""
    cell = next(cell for cell in fields["cells"] if cell["direction"] == _DIRECTION)
    return f"loads of {cell['blocks']} blocks of {cell['planes']} planes x {cell['block_bytes']} B ({cell['model']})"


def _layouts() -> set[str]:
    return {bar.layout for bar in _BARS}


def _draw_bar(panel: Any, height: int, bar: _Bar, cell: Fields | None) -> None:
    rate = None if cell is None else cell["gb_per_s"]
    if cell is None or rate is None:
        panel.text(1, height, "not measured" if cell is None else "outlasted the computation", va="center", color=MUTED)
        return
    panel.barh(height, rate, height=0.72, color=bar.colour)
    slowdown = cell.get("compute_slowdown")
    text = f" {rate:.0f}" + ("" if slowdown is None else f"   x{slowdown:.2f}")
    panel.text(rate, height, text, va="center", color=INK, fontweight="bold" if bar.method == CHOICE else "normal")
