"""The figures of `bench plot`: lines of a sweep, marks of geometries and of `bench field`, bars of what is lost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.terminal.console import CommandError
from kvoffload.terminal.figures import (
    DPI,
    GRID,
    INK,
    MUTED,
    STYLE,
    Series,
    label_end,
    make_figure,
    require,
    require_folder,
    set_title,
    spread,
)
from kvoffload_bench.copy_methods import FLAT_BATCH, size_text
from kvoffload_bench.field_methods import CHOICE
from kvoffload_bench.field_methods import GRID as GRID_STRIDE
from kvoffload_bench.harness import CONTIGUOUS_COPY

Fields = Mapping[str, Any]
_ARROWS = {"store": "GPU to host (store)", "load": "host to GPU (load)"}
_PLANES = {
    "folded": "planes in one slab (they fold)",
    "scattered": "planes in allocations of their own",
    "interleaved": "planes interleaved",
}
_CHOICE = Series("kvoffload's choice", "#d6336c", width=3.2, bold=True)
_SERIES = {
    "choice, overlap": _CHOICE,
    "strided": Series("strided, no SM", "#1c7ed6"),
    "split 2": Series("split, 2 SMs", "#7048e8"),
    "gather 4": Series("gather, 4 SMs", "#2b8a3e"),
    "batch": Series("batch in chunks, no SM", "#e67700"),
    "grid-stride 12": Series("grid-stride kernel, 12 SMs", "#495057", ours=False),
    "flat batch": Series("one flat batch", "#868e96", ours=False),
    "copy loop": Series("cuMemcpyAsync loop", "#adb5bd", ours=False),
}


def draw(results: Mapping[str, Fields], folder: str) -> list[Path]:
    """Write the figures of results into a folder, which is created if it is missing; their paths.

    Args:
        results: by what errors call them, such as the file they are from; one of a benchmark.
        folder: where to.

    Raises:
        CommandError: none of the results has figures, one lacks something, or the folder cannot be written.
    """
    require()
    from matplotlib import rc_context

    target = require_folder(folder)
    with rc_context(STYLE):
        paths = [path for name, fields in results.items() for path in _drawn(name, fields, target)]
    if not paths:
        names = ", ".join(sorted({str(fields["benchmark"]) for fields in results.values()}))
        raise CommandError(f"there is nothing to draw in results of: {names}")
    return paths


def _drawn(name: str, fields: Fields, folder: Path) -> list[Path]:
    try:
        return list(_draw(fields, folder))
    except OSError as error:
        raise CommandError(f"{folder}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CommandError(f"{name} is no complete result of `bench {fields['benchmark']}` ({problem})") from error


def _draw(fields: Fields, folder: Path) -> Iterator[Path]:
    """Every figure of a result, by the name of its file and what makes it."""
    made: dict[str, Any] = {}
    if fields["benchmark"] == "field":
        made["field"] = headline_of(fields)
        for direction in ("store", "load", "both"):
            made[f"field-{direction}"] = _by_situation(fields, direction)
    for direction in _ARROWS:
        if fields["benchmark"] == "sweep":
            made[f"bandwidth-{direction}"] = _by_size(fields, direction)
            made[f"count-{direction}"] = _by_count(fields, direction)
        elif fields["benchmark"] == "transfer":
            made[f"models-{direction}"] = _by_model(fields, direction)
        elif fields["benchmark"] == "interference":
            made[f"slowdown-{direction}"] = _slowdowns(fields, direction)
    for name, figure in made.items():
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=DPI, facecolor="white")
            yield path


def _titled(figure: Any, title: str, fields: Fields) -> Any:
    least = fields["repeats"]  # short transfers get more
    machine = f"{fields['device']}, driver {fields['driver']}, link {fields['link']}"
    set_title(figure, title, f"{machine}; medians of {least} round{'' if least == 1 else 's'} or more")
    return figure


# lines ----------------------------------------------------------------------------------------------------------------


def _by_size(fields: Fields, direction: str) -> Any:
    """GB/s against bytes of a copy, at one number of copies."""
    counts = sorted({record["copies"] for record in fields["transfers"]})
    count = min(counts, key=lambda each: abs(each - 4096))
    records = [
        record for record in fields["transfers"] if record["direction"] == direction and record["copies"] == count
    ]
    title = f"Scattered blocks, {_ARROWS[direction]}: {count} copies"
    return _lines(fields, records, title, "row_bytes", "bytes of one copy", size_text)


def _by_count(fields: Fields, direction: str) -> Any:
    """GB/s against the number of copies, at one size."""
    sizes = sorted({record["row_bytes"] for record in fields["transfers"]})
    size = min(sizes, key=lambda each: abs(each - 8192))
    records = [
        record for record in fields["transfers"] if record["direction"] == direction and record["row_bytes"] == size
    ]
    title = f"Scattered blocks, {_ARROWS[direction]}: copies of {size_text(size)}"
    return _lines(fields, records, title, "copies", "copies in a transfer", str)


def _lines(
    fields: Fields, records: Sequence[Fields], title: str, key: str, axis: str, text: Callable[[int], str]
) -> Any:
    """One panel for each placement; None without records."""
    placements = list(dict.fromkeys(record["placement"] for record in records))
    if not placements:
        return None
    figure, panels = make_figure(6.9 * len(placements), 5.4, len(placements), sharey=True)
    link = statistics.median(record["gb_per_s"][CONTIGUOUS_COPY] for record in records)
    for panel, placement in zip(panels, placements, strict=True):
        chosen = sorted(
            (record for record in records if record["placement"] == placement), key=lambda record: int(record[key])
        )
        _panel(panel, chosen, key, link)
        values = [record[key] for record in chosen]
        panel.set_xticks(values, [text(value) for value in values])
        panel.set_xlabel(axis)
        panel.set_title(_PLANES[placement])
        panel.tick_params(left=panel is panels[0])
    panels[0].set_ylabel("GB/s on the GPU clock")
    return _titled(figure, title, fields)


def _panel(panel: Any, records: Sequence[Fields], key: str, link: float) -> None:
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_ylim(0, link * 1.12)
    panel.grid(axis="y", color=GRID)
    panel.axhline(link, color=MUTED, linewidth=1.2, linestyle=(0, (6, 3)))
    panel.annotate(
        f"the link: one contiguous copy, {link:.0f} GB/s",
        (0.0, link),
        xycoords=("axes fraction", "data"),
        xytext=(4, 4),
        textcoords="offset points",
        color=MUTED,
        fontsize=9,
    )
    ends = {}
    for name, series in reversed(_SERIES.items()):
        points = [(record[key], record["gb_per_s"][name]) for record in records if name in record["gb_per_s"]]
        if points:
            style = "-" if series.ours else (0, (2, 1.2))
            size = 6.5 if series is _CHOICE else 3.5
            panel.plot(
                *zip(*points, strict=True),
                color=series.colour,
                linewidth=series.width,
                linestyle=style,
                marker="o",
                markersize=size,
                zorder=2 if series is _CHOICE else 3,
                alpha=0.45 if series is _CHOICE else 1.0,
            )
            ends[name] = points[-1][1]
    for name, (value, height) in spread(ends, 0.05 * link, 1.1 * link).items():
        label_end(panel, records[-1][key], value, height, _SERIES[name])


# marks ----------------------------------------------------------------------------------------------------------------


class _Mark(NamedTuple):
    """Points of one method: in a geometry's row, or in that of a cell."""

    method: str
    label: str
    colour: str
    marker: str
    placement: str = ""
    size: int = 58


