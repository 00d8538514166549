"""`kvoffload doctor`: what is installed, which copiers can be used and why others cannot, and what to do about it."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

from kvoffload.device.device import Device
from kvoffload.driver import cuda
from kvoffload.errors import CapabilityError, DriverError
from kvoffload.internal import cachefiles, hostinfo
from kvoffload.terminal.console import Output, mib, open_backend
from kvoffload.terminal.machine import describe_device, missing_copiers
from kvoffload.terminal.options import add_common_options
from kvoffload.tuning import profile_for

_PACKAGES = ("kvoffload", "numpy", "cuda-python", "cuda-bindings", "cuda-core", "platformdirs", "triton")
_EXTRAS = ("rich", "matplotlib", "cupy-cuda12x", "cupy-cuda13x", "jax")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is installed and what can be used",
        description="Show the GPU, driver, bindings, link, NUMA node and memory limits, which copiers can be used and "
        "why others cannot, and installed versions. Creates a CUDA context on the device asked for and on no other.",
    )
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 0, or 2 if `--backend cuda` was given and no GPU can be used."""
    output = Output(arguments.json)
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
    fields |= _device_fields(arguments, output)
    fields["advice"] = _advice(fields)
    output.result(fields)
    _print(fields, output)
    return 2 if arguments.backend == "cuda" and problem is not None else 0


def _gpus() -> tuple[list[str], str | None]:
    """Names of the GPUs, found without creating a context, or why there are none."""
    try:
        driver = cuda.load()
        count = int(driver.call("cuDeviceGetCount"))
        handles = [int(driver.call("cuDeviceGet", index)) for index in range(count)]
        names = [driver.call("cuDeviceGetName", 256, handle).split(b"\0")[0].decode() for handle in handles]
    except (CapabilityError, DriverError) as error:
        return [], str(error)
    return names, None


