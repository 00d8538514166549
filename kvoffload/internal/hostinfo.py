"""This machine's memory and the PCIe slot of a GPU, as Linux reports them in /proc and /sys."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC, SYS = Path("/proc"), Path("/sys")  # tests have trees of their own


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def available_bytes() -> int | None:
    """Return the memory that can be taken without swapping: MemAvailable, or the cgroup's headroom if that is less."""
    cgroup = tightest_cgroup()
    candidates = (_meminfo("MemAvailable"), None if cgroup is None else cgroup.headroom_bytes)
    return min((value for value in candidates if value is not None), default=None)


def total_bytes() -> int | None:
    """Return MemTotal; virtual machines that grow report less than they can give."""
    return _meminfo("MemTotal")


def _meminfo(field: str) -> int | None:
    for line in (_read(PROC / "meminfo") or "").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


class Cgroup(NamedTuple):
    """A memory limit that applies to this process, bytes.

    Attributes:
        used_bytes: without the page cache, which the kernel drops when memory is needed.
    """

    path: str
    limit_bytes: int
    used_bytes: int

    @property
    def headroom_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


# names of the limit, of the usage, and in memory.stat of the page cache
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NO_LIMIT = 1 << 60  # version 1 writes a huge number for none


def tightest_cgroup() -> Cgroup | None:
    """Return the memory cgroup (version 1 or 2) of this process, or its parent, with the least headroom; None: no
    limit.
    """
    limits = []
    for line in (_read(PROC / "self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            root, (limited, used, droppable) = SYS / "fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            root, (limited, used, droppable) = SYS / "fs/cgroup/memory", _VERSION_1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for length in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:length])
            limit, usage = _read(folder / limited), _read(folder / used)
            if limit is None or usage is None or not limit.isdigit() or int(limit) >= _NO_LIMIT:
                continue
            lines = (_read(folder / "memory.stat") or "").splitlines()
            statistics = dict(line.split(" ", 1) for line in lines if " " in line)
            needed = int(usage) - int(statistics.get(droppable, "0"))
            limits.append(Cgroup(str(folder), int(limit), max(0, needed)))
    return min(limits, key=lambda group: group.headroom_bytes, default=None)


def locked_memory_limit() -> int | None:
    """Return RLIMIT_MEMLOCK in bytes, None for unlimited. It does not bound CUDA's pinning; see `PinnedMemory`."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A GPU's slot as sysfs describes it; None where it has no entry (often in virtual machines).

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
        return generation_of(self.link_speed)


def generation_of(speed: str | None) -> int | None:
    """Return the PCIe generation of a link speed such as "32.0 GT/s PCIe"."""
    speeds = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
    return speeds.get((speed or "").split(" ")[0])


def pci_device(address: str) -> PciDevice:
    """Look up a PCI address such as "0000:00:06.0" in sysfs."""
    folder = SYS / "bus/pci/devices" / address.lower()

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
    """Return the CPUs of a NUMA node that this process may run on; empty if Linux does not list them."""
    text = None if node is None else _read(SYS / f"devices/system/node/node{node}/cpulist")
    cpus: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus & os.sched_getaffinity(0))


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))