_MODEL_MARKS = (
    _Mark("choice, overlap", "kvoffload, planes fold", "#d6336c", "o", "folded"),
    _Mark("choice, overlap", "kvoffload, planes scattered", "#f783ac", "o", "scattered"),
    _Mark("grid-stride 12", "grid-stride kernel, 12 SMs", "#495057", "s", "folded"),
    _Mark(FLAT_BATCH, "one flat batch", "#868e96", "D", "folded"),
)
_FIELD_MARKS = (
    _Mark(CONTIGUOUS_COPY, "the limit: contiguous copies", MUTED, "|", size=220),
    _Mark(CHOICE, "kvoffload's choice", "#f783ac", "o", size=80),  # larger, under the method that it is
    _Mark(GRID_STRIDE, "grid-stride kernel, 12 SMs", "#495057", "s", size=34),
    _Mark(FLAT_BATCH, "one flat batch", "#868e96", "D", size=34),
    _Mark("gather 4", "gather, 4 SMs", "#2b8a3e", "^", size=34),
    _Mark("split 2", "split, 2 SMs", "#7048e8", "v", size=34),
    _Mark("batch", "batch in chunks, no SM", "#e67700", "<", size=34),
    _Mark("strided", "strided, no SM", "#1c7ed6", ">", size=34),
)