def _device_fields(arguments: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Capabilities of the opened device; only `simulated: None` if none can be opened."""
    try:
        device = open_backend(arguments, output)
    except (CapabilityError, DriverError, ImportError):
        return {"simulated": None}
    with device:
        return describe_device(device) | _capabilities(device)


def _capabilities(device: Device) -> dict[str, Any]:
    capabilities, pci = device.capabilities, device.pci
    with device.current():
        free, total = device.driver.free_and_total_bytes()
    fields: dict[str, Any] = {
        "index": device.index,
        "compute_capability": ".".join(map(str, capabilities.compute_capability)),
        "multiprocessors": capabilities.multiprocessors,
        "copy_engines": capabilities.copy_engines,
        "copiers": missing_copiers(device),
        "missing": capabilities.missing,
        "stream_memory_operations": capabilities.stream_memory_operations,
    }
    profile = profile_for(device)
    fields |= {"profile": profile.source, "profile_is_measured": profile.key is not None}
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


def _advice(fields: dict[str, Any]) -> list[str]:
    """Advice, the most pressing first."""
    advice = []
    if fields["packages"]["cuda-bindings"] is None:
        advice.append("install the CUDA bindings: pip install 'cuda-python>=12.9'")
    if fields["problem"] is not None:
        advice.append(
            "to use a GPU: install the NVIDIA driver, see that `nvidia-smi` works, run `kvoffload doctor` again"
        )
        advice.append(
            "without a GPU: `kvoffload demo` and `kvoffload replay TRACE --model NAME --scale 0.01` run on the "
            "simulated device"
        )
    if fields["simulated"] is False:
        if (width := fields["link_width"]) and width < (fields["max_link_width"] or 0):
            advice.append(f"the link has {width} of {fields['max_link_width']} lanes: check the slot and the riser")
        advice += [
            f"the {name} copier cannot run: {reason}; the others carry its copies more slowly"
            for name, reason in fields["copiers"].items()
            if reason
        ]
        if not fields["profile_is_measured"]:
            advice.append("copiers are chosen by figures of another machine: `kvoffload tune` measures this one")
    if fields["cache_folder_problem"]:
        advice.append(
            "compiled kernels and profiles are not kept, and are compiled or measured again each time: set "
            f"{cachefiles.FOLDER_VARIABLE} to a folder that can be written"
        )
    return advice


# tables ---------------------------------------------------------------------------------------------------------------


def _print(fields: dict[str, Any], output: Output) -> None:
    simulated = fields["simulated"]
    output.banner(bool(simulated))
    lines = [("GPUs", _gpu_list(fields["gpus"]))]
    if simulated is not None:
        lines += _device_lines(fields)
    problem = fields["cache_folder_problem"]
    lines.append(("cache folder", fields["cache_folder"] + (f", cannot be written: {problem}" if problem else "")))
    lines += _memory_lines(fields["memory"])
    lines.append(("Python", f"{fields['python']} on {fields['platform']}"))
    lines += [(name, version or "not installed") for name, version in fields["packages"].items()]
    lines += [(f"{name} (optional)", version or "not installed") for name, version in fields["extras"].items()]
    output.table("kvoffload doctor" + (", SIMULATED device" if simulated else ""), ("what", "found"), lines)
    if fields["problem"] is not None:
        output.line(f"no GPU to use: {fields['problem']}")
    for line in fields["advice"]:
        output.line(f"- {line}")


def _gpu_list(gpus: list[str] | None) -> str:
    if gpus is None:
        return "not looked for"
    return ", ".join(f"{index}: {name}" for index, name in enumerate(gpus)) or "none"


def _device_lines(fields: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("device", f"{fields['index']}: {fields['device']}" + (" (simulated)" if fields["simulated"] else "")),
        ("driver / bindings", f"CUDA {fields['driver']} / {fields['bindings']}"),
    ]
    if not fields["simulated"]:
        lines += _gpu_lines(fields)
    for name, reason in fields["copiers"].items():
        lines.append((f"{name} copier", "can run" if reason is None else f"cannot run: {reason}"))
    lines += [(name, reason) for name, reason in fields["missing"].items()]
    lines.append(("profile", fields["profile"]))
    lines.append(("stream memory operations", "yes" if fields["stream_memory_operations"] else "no"))
    return lines


def _gpu_lines(fields: dict[str, Any]) -> list[tuple[str, str]]:
    generation = fields["link_generation"]
    link = fields["link"] + (f" (generation {generation})" if generation else "")
    most = f"{fields['max_link_speed'] or 'speed unknown'} x{fields['max_link_width'] or '?'}"
    node = fields["numa_node"]
    return [
        ("GPU memory", f"{mib(fields['gpu_memory_free_bytes'])} free of {mib(fields['gpu_memory_bytes'])}"),
        ("compute capability", f"{fields['compute_capability']}, {fields['multiprocessors']} SMs"),
        ("copy engines", str(fields["copy_engines"])),
        ("link now", f"{link}, at {fields['pci_address']}; an idle GPU may show less than it has"),
        ("link at most", most),
        ("NUMA node", "Linux does not say" if node is None else f"{node} ({fields['numa_cpus'] or 0} usable CPUs)"),
    ]


def _memory_lines(memory: dict[str, Any]) -> list[tuple[str, str]]:
    def size(name: str, otherwise: str) -> str:
        return otherwise if memory[name] is None else mib(memory[name])

    cgroup = "no limit"
    if memory["cgroup_limit_bytes"] is not None:
        cgroup = f"{mib(memory['cgroup_usage_bytes'])} used of {mib(memory['cgroup_limit_bytes'])}"
    return [
        ("host memory", f"{size('available_bytes', 'unknown')} available of {size('total_bytes', 'unknown')}"),
        ("memory cgroup", cgroup),
        ("RLIMIT_MEMLOCK", size("locked_memory_limit_bytes", "unlimited") + "; it does not bound what CUDA pins"),
        ("usable CPUs", str(memory["usable_cpus"])),
    ]
