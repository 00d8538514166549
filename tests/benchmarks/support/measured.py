"""Results of benchmarks as a GPU gives them: recorded on the simulated device, with plausible figures filled in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from printed import GPU

from kvoffload.terminal.console import Output
from kvoffload_bench import field_report, growth, interop, layer_groups, sharded, submit, transfer
from kvoffload_bench.harness import CONTIGUOUS_COPY
from kvoffload_bench.report import Fields

Show = Callable[[Fields, Output], None]
_REASON = "pack: 49.1 GB/s expected, the fastest; next is strided with 47.2 GB/s"


def measured(fields: Fields) -> tuple[Fields, Show]:
    """The fields of a simulated benchmark with figures, and what shows them."""
    random = Random(1)
    fill, show = _BENCHES[fields["benchmark"]]
    found = fields | GPU
    fill(found, random)
    return found, show


def _rate(random: Random) -> float:
    return random.uniform(2.0, 155.0)


def _transfers(fields: Fields, random: Random) -> None:
    for record in fields["transfers"]:
        record["gb_per_s"] = {name: _rate(random) for name in record["wrong"]}
        record["chosen"] = {name: _REASON for name in record["wrong"] if name.startswith("choice")}
    name = "pack / contiguous copy, scattered, 4 to 64 KiB, from 32 MiB, store"
    fields["ratios"] = [{"ratio": name, "which": "lowest", "value": 0.9, "at": "llama-3.1-70b-tp4, 8 KiB, n = 1024"}]


def _cells(fields: Fields, random: Random) -> None:
    for cell in fields["cells"]:
        both = cell["direction"] == "both"
        cell |= {"gb_per_s": _rate(random), "rounds": 3, "rounds_compute_ended": int(both), "call_median_us": 50.0}
        cell |= {"call_max_us": 12345.6, "compute_slowdown": 1.25, "block_bytes": 1 << 19, "blocks": 512, "planes": 160}
        if "choice" in cell["method"]:
            cell["chosen"] = {"store": {"pack": 3, "strided": 1}, "load": {"batch": 4}}
    comparisons = field_report.compare(fields["cells"])
    fields |= {"comparisons": comparisons, "wall_seconds": 270.0}


def _series(fields: Fields, random: Random) -> None:
    for record in fields["series"]:
        names = (sharded.ONE, sharded.SHARDED)
        record |= {"gb_per_s": {name: _rate(random) for name in names}, "sharded/one": 1.95}


def _growth(fields: Fields, random: Random) -> None:
    fields["nbytes"] = 64 << 30
    for pool in fields["pools"]:
        pool |= {"first_store_seconds": random.uniform(0.1, 3.0), "pinned_seconds": random.uniform(3.0, 9.0)}
    for record in fields["transfers_of_pools"]:
        names = ("ms", "call_ms", "slowdown")
        record |= {f"{which}_{name}": random.uniform(0.1, 25.0) for which in ("median", "most") for name in names}


def _parts(fields: Fields, random: Random) -> None:
    for record in fields["parts"]:
        record |= {f"{name}_us": random.uniform(100, 99999) for name in ("call", "first", "all", "gpu")}
        record["gb_per_s"] = _rate(random)


def _interop(fields: Fields, random: Random) -> None:
    names = {
        "CuPy": ("one array, kvoffload", "list, gather, get(out=pinned) / asarray, scatter"),
        "JAX": ("OwnedCache", "jitted gather, device_put to pinned_host / device_put, scatter, per block"),
    }
    records: list[dict[str, Any]] = []
    for times in (1, 8):
        for framework, methods in names.items():
            for method in methods:
                copiers = {"store": "strided", "load": "batch"} if method == methods[0] else {}
                records.append({"framework": framework, "method": method, "back_to_back": times, "copiers": copiers})
        records.append({"framework": None, "method": CONTIGUOUS_COPY, "back_to_back": times, "copiers": {}})
    for record in records:
        record |= {"gb_per_s": {name: _rate(random) for name in ("store", "load")}, "wrong": {"store": 0, "load": 0}}
        record["median_us"] = {"store": 98765.4, "load": 1234.5}
    comparisons = list(interop._comparisons(records))
    fields |= {"methods": records, "comparisons": comparisons, "ratios": list(interop._lowest(comparisons))}
    timed = ("step", "no transfer", "after transfers", "after=cache")
    fields["trees"] = [
        {"leaves": leaves, "wrong": 0, "median_us": {name: 10 ** random.uniform(0, 3) for name in timed}}
        for leaves in (1, 8, 64)
    ]


def _submissions(fields: Fields, random: Random) -> None:
    for record in fields["submissions"]:
        record |= {f"{name}_us": random.uniform(10, 300) for name in ("bare", "ours")} | {"ratio": 2.5}
    for record in fields["loads"]:
        record |= {f"{name}_us": random.uniform(10, 300) for name in ("wall", "link", "beyond_link")}
    fields["contiguous_copy_gb_per_s"] = {"store": 55.1, "load": 55.2}


_BENCHES: dict[str, tuple[Callable[[Fields, Random], None], Show]] = {
    "transfer": (_transfers, partial(transfer.show, "transfer")),
    "sweep": (_transfers, partial(transfer.show, "sweep")),
    "field": (_cells, field_report.show),
    "sharded": (_series, sharded._show),
    "growth": (_growth, growth._show),
    "parts": (_parts, layer_groups._show),
    "interop": (_interop, interop._show),
    "submit": (_submissions, submit._show),
}
