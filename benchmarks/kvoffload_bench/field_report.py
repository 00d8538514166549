"""What `bench field` prints: the engine's choice against the limit, the best copy method, and other methods."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvoffload.layout.coding import CODECS
from kvoffload.terminal.console import Output, counted
from kvoffload.tuning import COPIERS
from kvoffload_bench.field_compute import Situation
from kvoffload_bench.field_methods import CHOICE
from kvoffload_bench.harness import CONTIGUOUS_COPY
from kvoffload_bench.report import Fields, fixed

Record = Mapping[str, Any]
PLACE = ("model", "layout", "situation", "direction", "blocks")  # what the records of one comparison have in common
_LEGEND = (
    "by: the copy method of most transfers; pac/str: pack for stores, strided for loads",
    "/limit: GB/s over those of contiguous copies",
    "best, regret: the fastest copy method, and how much faster it is than the choice",
    "slow: time of a product during the choice's series over its time alone",
    "max us: the longest call of store() or load()",
)
_CODEC_LEGEND = "coded: GB/s of bf16 values by pack with the codec, over those by pack without it"


def regret(best: float, choice: float) -> float:
    """How much faster the best copy method is than the engine's choice: 0.25 is a quarter faster, GB/s by GB/s."""
    return best / choice - 1


def compare(records: Iterable[Record]) -> list[dict[str, Any]]:
    """For each place that the choice and the limit were measured at: their ratios, and the best copy method.

    A method without a bandwidth, since the computation ended before its transfers did, is left out. A place whose
    choice has none is left out altogether.
    """
    places: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        places.setdefault(tuple(record[name] for name in PLACE), {})[record["method"]] = record
    return [found for methods in places.values() if (found := _compared(methods)) is not None]


def _compared(methods: Mapping[str, Record]) -> dict[str, Any] | None:
    rates = {name: record["gb_per_s"] for name, record in methods.items() if record.get("gb_per_s") is not None}
    if CHOICE not in rates:
        return None
    chosen, choice = methods[CHOICE], rates[CHOICE]
    found = {
        name: chosen[name] for name in (*PLACE, "planes", "block_bytes", "groups", "transfers", "nbytes", "rounds")
    }
    found |= {"choice_gb_per_s": choice, "chosen": chosen["chosen"], "call_max_us": chosen["call_max_us"]}
    found["compute_slowdown"] = chosen.get("compute_slowdown")
    ours = [name for name in COPIERS if name in rates]
    best = max(ours, key=rates.__getitem__, default=None)
    if best is not None:
        found |= {"best_method": best, "best_gb_per_s": rates[best], "choice/best": choice / rates[best]}
        found |= {"best_compute_slowdown": methods[best].get("compute_slowdown"), "regret": regret(rates[best], choice)}
    coded = next((name for name in CODECS if name in rates), None)
    if coded is not None and "pack" in rates:
        found |= {"codec": coded, "codec/pack": rates[coded] / rates["pack"]}
    if CONTIGUOUS_COPY in rates:
        found |= {"limit_gb_per_s": rates[CONTIGUOUS_COPY], "choice/limit": choice / rates[CONTIGUOUS_COPY]}
    return found


def worst(comparisons: Iterable[Record]) -> Record | None:
    """The comparison with the lowest choice / limit; None if there is none."""
    return min((each for each in comparisons if "choice/limit" in each), key=lambda x: x["choice/limit"], default=None)


# tables ---------------------------------------------------------------------------------------------------------------


def show(fields: Fields, output: Output) -> None:
    comparisons = fields["comparisons"]
    output.line(_verdict(comparisons))
    lowest = worst(comparisons)
    if lowest is not None:
        output.line(worst_text(lowest))
    if fields["cells"]:
        output.line(f"wall clock of series of transfers; {_transfers_text(fields['cells'])}")
        for text in (*_LEGEND, *([_CODEC_LEGEND] if any("codec" in each for each in comparisons) else [])):
            output.line(text)
    for situation in Situation:
        for layout in dict.fromkeys(each["layout"] for each in fields["cells"]):
            place = situation, layout
            _show_place(
                *place, [each for each in fields["cells"] if (each["situation"], each["layout"]) == place], output
            )
    early = sum(each["rounds_compute_ended"] for each in fields["cells"])
    if early:
        rounds = sum(each["rounds"] for each in fields["cells"])
        output.line(f"not counted: {early} of {rounds} series, during which the computation ended or paused")
    without = sum(cell["method"] == CHOICE for cell in fields["cells"]) - len(comparisons)
    if without:
        ended = "the computation ended or paused in every round of the choice"
        output.line(f"{counted(without, 'line')} without a figure: {ended}")
    output.line(f"measured in {fields['wall_seconds']:.0f} s")


