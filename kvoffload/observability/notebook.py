"""Layouts, engines, caches and plans in a notebook: as cards with tables and small bars.

A card is HTML with inline styles; it loads nothing and has no script. Text and background keep the page's colours, so
that it can be read in light and dark themes; only bars have colours. All text is escaped. Nothing here asks the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from kvoffload.cache.block_cache import BlockCache
from kvoffload.cache.pools import Tenant
from kvoffload.cache.statistics import CacheStatistics
from kvoffload.device.device import Device
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.plan_report import PlanReport
from kvoffload.internal.representation import register
from kvoffload.layout.fold import FoldedGroup, describe_fold, fold
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Group

_BLUE, _LIGHT_BLUE, _ORANGE, _NOTHING = "#3d7fc4", "#7fb2e5", "#d9822b", "transparent"
_MOST_DRAWN = 128  # planes of a slot; beyond that they would be thinner than a pixel
_NOT_MEASURED = "simulated"
_SIMULATED = "simulated: no GPU, times mean nothing"


def register_cards() -> None:
    """Make notebooks show these classes as cards. Called when `kvoffload` is imported."""
    register(KVLayout, layout_card)
    register(OffloadEngine, engine_card)
    register(BlockCache, cache_card)
    register(PlanReport, plan_card)


class Markup(str):
    """Text that is HTML already, and is not escaped."""

    __slots__ = ()


class Band(NamedTuple):
    """A part of a bar; `text` is its legend, "" for none."""

    text: str
    amount: int
    colour: str


# HTML -----------------------------------------------------------------------------------------------------------------


def element(name: str, *content: object, style: str = "") -> Markup:
    """Return an element. Content that is not Markup is escaped."""
    from html import escape  # its table of entities takes 2 ms to import, and this module comes with the package

    inside = "".join(each if isinstance(each, Markup) else escape(str(each)) for each in content)
    attribute = f' style="{escape(style)}"' if style else ""
    return Markup(f"<{name}{attribute}>{inside}</{name}>")


def join(elements: Iterable[Markup]) -> Markup:
    return Markup("".join(elements))


def table(lines: Iterable[Sequence[object]], heads: Sequence[object] = ()) -> Markup:
    """Return a table. The first cell of each line is its heading; `heads` are the columns' headings."""
    style = "text-align:left;vertical-align:top;padding:1px 14px 1px 0"
    top = element("tr", *(element("th", head, style=style) for head in heads)) if heads else Markup()
    body = join(
        element(
            "tr",
            element("th", first, style=f"{style};font-weight:normal;opacity:.7"),
            *(element("td", cell, style=style) for cell in rest),
        )
        for first, *rest in lines
    )
    return element("table", top, body, style="border-collapse:collapse;margin:2px 0")


def bar(bands: Sequence[Band]) -> Markup:
    """Draw bands next to each other, as wide as their amounts, with a legend below."""
    total = sum(band.amount for band in bands) or 1
    widths = ((band.colour, 100 * band.amount / total) for band in bands if band.amount)
    drawn = join(element("span", style=f"width:{width:.4g}%;background:{colour}") for colour, width in widths)
    square = "display:inline-block;width:9px;height:9px;border:1px solid;margin:0 5px 0 0;background:"
    named = ((band.text, element("span", style=square + band.colour)) for band in bands if band.text)
    legend = join(element("span", colour, text, style="margin-right:16px") for text, colour in named)
    frame = element("div", drawn, style="display:flex;max-width:520px;height:13px;border:1px solid;overflow:hidden")
    return element("div", frame, element("div", legend, style="font-size:90%"), style="margin:3px 0")


def card(title: str, marks: Sequence[str], *content: Markup) -> Markup:
    """Return a card: a title, marks next to it, and content below."""
    style = "border:1px dashed;border-radius:4px;padding:0 6px;margin-left:8px;font-size:90%"
    head = element("div", element("strong", title), *(element("span", mark, style=style) for mark in marks))
    return element("div", head, *content, style="margin:4px 0")


def size(nbytes: int) -> str:
    """Return bytes as text: "32 KiB", "1.50 GiB"."""
    amount, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:,.0f} {unit}" if amount == int(amount) else f"{amount:,.2f} {unit}"


def duration(seconds: float) -> str:
    """Return seconds as text: "1.5 us", "12.30 ms"; "not measured" for infinity."""
    if seconds == inf:
        return "not measured"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# layouts --------------------------------------------------------------------------------------------------------------


