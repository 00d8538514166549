"""Tables of records: GB/s by scenario, or on the simulated device how many rows of bytes were wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload.bench.baselines import BARE_STRIDED, COPY_LOOP, FLAT_BATCH, grid_stride
from kvoffload.bench.contiguous import CONTIGUOUS_COPY
from kvoffload.bench.frameworks import CUPY, JAX
from kvoffload.bench.measurements import COPY_ENGINE, GRID, METHODS, PREFERENCES, choice
from kvoffload.bench.report import number
from kvoffload.planning.transfer_plan import Direction

_ORDER = (
    *map(choice, PREFERENCES),
    *COPY_ENGINE,
    *(method.label for method in METHODS),
    *(BARE_STRIDED, FLAT_BATCH, COPY_LOOP, *(grid_stride(GRID, pinned=pinned) for pinned in (False, True))),
    *(CUPY, JAX, CONTIGUOUS_COPY),
)


def scenarios_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the scenarios that any of the records has, in the order of the columns."""
    present = set().union(*(record["wrong"] for record in records))
    return [name for name in _ORDER if name in present]


def figures(record: Mapping[str, Any], scenarios: Sequence[str], simulated: bool) -> list[str]:
    """A cell for each scenario."""
    if simulated:
        return [str(record["wrong"].get(name, "-")) for name in scenarios]
    return [number(record["gb_per_s"].get(name)) for name in scenarios]


def chosen_methods(record: Mapping[str, Any]) -> str:
    """The copy methods that the engine chose, by preference: "gather 4 / strided"."""
    chosen = [record["chosen"][name] for name in map(choice, PREFERENCES) if name in record["chosen"]]
    return " / ".join(dict.fromkeys(map(method_of, chosen)))


def method_of(reason: str) -> str:
    """The copy method at the beginning of a job's reason, as `CopyMethod.label`."""
    copier, _, rest = reason.partition(":")[0].partition(" with ")
    return f"{copier} {rest.split(' ')[0]}".rstrip()


def headings(scenarios: Sequence[str]) -> list[str]:
    """Headings of columns that break between words only."""
    return [name.replace(",", "").replace("-", " ") for name in scenarios]


def what(simulated: bool) -> str:
    return "SIMULATED: rows of bytes that were wrong" if simulated else "GB/s on the GPU clock"


def direction_text(direction: Direction) -> str:
    return "device to host" if direction is Direction.STORE else "host to device"
