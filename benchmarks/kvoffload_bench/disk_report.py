"""`bench disk`: the verdict and the tables. Ratios are those to the bare loop of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload.terminal.console import Output, mib
from kvoffload_bench.disk_rounds import COLD_READ, READ, WARM_READ, WRITE
from kvoffload_bench.report import number

Fields = Mapping[str, Any]
_OPERATIONS = {"direct": (WRITE, READ), "buffered": (WRITE, COLD_READ, WARM_READ)}
_LARGE_BYTES = 1 << 20
_SMALL_BAR, _LARGE_BAR, _BUFFERED_BAR = 0.75, 0.9, 0.9
_CALL_BAR_US, _RESTART_BAR_SECONDS, _MEMORY_BAR_BYTES = 30, 3, 250
_BAR_RECORDS = 1_000_000


class _Bar(NamedTuple):
    what: str
    value: str
    bar: str


def show(fields: Fields, output: Output) -> None:
    """Print the verdict, then a table for each kind of I/O, and one of all bars."""
    output.line(verdict(fields))
    for io in ("direct", "buffered"):
        cells = [each for each in fields["cells"] if each["io"] == io]
        if cells:
            _print_cells(io, cells, fields, output)
    if fields["no_direct_io"]:
        output.line("")
        output.line("direct I/O does not work here: records go through the page cache")
    lines = [tuple(each) for each in _bars(fields)]
    output.table("what this library aims at", ("", "measured", "bar"), lines)
    if output.wide:
        calls, restart = fields["calls"], fields["restart"]
        output.line("")
        output.line(
            f"CPU time: of the calling thread a key, put {calls['put_cpu_us']:.1f} us, "
            f"get {calls['get_cpu_us']:.1f} us; "
            f"of the restart {restart['restart_cpu_seconds']:.2f} s"
        )
    output.line("")
    output.line(verified(fields))
    output.line(f"in {', '.join(fields['folders'])}; {fields['usable_cpus']} usable CPUs")


def verdict(fields: Fields) -> str:
    """How near the tier comes to the bare loops: at least, and in the middle."""
    found = []
    for io in ("direct", "buffered"):
        ratios = [each["ratio"] for each in fields["cells"] if each["io"] == io]
        if ratios:
            found.append(f"{min(ratios):.2f} (lowest) and {statistics.median(ratios):.2f} (median) {io}")
    return f"bench disk: the tier has {', '.join(found)}, times a bare loop's bandwidth"


def verified(fields: Fields) -> str:
    """The last line but one."""
    missing = f", {fields['missing_records']} missing" if fields["missing_records"] else ""
    return f"{fields['verified_records']:,} records verified, {fields['wrong_records']} wrong{missing}"


def _print_cells(io: str, cells: Sequence[Fields], fields: Fields, output: Output) -> None:
    operations = _OPERATIONS[io]
    columns = ["record", "threads"]
    for name in operations:
        columns += [name, "GB/s"]
        if output.wide:
            columns += ["bare GB/s", "rounds"]
    by_place = {(each["record_bytes"], each["threads"], each["operation"]): each for each in cells}
    lines = []
    for nbytes, threads in dict.fromkeys((each["record_bytes"], each["threads"]) for each in cells):
        line = [mib(nbytes), str(threads)]
        for name in operations:
            cell = by_place[nbytes, threads, name]
            line += [f"{cell['ratio']:.2f}", number(cell["tier_gb_per_s"])]
            if output.wide:
                spread = f"{cell['ratio_lowest_round']:.2f} to {cell['ratio_highest_round']:.2f}"
                line += [number(cell["bare_gb_per_s"]), spread]
        lines.append(line)
    bare = "a bare loop" if io == "direct" else "a bare loop with checksums"
    output.table(f"{io} I/O, {mib(fields['nbytes'])} a round: bandwidth over that of {bare}, and GB/s", columns, lines)


def _bars(fields: Fields) -> Iterator[_Bar]:
    def lowest(io: str, small: bool | None) -> float | None:
        wanted = [each for each in fields["cells"] if each["io"] == io]
        ratios = [each["ratio"] for each in wanted if small is None or (each["record_bytes"] < _LARGE_BYTES) == small]
        return min(ratios, default=None)

    yield _Bar("lowest ratio, direct, below 1 MiB", number(lowest("direct", True), 2), f"{_SMALL_BAR:.2f}")
    yield _Bar("lowest ratio, direct, from 1 MiB on", number(lowest("direct", False), 2), f"{_LARGE_BAR:.2f}")
    yield _Bar("lowest ratio, buffered", number(lowest("buffered", None), 2), f"{_BUFFERED_BAR:.2f}")
    calls, restart = fields["calls"], fields["restart"]
    of_calls = f"of {calls['keys']} keys, us a key"
    yield _Bar(f"host time of put(), {of_calls}", number(calls["put_us"]), str(_CALL_BAR_US))
    yield _Bar(f"host time of get(), {of_calls}", number(calls["get_us"]), str(_CALL_BAR_US))
    records = restart["records"]
    bar = f"{_RESTART_BAR_SECONDS}" if records == _BAR_RECORDS else f"{_RESTART_BAR_SECONDS} for {_BAR_RECORDS:,}"
    yield _Bar(f"restart with {records:,} records, seconds", number(restart["restart_seconds"], 2), bar)
    yield _Bar("Python memory a record, bytes", number(restart["python_bytes_a_record"], 0), str(_MEMORY_BAR_BYTES))
    yield _Bar(f"contains() of {restart['lookup_keys']} keys, us", number(restart["lookup_us"], 0), "-")
