"""The figures of `bench plot`: bandwidth lines of `bench sweep`, and the bars of `bench field`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.terminal import figures
from kvoffload.terminal.console import CommandError
from kvoffload.terminal.figures import GRID, INK, MUTED, Series, make_figure
from kvoffload_bench.copy_methods import FLAT_BATCH, size_text
from kvoffload_bench.field_methods import CHOICE
from kvoffload_bench.field_methods import GRID as GRID_STRIDE
from kvoffload_bench.harness import CONTIGUOUS_COPY

Fields = Mapping[str, Any]
_ARROWS = {"store": "GPU to host (store)", "load": "host to GPU (load)"}
_PLANES = {"folded": "planes in one slab (they fold)", "scattered": "planes in allocations of their own"}
_CHOICE = Series("kvoffload's choice", "#d6336c", width=3.2, bold=True)
_SERIES = {
    "choice, overlap": _CHOICE,
    "strided": Series("strided, no SM", "#1c7ed6"),
    "pack": Series("pack, all SMs for microseconds", "#2b8a3e"),
    "batch": Series("batch in chunks, no SM", "#e67700"),
    "grid-stride 12": Series("grid-stride kernel, 12 SMs", "#495057", ours=False),
    "flat batch": Series("one flat batch", "#868e96", ours=False),
    "copy loop": Series("cuMemcpyAsync loop", "#adb5bd", ours=False),
}


def draw(results: Mapping[str, Fields], folder: str) -> list[Path]:
    """Write the figures of results into a folder, which is created if it is missing; their paths.

    Args:
        results: by the name that errors give them, such as their file; one of a benchmark.
        folder: where to.

    Raises:
        CommandError: none of the results has figures, one lacks something, or the folder cannot be written.
    """
    figures.require()
    from matplotlib import rc_context

    target, paths = figures.require_folder(folder), []
    with rc_context(figures.STYLE):
        for name, fields in results.items():
            try:
                for title, figure in _figures(fields):
                    paths.append(target / f"{title}.png")
                    figure.savefig(paths[-1], dpi=figures.DPI, facecolor="white")
            except OSError as error:
                raise CommandError(f"{target}: {error}") from error
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"{type(error).__name__}: {error}"
                raise CommandError(
                    f"{name} is no complete result of `bench {fields['benchmark']}` ({problem})"
                ) from error
    if not paths:
        names = ", ".join(sorted({str(fields["benchmark"]) for fields in results.values()}))
        raise CommandError(f"there is nothing to draw in results of: {names}")
    return paths


def _figures(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Every figure of a result, after the name of its file."""
    if fields["benchmark"] == "field":
        figure = headline_of(fields)
        if figure is not None:
            yield "field", figure
    if fields["benchmark"] == "sweep":
        for direction in _ARROWS:
            yield f"bandwidth-{direction}", bandwidth_of(fields, direction)


def _titled(figure: Any, title: str, fields: Fields) -> Any:
    least = fields["repeats"]  # short transfers get more
    machine = f"{fields['device']}, driver {fields['driver']}, link {fields['link']}"
    figures.set_title(figure, title, f"{machine}; medians of {least} round{'' if least == 1 else 's'} or more")
    return figure


# lines ----------------------------------------------------------------------------------------------------------------


def bandwidth_of(fields: Fields, direction: str) -> Any:
    """GB/s against bytes of a copy, at the number of copies that is nearest to 4096; a panel for each placement."""
    count = min({record["copies"] for record in fields["transfers"]}, key=lambda each: (abs(each - 4096), each))
    records = [each for each in fields["transfers"] if (each["direction"], each["copies"]) == (direction, count)]
    placements = list(dict.fromkeys(record["placement"] for record in records))
    figure, panels = make_figure(6.9 * len(placements), 5.4, len(placements), sharey=True)
    link = statistics.median(record["gb_per_s"][CONTIGUOUS_COPY] for record in records)
    for panel, placement in zip(panels, placements, strict=True):
        chosen = sorted(
            (each for each in records if each["placement"] == placement), key=lambda each: int(each["row_bytes"])
        )
        _panel(panel, chosen, link)
        values = [record["row_bytes"] for record in chosen]
        panel.set_xticks(values, [size_text(value) for value in values])
        panel.set_xlabel("bytes of one copy")
        panel.set_title(_PLANES[placement])
        panel.tick_params(left=panel is panels[0])
    panels[0].set_ylabel("GB/s on the GPU clock")
    return _titled(figure, f"Scattered blocks, {_ARROWS[direction]}: {count} copies", fields)