def _scatter(panel: Any, mark: _Mark, points: Mapping[str, float], heights: Mapping[str, int]) -> None:
    """GB/s by the name of a row."""
    if points:
        panel.scatter(
            list(points.values()),
            [heights[name] for name in points],
            color=mark.colour,
            marker=mark.marker,
            s=mark.size,
            label=mark.label,
            zorder=3,
        )


def _finish_rows(panels: Sequence[Any], names: Sequence[str], heights: Sequence[int], most: float, axis: str) -> None:
    for panel in panels:
        panel.set_xlim(0, most)
        panel.grid(axis="both", color=GRID)
        panel.tick_params(left=panel is panels[0])
    panels[0].set_yticks(heights, names, fontsize=9)
    panels[0].set_ylim(-0.6, len(names) - 0.4)
    panels[0].set_xlabel(axis)
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9.5)


def _by_model(fields: Fields, direction: str) -> Any:
    """GB/s of every model, blocks not adjacent, in the largest transfer measured; None without records."""
    records = _largest(fields["transfers"], direction)
    order = sorted({(record["block_bytes"], record["planes"], record["model"]) for record in records})
    if not order:
        return None
    figure, (panel,) = make_figure(10.5, 1.9 + 0.42 * len(order), 1)
    heights = {model: place for place, (_, _, model) in enumerate(order)}
    for mark in _MODEL_MARKS:
        found = [each for each in records if each["placement"] == mark.placement and mark.method in each["gb_per_s"]]
        _scatter(panel, mark, {each["model"]: each["gb_per_s"][mark.method] for each in found}, heights)
    link = statistics.median(record["gb_per_s"][CONTIGUOUS_COPY] for record in records)
    panel.axvline(link, color=MUTED, linewidth=1.2, linestyle=(0, (6, 3)), label=f"the link, {link:.0f} GB/s")
    names = [f"{model}\n{planes} x {size_text(nbytes)}{_amount(records, model)}" for nbytes, planes, model in order]
    _finish_rows([panel], names, range(len(order)), link * 1.08, "GB/s on the GPU clock")
    return _titled(figure, f"KV blocks of models, {_ARROWS[direction]}", fields)


def _largest(every: Sequence[Fields], direction: str) -> list[Fields]:
    """Of each model and placement the record of the largest transfer."""
    records = [record for record in every if record["direction"] == direction and record["blocks_per_slot"] == 1]
    found = {
        (record["model"], record["placement"]): record
        for record in sorted(records, key=lambda record: int(record["blocks"]))
    }
    return list(found.values())


def _amount(records: Sequence[Fields], model: str) -> str:
    """How many blocks a model's transfers have; others may have had more blocks, or fewer."""
    counts = sorted({record["blocks"] for record in records if record["model"] == model})
    return f", {' or '.join(map(str, counts))} blocks"


