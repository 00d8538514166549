"""`bench remote`: the verdict and the tables. Ratios are those to the bare calls of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload.terminal.console import Output, mib
from kvoffload_bench.disk_report import verified
from kvoffload_bench.remote_rounds import GET, PUT
from kvoffload_bench.report import number

Fields = Mapping[str, Any]
_BAR, _CALL_BAR_US = 0.85, 40
_BAR_BYTES, _BAR_IN_FLIGHT = 2 << 20, 8
_BARE = {
    "valkey": "glide's pipelined SET and MGET into buffers",
    "objects": "obstore's put and get",
    "mooncake": "batch_put_from and batch_get_into",
}


class _Bar(NamedTuple):
    what: str
    measured: Sequence[str]
    bar: str


def show(fields: Fields, output: Output) -> None:
    """Print the verdict, then a table for each store, and one of all bars."""
    output.line(verdict(fields))
    kinds = [each["store"] for each in fields["calls"]]
    for kind in kinds:
        _print_cells(kind, [each for each in fields["cells"] if each["store"] == kind], output)
    lines = [(each.what, *each.measured, each.bar) for each in _bars(fields, kinds)]
    output.table("what this library aims at", ("", *kinds, "bar"), lines)
    output.line("")
    for kind, reason in fields["not_run"].items():
        output.line(f"not run: {kind}: {reason}")
    output.line(verified(fields))
    where = "in processes of their own on this machine" if fields["started"] else f"{', '.join(fields['stores'])}"
    output.line(f"stores: {where}; {fields['usable_cpus']} usable CPUs; promotions on {fields['device']}")


def verdict(fields: Fields) -> str:
    """How near the tiers come to the bare calls: at least, and in the middle."""
    found = []
    for kind in dict.fromkeys(each["store"] for each in fields["cells"]):
        ratios = [each["ratio"] for each in fields["cells"] if each["store"] == kind]
        found.append(f"{kind} {min(ratios):.2f} (lowest) and {statistics.median(ratios):.2f} (median)")
    return f"bench remote: {', '.join(found)}, times the bandwidth of bare calls"


def _print_cells(kind: str, cells: Sequence[Fields], output: Output) -> None:
    columns = ["record", "in flight"]
    for name in (PUT, GET):
        columns += [name, "GB/s"]
        if output.wide:
            columns += ["bare GB/s", "rounds"]
    by_place = {(each["record_bytes"], each["in_flight"], each["operation"]): each for each in cells}
    lines = []
    for nbytes, count in dict.fromkeys((each["record_bytes"], each["in_flight"]) for each in cells):
        line = [mib(nbytes), str(count)]
        for name in (PUT, GET):
            cell = by_place[nbytes, count, name]
            line += [f"{cell['ratio']:.2f}", number(cell["tier_gb_per_s"], 2)]
            if output.wide:
                spread = f"{cell['ratio_lowest_round']:.2f} to {cell['ratio_highest_round']:.2f}"
                line += [number(cell["bare_gb_per_s"], 2), spread]
        lines.append(line)
    output.table(f"{kind}: bandwidth over that of {_BARE[kind]}, and GB/s", columns, lines)


def _bars(fields: Fields, kinds: Sequence[str]) -> Iterator[_Bar]:
    """A line for each figure, with a value for each store."""
    cells = {(each["store"], each["record_bytes"], each["in_flight"], each["operation"]): each["ratio"]
             for each in fields["cells"]}  # fmt: skip
    for name in (PUT, GET):
        ratios = [number(cells.get((kind, _BAR_BYTES, _BAR_IN_FLIGHT, name)), 2) for kind in kinds]
        yield _Bar(f"ratio, {name}, {mib(_BAR_BYTES)}, {_BAR_IN_FLIGHT} in flight", ratios, f"{_BAR:.2f}")
    of_keys = fields["calls"][0]["keys"]
    for name in (PUT, GET):
        times = [number(each[f"{name}_us"]) for each in fields["calls"]]
        yield _Bar(f"host time of {name}() of {of_keys} keys, us a key", times, str(_CALL_BAR_US))
    allocated = [number(each["python_bytes_a_record"] / 1024) for each in fields["calls"]]
    size = fields["calls"][0]["record_bytes"]
    yield _Bar(f"Python memory of a record of {mib(size)}, put and got, KiB", allocated, "-")
    promotions = fields["promotions"]
    size, count = promotions[0]["record_bytes"], promotions[0]["keys"]
    for place, what in (("first", "first of"), ("all", "all")):
        times = [number(each[f"{place}_ms"]) for each in promotions]
        yield _Bar(f"promote(): {what} {count} keys of {mib(size)} ready after ms", times, "-")
