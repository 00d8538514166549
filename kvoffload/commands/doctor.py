"""`kvoffload doctor`: checks packages, GPU, copiers and limits, and says how to fix each problem."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kvoffload.commands import findings, folders, stores
from kvoffload.copiers import STAGING_BYTES
from kvoffload.driver import cuda
from kvoffload.errors import CapabilityError, DriverError, KVOffloadError
from kvoffload.internal import cachefiles, hostinfo
from kvoffload.terminal.console import Output, open_backend
from kvoffload.terminal.machine import describe_device, missing_copiers
from kvoffload.terminal.options import COMMON, add_command, add_common_options
from kvoffload.terminal.store_option import add_store_option
from kvoffload.tuning import profile_for

_PACKAGES = ("kvoffload", "numpy", "cuda-bindings", "cuda-core", "platformdirs", "xxhash", "triton")
_INDENT = " " * len("  warn  ")
_WITHOUT_A_GPU = "without a GPU, `kvoffload demo` and `kvoffload replay TRACE --scale 0.01` use the simulated device"
_EXTRAS = (
    "rich", "matplotlib", "cupy-cuda12x", "cupy-cuda13x", "jax", "mooncake-transfer-engine-non-cuda",
    "valkey-glide-sync", "obstore",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "doctor",
        "what works here, and how to fix the rest",
        "Shows GPU, link, copy methods, packages and limits, and a remedy for each that is not ok. Creates a CUDA "
        "context on the chosen device only.",
        example="doctor --path /mnt/nvme",
        common=COMMON,
    )
    parser.add_argument(
        "--path",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="also try folders for a disk tier: a second each, with a file of at most 256 MiB, then removed",
    )
    add_store_option(parser, "also try a remote store: kind and arguments of its tier; 32 records of 1 MiB")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns 2 for `--backend cuda` without a GPU that can be opened, 1 if a finding is a failure,
    else 0.
    """
    output, asked = Output(arguments.json), arguments.backend
    gpus, problem = (None, None) if arguments.backend == "simulated" else _gpus()
    fields: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "extras": {name: _version(name) for name in _EXTRAS},
        "gpus": gpus,
        "problem": problem,
        "memory": _memory(),
        "cache_folder": str(cachefiles.cache_folder()),
        "cache_folder_problem": cachefiles.why_not_writable(),
    }
    if gpus and asked == "auto":
        arguments.backend = "cuda"  # a GPU that cannot be opened is a finding, and no reason to look at another device
    fields |= _device_fields(arguments, output)
    fields["folders"] = _tried("folders", list(dict.fromkeys(arguments.path)), folders.probe, output)
    fields["stores"] = _tried("stores", arguments.store, stores.probe, output)
    found = sorted((each for group in findings.groups(fields).values() for each in group), key=lambda each: each.rank)
    fields["advice"] = [f"{each.name}: {each.remedy}" for each in found if each.remedy]
    fields["advice"] += [] if problem is None else [_WITHOUT_A_GPU]
    output.result(fields)
    _print(fields, output)
    if asked == "cuda" and (problem is not None or fields["simulated"] is None):
        return 2
    return int(any(each.status == "fail" for each in found))


def _tried(what: str, given: Sequence[Any], probe: Callable[[Any], dict[str, Any]], output: Output) -> list[Any]:
    with output.progress(f"trying {what}") as progress:
        found = []
        for number, each in enumerate(given):
            progress(number, len(given))
            found.append(probe(each))
        return found


def _gpus() -> tuple[list[str], str | None]:
    try:
        driver = cuda.load()
        count = int(driver.call("cuDeviceGetCount"))
        handles = [int(driver.call("cuDeviceGet", index)) for index in range(count)]
        names = [driver.call("cuDeviceGetName", 256, handle).split(b"\0")[0].decode() for handle in handles]
    except (CapabilityError, DriverError) as error:
        return [], _reason(error)
    return names, None


def _reason(error: KVOffloadError) -> str:
    """Say why there is no GPU, without the advice of `cuda.load` and the bindings: the doctor has its own."""
    own = error.__cause__ if isinstance(error.__cause__, KVOffloadError) else error
    return str(own).partition("; install it")[0].partition(". Ensure ")[0].rstrip(".")


def _device_fields(arguments: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Return the capabilities of the device; only `simulated: None`, and why, if none can be opened."""
    try:
        device = open_backend(arguments, note=False)  # the verdict says it
    except (CapabilityError, DriverError, ImportError) as error:
        return {"simulated": None, "device_problem": str(error)}
    with device, output.progress("trying copy methods"):
        capabilities, pci, profile = device.capabilities, device.pci, profile_for(device)
        with device.current():
            free, total = device.driver.free_and_total_bytes()
        fields = describe_device(device) | {
            "index": device.index,
            "copiers": missing_copiers(device),
            "staging_bytes": STAGING_BYTES,
            "missing": capabilities.missing,
            "profile": profile.source,
            "profile_is_measured": profile.key is not None,
            "codec": {str(each): list(found.values()) for each, found in profile.codec.items()},
        }
    of_a_gpu = {
        "compute_capability": ".".join(map(str, capabilities.compute_capability)),
        "multiprocessors": capabilities.multiprocessors,
        "copy_engines": capabilities.copy_engines,
        "stream_memory_operations": capabilities.stream_memory_operations,
    }
    fields |= dict.fromkeys(of_a_gpu) if device.simulated else of_a_gpu
    if device.simulated:
        return fields
    return fields | {
        "gpu_memory_free_bytes": free,
        "gpu_memory_bytes": total,
        "pci_address": pci.address,
        "link_generation": pci.generation,
        "link_width": pci.link_width,
        "max_link_speed": pci.max_link_speed,
        "max_link_width": pci.max_link_width,
        "numa_node": pci.numa_node,
        "numa_cpus": len(hostinfo.numa_node_cpus(pci.numa_node)) or None,
    }


def _memory() -> dict[str, Any]:
    cgroup = hostinfo.tightest_cgroup()
    return {
        "available_bytes": hostinfo.available_bytes(),
        "total_bytes": hostinfo.total_bytes(),
        "cgroup_limit_bytes": cgroup.limit_bytes if cgroup else None,
        "cgroup_usage_bytes": cgroup.used_bytes if cgroup else None,
        "locked_memory_limit_bytes": hostinfo.locked_memory_limit(),
        "usable_cpus": hostinfo.usable_cpus(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# text -----------------------------------------------------------------------------------------------------------------


def _print(fields: dict[str, Any], output: Output) -> None:
    found = findings.groups(fields)
    output.line(findings.verdict(fields, [each for group in found.values() for each in group]))
    for heading, group in found.items():
        output.line("")
        output.line(heading)
        for each in group:
            output.line(f"  {each.status:<4}  {each.name}: {each.text}", indent=_INDENT)
            if each.remedy:
                output.line(f"{_INDENT}-> {each.remedy}", indent=f"{_INDENT}   ")
    if fields["problem"] is not None:
        output.line("")
        output.line("without a GPU, on the simulated device:")
        for command in ("demo", "replay --workload chat --slots 2048 --metadata-only --policy all"):
            output.line(f"  kvoffload {command}")