def _by_situation(fields: Fields, direction: str) -> Any:
    """`bench field`: a panel for each situation, a row for each geometry and layout; GB/s by wall clock, without series
    that the computation did not outlast. None if the direction was not measured.
    """
    cells = [cell for cell in fields["cells"] if cell["direction"] == direction and cell["gb_per_s"] is not None]
    situations = [name for name in _PANELS if any(cell["situation"] == name for cell in cells)]
    if not situations:
        return None
    names = list(dict.fromkeys(map(_row, cells)))
    heights = {name: len(names) - 1 - place for place, name in enumerate(names)}
    figure, panels = make_figure(3.4 + 3.1 * len(situations), 2.2 + 0.4 * len(names), len(situations), sharey=True)
    for panel, situation in zip(panels, situations, strict=True):
        panel.set_title(_PANELS[situation])
        for mark in _FIELD_MARKS:
            found = [each for each in cells if (each["situation"], each["method"]) == (situation, mark.method)]
            _scatter(panel, mark, {_row(each): each["gb_per_s"] for each in found}, heights)
    most = max(cell["gb_per_s"] for cell in cells) * 1.05
    _finish_rows(panels, names, [heights[name] for name in names], most, "GB/s, wall clock of a series")
    title = f"Series of transfers, {_ARROWS.get(direction, 'stores and loads at once, the sum')}"
    return _titled(figure, title, fields)


def _row(cell: Fields) -> str:
    return f"{cell['model']}, {cell['layout']}\n{cell['blocks']} blocks x {cell['planes']} x {cell['block_bytes']} B"


# bars -----------------------------------------------------------------------------------------------------------------


class _Bar(NamedTuple):
    """A bar of a panel, or in the place of one without a value what is said of it."""

    label: str
    value: float | None
    text: str
    colour: str
    bold: bool = False


def _bar_panels(panels: Mapping[str, Sequence[_Bar]], width: float, height: float, most: float, axis: str) -> Any:
    """A panel for each title. All have the same labels, the first at the top."""
    figure, drawn = make_figure(width, height, len(panels), sharey=True)
    least = min([0.0, *(bar.value for bars in panels.values() for bar in bars if bar.value is not None)])
    for panel, (title, bars) in zip(drawn, panels.items(), strict=True):
        for place, bar in enumerate(bars):
            if bar.value is not None:
                panel.barh(place, bar.value, height=0.7, color=bar.colour)
            panel.text(
                max(bar.value or 0, 0) + 0.012 * most,
                place,
                bar.text,
                va="center",
                fontsize=9.5,
                color=MUTED if bar.value is None else INK,
                fontweight="bold" if bar.bold else "normal",
            )
        panel.set_title(title)
        panel.set_xlim(least, most)
        panel.grid(axis="x", color=GRID)
        panel.axvline(0, color=MUTED, linewidth=1)
        panel.tick_params(left=False)
        panel.spines["left"].set_visible(False)
        labels = [bar.label for bar in bars]
    drawn[0].set_yticks(range(len(labels)), labels)
    for label, bar in zip(drawn[0].get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if bar.bold else "normal")
    drawn[0].set_ylim(len(labels) - 0.4, -0.6)
    drawn[0].set_xlabel(axis, loc="left")
    return figure


_PANELS = {
    "idle": "idle GPU",
    "large-products": "products, 8192 x 8192",
    "small-products": "products, 2048 x 2048",
    "decode-loop": "decode-like loop",
}
_HEADLINE = (  # label, layout and method of a cell, colour
    ("the limit: contiguous copies", "block-major", CONTIGUOUS_COPY, "#ced4da"),
    ("kvoffload, block-major", "block-major", CHOICE, "#d6336c"),
    ("kvoffload, plane-major", "plane-major", CHOICE, "#f783ac"),
    ("one flat batch, plane-major", "plane-major", FLAT_BATCH, "#868e96"),
    ("grid-stride kernel, 12 SMs, plane-major", "plane-major", GRID_STRIDE, "#495057"),
)


