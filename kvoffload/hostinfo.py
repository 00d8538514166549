"""What Linux says about this machine's memory and about where a GPU is plugged in, from /proc and /sys."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SYS = Path("/sys")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def available_bytes() -> int | None:
    """Memory that can be taken without swapping: MemAvailable, or what the cgroup still allows if that is less."""
    candidates = [value for value in (_meminfo("MemAvailable"), _cgroup_headroom_bytes()) if value is not None]
    return min(candidates, default=None)


def total_bytes() -> int | None:
    """MemTotal; virtual machines that grow report less than they can give."""
    return _meminfo("MemTotal")


def _meminfo(field: str) -> int | None:
    for line in (_read(_PROC / "meminfo") or "").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_headroom_bytes() -> int | None:
    limits = cgroup_limit_and_usage()
    return None if limits is None else max(0, limits[0] - limits[1])


def cgroup_limit_and_usage() -> tuple[int, int] | None:
    """Memory limit and use of the cgroup (version 2) of this process, bytes; None where there is no limit."""
    line = next((line for line in (_read(_PROC / "self/cgroup") or "").splitlines() if line.startswith("0::")), None)
    if line is None:
        return None
    folder = _SYS / "fs/cgroup" / line[3:].lstrip("/")
    limit, usage = _read(folder / "memory.max"), _read(folder / "memory.current")
    if limit is None or usage is None or limit == "max":
        return None
    return int(limit), int(usage)


def locked_memory_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes, None for unlimited. It does not bound CUDA's pinning; see `memory.PinnedMemory`."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


@dataclass(frozen=True, slots=True)
class PciDevice:
    """What sysfs says of a GPU's slot; None where it says nothing (virtual machines often).

    Attributes:
        link_speed, max_link_speed: for example "32.0 GT/s PCIe" (generation 5). An idle GPU may show a lower current
        one. link_width, max_link_width: lanes.
        numa_node: the node whose memory is nearest.
    """

    address: str
    link_speed: str | None
    link_width: int | None
    max_link_speed: str | None
    max_link_width: int | None
    numa_node: int | None

    @property
    def generation(self) -> int | None:
        """PCIe generation of the current link, from its speed."""
        speeds = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
        return speeds.get((self.link_speed or "").split(" ")[0])


def pci_device(address: str) -> PciDevice:
    """Look up a PCI address such as "0000:00:06.0" in sysfs."""
    folder = _SYS / "bus/pci/devices" / address.lower()

    def number(name: str) -> int | None:
        text = _read(folder / name)
        return int(text) if text is not None and text.lstrip("-").isdigit() and int(text) >= 0 else None

    return PciDevice(
        address=address,
        link_speed=_read(folder / "current_link_speed"),
        link_width=number("current_link_width"),
        max_link_speed=_read(folder / "max_link_speed"),
        max_link_width=number("max_link_width"),
        numa_node=number("numa_node"),
    )


def numa_node_cpus(node: int | None) -> frozenset[int]:
    """CPUs of a NUMA node that this process may run on; empty where Linux does not tell."""
    text = None if node is None else _read(_SYS / f"devices/system/node/node{node}/cpulist")
    cpus: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus & os.sched_getaffinity(0))


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))