def _panel(panel: Any, records: Sequence[Fields], link: float) -> None:
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_ylim(0, link * 1.12)
    panel.grid(axis="y", color=GRID)
    panel.axhline(link, color=MUTED, linewidth=1.2, linestyle=(0, (6, 3)))
    text = f"the link: one contiguous copy, {link:.0f} GB/s"
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (4, 4), "textcoords": "offset points"}
    panel.annotate(text, (0.0, link), color=MUTED, fontsize=9, **place)
    ends = {}
    for name, series in reversed(_SERIES.items()):
        points = [(each["row_bytes"], each["gb_per_s"][name]) for each in records if name in each["gb_per_s"]]
        if points:
            style: dict[str, Any] = {"markersize": 3.5, "zorder": 3, "alpha": 1.0}
            if series is _CHOICE:
                style = {"markersize": 6.5, "zorder": 2, "alpha": 0.45}
            line = "-" if series.ours else (0, (2, 1.2))
            panel.plot(
                *zip(*points, strict=True),
                color=series.colour,
                linewidth=series.width,
                linestyle=line,
                marker="o",
                **style,
            )
            ends[name] = points[-1][1]
    for name, (value, height) in figures.spread(ends, 0.05 * link, 1.1 * link).items():
        figures.label_end(panel, records[-1]["row_bytes"], value, height, _SERIES[name])


# bars -----------------------------------------------------------------------------------------------------------------

_PANELS = {
    "idle": "idle GPU",
    "large-products": "products, 8192 x 8192",
    "small-products": "products, 2048 x 2048",
    "decode-loop": "decode-like loop",
}


class _Bar(NamedTuple):
    """A bar of every panel: the layout and the method of a cell."""

    label: str
    layout: str
    method: str
    colour: str


_BARS = (
    _Bar("the limit: contiguous copies", "block-major", CONTIGUOUS_COPY, "#ced4da"),
    _Bar("kvoffload, block-major", "block-major", CHOICE, "#d6336c"),
    _Bar("kvoffload, plane-major", "plane-major", CHOICE, "#f783ac"),
    _Bar("one flat batch, plane-major", "plane-major", FLAT_BATCH, "#868e96"),
    _Bar("grid-stride kernel, 12 SMs, plane-major", "plane-major", GRID_STRIDE, "#495057"),
)


def headline_of(fields: Fields) -> Any:
    """`bench field` in one look, loads of the first geometry: a panel for each situation, a bar for each method; None
    if a layout was not measured. Behind each bar its GB/s, and how many times as long a product took meanwhile.
    """
    cells = [cell for cell in fields["cells"] if cell["direction"] == "load"]
    cells = [cell for cell in cells if cell["model"] == cells[0]["model"]]
    found = {(cell["situation"], cell["layout"], cell["method"]): cell for cell in cells}
    situations = [each for each in _PANELS if all((each, bar.layout, CHOICE) in found for bar in _BARS)]
    if not situations:
        return None
    most = max(cell["gb_per_s"] or 0 for cell in cells) * 1.75
    figure, panels = make_figure(3.0 + 2.45 * len(situations), 2.6, len(situations), sharey=True)
    for panel, situation in zip(panels, situations, strict=True):
        for place, bar in enumerate(_BARS):
            _draw_bar(panel, place, bar, found.get((situation, bar.layout, bar.method)), most)
        panel.set_title(_PANELS[situation])
        panel.set_xlim(0.0, most)
        panel.grid(axis="x", color=GRID)
        panel.axvline(0, color=MUTED, linewidth=1)
        panel.tick_params(left=False)
        panel.spines["left"].set_visible(False)
    panels[0].set_yticks(range(len(_BARS)), [bar.label for bar in _BARS])
    for label, bar in zip(panels[0].get_yticklabels(), _BARS, strict=True):
        label.set_fontweight("bold" if bar.method == CHOICE else "normal")
    panels[0].set_ylim(len(_BARS) - 0.4, -0.6)
    panels[0].set_xlabel("GB/s, and x: time of a concurrent product over its time alone", loc="left")
    shown = cells[0]
    loads = f"loads of {shown['blocks']} blocks of {shown['planes']} planes x {shown['block_bytes']} B"
    return _titled(figure, f"Concurrent with compute: {loads} ({shown['model']})", fields)


def _draw_bar(panel: Any, place: int, bar: _Bar, cell: Fields | None, most: float) -> None:
    value, colour = None if cell is None else cell["gb_per_s"], MUTED
    if cell is None or value is None:
        text = "not measured" if cell is None else "outlasted the computation"
    else:
        panel.barh(place, value, height=0.7, color=bar.colour)
        slowdown, colour = cell.get("compute_slowdown"), INK
        text = f"{value:.0f}" + ("" if slowdown is None else f"   x{slowdown:.2f}")
    weight = "bold" if bar.method == CHOICE else "normal"
    left = (value or 0) + 0.012 * most
    panel.text(left, place, text, va="center", fontsize=9.5, color=colour, fontweight=weight)