def layout_card(layout: KVLayout) -> Markup:
    """Show the groups of a layout, how they fold by address alone, and how a slot is filled."""
    rows: list[tuple[str, object]] = [*_layout_rows(layout, fold(layout))]
    factor = layout.blocks_per_slot
    rows.append(("slot", f"blocks_per_slot={factor}, slot_bytes={layout.slot_bytes:,} ({size(layout.slot_bytes)})"))
    for number, group in enumerate(layout.groups):
        name = "a slot's bytes" + (f", group {number}" if layout.num_groups > 1 else "")
        rows.append((name, bar(_slot_bands(group, factor, layout.slot_bytes))))
    axes = None if layout.block_axes is None else ", ".join(layout.block_axes)
    described = (("dtype", layout.dtype), ("axes of a block", axes), ("tokens per block", layout.tokens_per_block))
    rows += [(name, value) for name, value in described if value is not None]
    note = "By address alone. An engine asks the driver which allocation holds each plane; no copy crosses two of them."
    return card("KVLayout", (), table(rows), element("div", note, style="opacity:.7"))


def _layout_rows(layout: KVLayout, folded: Sequence[FoldedGroup]) -> Iterator[tuple[str, object]]:
    for number, (group, folds) in enumerate(zip(layout.groups, folded, strict=True)):
        which = f"group {number}: " if layout.num_groups > 1 else ""
        sizes = sorted({plane.block_bytes for plane in group.planes})
        shown = "/".join(map(size, sizes[:3])) + ("/..." if len(sizes) > 3 else "")
        planes = f"{plural(len(group.planes), 'plane')} x {shown} x {plural(group.num_blocks, 'block')}"
        yield f"{which}planes", f"{planes}, {size(group.bytes_per_block)} a block"
        yield f"{which}folding", f"{describe_fold([folds])}: {_rows(folds)}"


def _rows(folded: FoldedGroup) -> str:
    """The rows of a block's strided copies: '64 rows of 32 KiB'."""
    counts = [f"{plural(each.row_count, 'row')} of {size(each.width)}" for each in folded.classes]
    return ", ".join(counts[:3]) + (", ..." if len(counts) > 3 else "")


def _slot_bands(group: Group, factor: int, slot_bytes: int) -> list[Band]:
    """The planes, or the blocks of a block-major slot, in two alternating colours, and the padding at the end."""
    if group.slot_order == "block-major" and factor > 1:
        text = f"{plural(factor, 'block')} of {plural(len(group.planes), 'plane')} each, {size(group.payload_bytes)}"
        sizes = [group.bytes_per_block] * factor
    else:
        blocks = "" if factor == 1 else f", {plural(factor, 'block')} each"
        text = f"{plural(len(group.planes), 'plane')}{blocks}, {size(group.payload_bytes)}"
        sizes = [plane.block_bytes * factor for plane in group.planes]
    sizes = sizes if len(sizes) <= _MOST_DRAWN else [group.payload_bytes]
    planes = [Band("" if n else text, each, (_BLUE, _LIGHT_BLUE)[n % 2]) for n, each in enumerate(sizes)]
    padding = slot_bytes - group.payload_bytes
    return [*planes, Band(f"padding, {size(padding)}", padding, _NOTHING)] if padding else planes


# engines --------------------------------------------------------------------------------------------------------------


def engine_card(
    engine: OffloadEngine, folded: Sequence[FoldedGroup], copiers: Mapping[str, str | None], *, closed: bool
) -> Markup:
    """Show the pool of an engine, its transfers, and the copiers that it can use."""
    device, layout = engine.device, engine.layout
    statistics = None if device.foreign else engine.statistics()
    pool_bytes = engine.pinned_slots * layout.slot_bytes  # fewer while it grows
    pinned = "not pinned any more" if closed else "pinned"
    rows: list[tuple[str, object]] = [
        ("device", f"{device.name} (device {device.index})"),
        ("pool", f"{plural(engine.num_slots, 'slot')} x {size(layout.slot_bytes)}, {size(pool_bytes)} {pinned}"),
        *_layout_rows(layout, folded),
    ]
    totals = Markup()
    if statistics is not None:
        streams = f"{statistics.streams_in_use} of {plural(statistics.streams, 'stream')}"
        held = f"{statistics.held:,} of them held on the host for lack of room"
        rows += [
            ("jobs", f"{statistics.in_flight:,} in flight, {held}"),
            ("in use", f"{streams}, {statistics.events_in_use} of {plural(statistics.events, 'event')}"),
            ("staging rings", f"{size(statistics.staging_bytes)} of device memory"),
        ]
        lines = []
        for name, each in (("store", statistics.store), ("load", statistics.load)):
            rate = _NOT_MEASURED if device.simulated else _rate(each.nbytes, each.seconds or inf)
            lines.append((name, f"{each.jobs - each.failed:,}", f"{each.failed:,}", size(each.nbytes), rate))
        totals = table(lines, ("", "done", "failed", "bytes", "GB/s on the GPU clock"))
    rows += [
        ("copiers", _copiers(copiers, simulated=device.simulated)),
        ("selected by", f"prefer={engine.prefer!r}; {engine.profile.source}"),
    ]
    return card("OffloadEngine", _marks(device, closed=closed), table(rows), totals)


