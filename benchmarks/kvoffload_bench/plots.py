"""Figures of benchmark results, as PNGs, from what `--json` prints: nothing is measured here.

bandwidth-DIRECTION.png   `bench sweep`: GB/s against bytes of a copy, the link as a line
count-DIRECTION.png       `bench sweep`: GB/s against the number of copies
models-DIRECTION.png      `bench transfer`: GB/s by model
field.png                 `bench field`: one geometry's loads, in both layouts and every situation
field-DIRECTION.png       `bench field`: GB/s by transfer and situation; DIRECTION also both
slowdown-DIRECTION.png    `bench interference`: how much slower a computation concurrent with transfers is
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvoffload.terminal.console import CommandError
from kvoffload.terminal.figures import (
    DPI,
    GRID,
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
from kvoffload_bench import field_plots
from kvoffload_bench.field_headline import geometry_of, headline_of

Fields = Mapping[str, Any]
_LINK = "contiguous copy"
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
    if fields["benchmark"] == "field":
        headline = headline_of(fields)
        titled = (
            None if headline is None else _titled(headline, f"Concurrent with compute: {geometry_of(fields)}", fields)
        )
        yield from _save(titled, folder / "field.png")
        for direction in field_plots.DIRECTIONS:
            figure = field_plots.figure_of(fields, direction)
            title = f"Series of transfers, {_ARROWS.get(direction, 'stores and loads at once, the sum')}"
            titled = None if figure is None else _titled(figure, title, fields)
            yield from _save(titled, folder / f"field-{direction}.png")
    for direction in _ARROWS:
        if fields["benchmark"] == "sweep":
            yield from _save(_by_size(fields, direction), folder / f"bandwidth-{direction}.png")
            yield from _save(_by_count(fields, direction), folder / f"count-{direction}.png")
        elif fields["benchmark"] == "transfer":
            yield from _save(_by_model(fields, direction), folder / f"models-{direction}.png")
        elif fields["benchmark"] == "interference":
            yield from _save(_slowdowns(fields, direction), folder / f"slowdown-{direction}.png")


def _save(figure: Any, path: Path) -> Iterator[Path]:
    if figure is not None:
        figure.savefig(path, dpi=DPI, facecolor="white")
        yield path


def _titled(figure: Any, title: str, fields: Fields) -> Any:
    set_title(figure, title, _where(fields))
    return figure


def _where(fields: Fields) -> str:
    machine = f"{fields['device']}, driver {fields['driver']}, link {fields['link']}"
    least = fields["repeats"]  # short transfers get more
    return f"{machine}; medians of {least} round{'' if least == 1 else 's'} or more"


# lines ----------------------------------------------------------------------------------------------------------------


def _by_size(fields: Fields, direction: str) -> Any:
    """GB/s against bytes of a copy, at one number of copies."""
    counts = sorted({record["copies"] for record in fields["transfers"]})
    count = min(counts, key=lambda each: abs(each - 4096))
    records = [
        record for record in fields["transfers"] if record["direction"] == direction and record["copies"] == count
    ]
    title = f"Scattered blocks, {_ARROWS[direction]}: {count} copies"
    return _lines(fields, records, title, "row_bytes", "bytes of one copy", _size)


def _by_count(fields: Fields, direction: str) -> Any:
    """GB/s against the number of copies, at one size."""
    sizes = sorted({record["row_bytes"] for record in fields["transfers"]})
    size = min(sizes, key=lambda each: abs(each - 8192))
    records = [
        record for record in fields["transfers"] if record["direction"] == direction and record["row_bytes"] == size
    ]
    title = f"Scattered blocks, {_ARROWS[direction]}: copies of {_size(size)}"
    return _lines(fields, records, title, "copies", "copies in a transfer", str)


def _lines(
    fields: Fields, records: Sequence[Fields], title: str, key: str, axis: str, text: Callable[[int], str]
) -> Any:
    """One panel for each placement; None without records."""
    placements = list(dict.fromkeys(record["placement"] for record in records))
    if not placements:
        return None
    figure, panels = make_figure(6.9 * len(placements), 5.4, len(placements), sharey=True)
    link = statistics.median(record["gb_per_s"][_LINK] for record in records)
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


def _size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes % 1024 else f"{nbytes // 1024} KiB"


# models ---------------------------------------------------------------------------------------------------------------

_MARKS = (  # column of a result, placement, label, colour, marker
    ("choice, overlap", "folded", "kvoffload, planes fold", "#d6336c", "o"),
    ("choice, overlap", "scattered", "kvoffload, planes scattered", "#f783ac", "o"),
    ("grid-stride 12", "folded", "grid-stride kernel, 12 SMs", "#495057", "s"),
    ("flat batch", "folded", "one flat batch", "#868e96", "D"),
)


def _by_model(fields: Fields, direction: str) -> Any:
    """GB/s of every model, blocks not adjacent, in the largest transfer measured; None without records."""
    records = _largest(fields["transfers"], direction)
    order = sorted({(record["block_bytes"], record["planes"], record["model"]) for record in records})
    if not order:
        return None
    figure, (panel,) = make_figure(10.5, 1.9 + 0.42 * len(order), 1)
    heights = {model: place for place, (_, _, model) in enumerate(order)}
    for name, placement, label, colour, marker in _MARKS:
        points = {
            record["model"]: record["gb_per_s"][name]
            for record in records
            if record["placement"] == placement and name in record["gb_per_s"]
        }
        if points:
            places = [heights[model] for model in points]
            panel.scatter(list(points.values()), places, color=colour, marker=marker, s=58, label=label, zorder=3)
    link = statistics.median(record["gb_per_s"][_LINK] for record in records)
    panel.axvline(link, color=MUTED, linewidth=1.2, linestyle=(0, (6, 3)), label=f"the link, {link:.0f} GB/s")
    names = [f"{model}\n{planes} x {_size(nbytes)}{_amount(records, model)}" for nbytes, planes, model in order]
    panel.set_yticks(range(len(order)), names, fontsize=9)
    panel.set_xlim(0, link * 1.08)
    panel.set_ylim(-0.6, len(order) - 0.4)
    panel.grid(axis="both", color=GRID)
    panel.set_xlabel("GB/s on the GPU clock")
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9.5)
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


# bars -----------------------------------------------------------------------------------------------------------------


def _slowdowns(fields: Fields, direction: str) -> Any:
    """One panel for each computation; None without records."""
    records = [
        record for record in fields["interference"] if record["direction"] == direction and record["method"] != "alone"
    ]
    computations = list(dict.fromkeys(record["computation"] for record in records))
    if not computations:
        return None
    methods = sorted({record["method"] for record in records}, key=_bar_order)
    figure, panels = make_figure(
        2.2 + 3.7 * len(computations), 1.9 + 0.31 * len(methods), len(computations), sharey=True
    )
    most = max(1.0, *(100 * (record["slowdown"] - 1) for record in records))
    for panel, computation in zip(panels, computations, strict=True):
        found = {record["method"]: record for record in records if record["computation"] == computation}
        lost = {method: 100 * (record["slowdown"] - 1) for method, record in found.items()}
        places = [place for place, method in enumerate(methods) if method in lost]
        values = [lost[methods[place]] for place in places]
        panel.barh(places, values, color=[_bar_colour(methods[place]) for place in places], height=0.68)
        for place, method in enumerate(methods):
            text = _bar_text(found.get(method))
            panel.text(max(lost.get(method, 0), 0) + 0.015 * most, place, text, va="center", fontsize=9.5)
        panel.set_xlim(min(0, *values), 1.4 * most)
        panel.set_title(computation)
        panel.set_xlabel("% more time, and GB/s of the transfers", loc="left")
        panel.tick_params(left=False)
        panel.spines["left"].set_visible(False)
        panel.axvline(0, color=MUTED, linewidth=1)
    panels[0].set_yticks(range(len(methods)), [_bar_label(method) for method in methods])
    panels[0].invert_yaxis()
    return _titled(figure, f"Slow-down of a computation concurrent with transfers, {_ARROWS[direction]}", fields)


def _bar_text(record: Fields | None) -> str:
    """What computation loses, and what for: a method that moves nothing costs nothing."""
    if record is None:
        return "not measured"
    rate = f", {record['gb_per_s']:.0f} GB/s" if "gb_per_s" in record else ""
    return f"{round(100 * (record['slowdown'] - 1))}%{rate}"


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