def _verdict(comparisons: Iterable[Record]) -> str:
    """How near the engine's choice comes to contiguous copies, at least and in the middle."""
    shares = [each["choice/limit"] for each in comparisons if "choice/limit" in each]
    if not shares:
        return "bench field: the engine's choice was not measured"
    return (
        f"bench field: the engine's choice has {min(shares):.2f} (lowest) and {statistics.median(shares):.2f} (median) "
        "of the contiguous copies' GB/s"
    )


def worst_text(each: Record) -> str:
    """The comparison and all that identifies it."""
    chosen = "; ".join(
        f"{direction}: {', '.join(name for name, _ in Counter(counts).most_common())}"
        for direction, counts in each["chosen"].items()
    )
    slower = "-" if each["compute_slowdown"] is None else f"x{each['compute_slowdown']:.2f}"
    best = ""
    if "best_method" in each:
        best = f", best {each['best_gb_per_s']:.1f} by {each['best_method']} (regret {each['regret']:.1%})"
    groups = f" in {each['groups']} groups" if each["groups"] > 1 else ""
    return (
        f"lowest choice / limit: {each['choice/limit']:.2f}: {each['model']}, {each['layout']}, "
        f"{Situation(each['situation']).text}, {each['direction']}: {counted(each['transfers'], 'transfer')} of "
        f"{counted(each['blocks'], 'block')} x {each['planes']} planes x {each['block_bytes']} B{groups}: "
        f"{each['choice_gb_per_s']:.1f} GB/s of {each['limit_gb_per_s']:.1f}, by {chosen}{best}; "
        f"computation {slower}, longest call {each['call_max_us']:.0f} us, "
        f"{counted(each['rounds'], 'round')}"
    )


def chosen_text(chosen: Mapping[str, Mapping[str, int]]) -> str:
    """The method that most transfers of each direction had, shortened where directions differ."""
    names = list(dict.fromkeys(Counter(counts).most_common(1)[0][0] for counts in chosen.values() if counts))
    return names[0] if len(names) == 1 else "/".join(name[:3] for name in names)


def _show_place(situation: Situation, layout: str, cells: Sequence[Record], output: Output) -> None:
    if not cells:
        return
    found = {tuple(each[name] for name in PLACE): each for each in compare(cells)}
    coded = ["coded"] if any("codec" in each for each in found.values()) else []
    columns = ("transfer", "moves", "GB/s", "by", "/limit", "best", "regret", "slow", *coded, "max us")
    lines = []
    for cell in cells:
        if cell["method"] != CHOICE:
            continue
        each = found.get(tuple(cell[name] for name in PLACE))
        blocks = f"{cell['blocks']}x{cell['planes']}x{_kib(cell['block_bytes'])}"
        line = [blocks, cell["direction"]]
        if each is None:
            line += ["ended", chosen_text(cell["chosen"]), "-", "-", "-", "-", *("-" for _ in coded)]
        else:
            line += [
                fixed(each["choice_gb_per_s"]),
                chosen_text(each["chosen"]),
                fixed(each.get("choice/limit"), 2),
            ]
            best = each.get("best_method")
            line += [best or "-", f"{each['regret']:.0%}" if best else "-", fixed(each["compute_slowdown"], 2)]
            line += [fixed(each.get("codec/pack"), 2) for _ in coded]
        lines.append([*line, f"{cell['call_max_us']:.0f}"])
    output.table(f"{situation.text}, {layout}", columns, lines)


def _transfers_text(cells: Sequence[Record]) -> str:
    return ", ".join(
        f"{planes}x{_kib(nbytes)} {model}"
        for model, planes, nbytes in dict.fromkeys(
            (each["model"], each["planes"], each["block_bytes"]) for each in cells
        )
    )


def _kib(nbytes: int) -> str:
    return f"{nbytes}" if nbytes % 1024 else f"{nbytes // 1024}K"