def _marks(device: Device, *, closed: bool) -> list[str]:
    """Short warnings for the head of a card."""
    foreign = "belongs to the parent of this process"
    marks = ((_SIMULATED, device.simulated), ("closed", closed), (foreign, device.foreign))
    return [mark for mark, holds in marks if holds]


def _copiers(copiers: Mapping[str, str | None], *, simulated: bool) -> Markup:
    """The copiers that can run on one line, and a line with the reason for each that cannot."""
    able = [name for name, reason in copiers.items() if reason is None]
    interpreted = " (kernels are interpreted here: only when asked for by name)" if simulated else ""
    lines = [", ".join(able) + (interpreted if "pack" in able else "")]
    lines += [f"not {name}: {reason}" for name, reason in copiers.items() if reason is not None]
    return join(element("div", line) for line in lines)


# caches ---------------------------------------------------------------------------------------------------------------


def cache_card(
    cache: BlockCache, statistics: CacheStatistics | None, described: str, tenants: Mapping[str, Tenant]
) -> Markup:
    """Show the slots of a block cache, and its counts."""
    rows: list[tuple[str, object]] = [("keys and policy", described)]
    if statistics is not None:
        each = statistics
        rate = f" ({each.hits / each.lookups:.1%})" if each.lookups else ""
        missed = f"{each.lookups - each.hits:,} missed"
        rows += [
            ("slots", bar(_residency(statistics))),
            ("looked up", f"{plural(each.lookups, 'block')}, {plural(each.hits, 'hit')}{rate}, {missed}"),
            ("moved", f"{each.stored:,} stored, {each.loaded:,} loaded"),
            ("taken out", f"{each.evicted:,} evicted, {each.removed:,} removed"),
            ("not stored", f"{each.declined:,} declined, {each.failed:,} failed"),
        ]
    limits = [
        (name, "-" if of.max_blocks is None else f"{of.max_blocks:,}", of.priority) for name, of in tenants.items()
    ]
    quotas = table(limits, ("tenant", "max_blocks", "priority"))
    marks = _marks(cache.engine.devices[0], closed=False)
    return card("BlockCache", marks, table(rows), quotas if tenants else Markup())


def _residency(statistics: CacheStatistics) -> list[Band]:
    free = statistics.capacity - statistics.resident - statistics.pending
    in_use = min(statistics.pinned + statistics.pending, statistics.capacity - free)
    resident = statistics.capacity - free - in_use
    return [
        Band(f"{resident:,} resident", resident, _BLUE),
        Band(f"{in_use:,} leased, loading or being stored", in_use, _ORANGE),
        Band(f"{free:,} free of {statistics.capacity:,}", free, _NOTHING),
    ]


# plans ----------------------------------------------------------------------------------------------------------------


def plan_card(report: PlanReport) -> Markup:
    """Show a planned transfer: its size, the copy method selected for it, and the alternatives."""
    rows = [
        ("transfer", f"{report.direction} of {plural(report.blocks, 'block')}, {size(report.nbytes)}"),
        ("operations", f"{report.operations:,} if strided, {report.rows:,} if flat"),
        ("why", report.reason),
        ("expected from", report.profile),
    ]
    methods = [] if report.copier is None else [(report.copier, report.seconds), *report.alternatives]
    lines = [
        (str(method), duration(seconds), _rate(report.nbytes, seconds), "chosen" if method is report.copier else "")
        for method, seconds in methods
    ]
    times = table(lines, ("method", "expected", "GB/s", ""))
    marks = ("nothing is submitted", *(("simulated: times are those of another device",) if report.simulated else ()))
    return card("PlanReport", marks, table(rows), times if methods else Markup())


def _rate(nbytes: int, seconds: float) -> str:
    return "-" if seconds == inf else f"{nbytes / seconds / 1e9:.1f}"