def headline_of(fields: Fields) -> Any:
    """`bench field` in one look, loads of the first geometry: a panel for each situation, a bar for each method; None
    if a layout was not measured. Behind each bar its GB/s, and how many times as long a product took meanwhile.
    """
    cells = [cell for cell in fields["cells"] if cell["direction"] == "load"]
    cells = [cell for cell in cells if cell["model"] == cells[0]["model"]]
    found = {(cell["situation"], cell["layout"], cell["method"]): cell for cell in cells}
    layouts = {layout for _, layout, _, _ in _HEADLINE}
    situations = [each for each in _PANELS if all((each, layout, CHOICE) in found for layout in layouts)]
    if not situations:
        return None

    def bar(situation: str, label: str, layout: str, method: str, colour: str) -> _Bar:
        cell = found.get((situation, layout, method))
        if cell is None or cell["gb_per_s"] is None:
            return _Bar(label, None, "not measured" if cell is None else "outlasted the computation", colour)
        slowdown = cell.get("compute_slowdown")
        text = f"{cell['gb_per_s']:.0f}" + ("" if slowdown is None else f"   x{slowdown:.2f}")
        return _Bar(label, cell["gb_per_s"], text, colour, method == CHOICE)

    panels = {_PANELS[each]: [bar(each, *line) for line in _HEADLINE] for each in situations}
    most = max(cell["gb_per_s"] or 0 for cell in cells) * 1.75
    axis = "GB/s, and x: time of a concurrent product over its time alone"
    figure = _bar_panels(panels, 3.0 + 2.45 * len(situations), 2.6, most, axis)
    shown = cells[0]
    loads = f"loads of {shown['blocks']} blocks of {shown['planes']} planes x {shown['block_bytes']} B"
    return _titled(figure, f"Concurrent with compute: {loads} ({shown['model']})", fields)


def _slowdowns(fields: Fields, direction: str) -> Any:
    """One panel for each computation; None without records."""
    records = [each for each in fields["interference"] if each["direction"] == direction and each["method"] != "alone"]
    if not records:
        return None
    methods = sorted({record["method"] for record in records}, key=_bar_order)
    found = {(record["computation"], record["method"]): record for record in records}

    def bar(computation: str, method: str) -> _Bar:
        record = found.get((computation, method))
        label, colour = _bar_label(method), _bar_colour(method)
        if record is None:
            return _Bar(label, None, "not measured", colour)
        lost = 100 * (record["slowdown"] - 1)  # a method that moves nothing costs nothing
        rate = f", {record['gb_per_s']:.0f} GB/s" if "gb_per_s" in record else ""
        return _Bar(label, lost, f"{round(lost)}%{rate}", colour)

    computations = dict.fromkeys(record["computation"] for record in records)
    panels = {each: [bar(each, method) for method in methods] for each in computations}
    most = 1.4 * max(1.0, *(100 * (record["slowdown"] - 1) for record in records))
    size = 2.2 + 3.7 * len(panels), 1.9 + 0.31 * len(methods)
    figure = _bar_panels(panels, *size, most, "% more time, and GB/s of the transfers")
    return _titled(figure, f"Slow-down of a computation concurrent with transfers, {_ARROWS[direction]}", fields)


def _bar_order(method: str) -> tuple[int, int]:
    """The copy engine alone first, then by multiprocessors."""
    kinds = ("choice", "strided", "batch", "contiguous", "split", "gather", "grid-stride")
    first, _, last = method.partition(" ")
    return kinds.index(first.rstrip(",")), int(last) if last.isdigit() else 0


def _bar_label(method: str) -> str:
    if method.startswith("grid-stride"):
        return f"grid-stride kernel, {method.split(' ')[1]} SMs"
    copier, _, programs = method.partition(" ")
    if copier in ("gather", "split"):
        return f"{copier}, {programs} SM{'s' if programs != '1' else ''}"
    return {"choice, overlap": _CHOICE.label, "batch": "batch in chunks", "strided": "strided"}.get(method, method)


def _bar_colour(method: str) -> str:
    if method.startswith("grid-stride"):
        return "#868e96"
    if method.startswith("choice"):
        return _CHOICE.colour
    return {"gather": "#2b8a3e", "split": "#7048e8", "batch": "#e67700"}.get(method.split(" ")[0], "#1c7ed6")
