"""The findings of `kvoffload doctor` as text: status, figures and remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from kvoffload.internal import cachefiles
from kvoffload.terminal.console import mib

Fields = Mapping[str, Any]
_CUDA_PACKAGES = ("cuda-bindings", "cuda-core")
_INSTALL_BINDINGS = "pip install 'cuda-bindings>=12.9'"
_SMALL_MEMORY_BYTES = 4 << 30
_SMALL_DISK_BYTES = 4 << 30
_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs")


class Finding(NamedTuple):
    """A line of the doctor. `remedy` is "" if all is well; else `bad` says how bad it is."""

    name: str
    text: str
    remedy: str = ""
    bad: Literal["warn", "fail"] = "warn"

    @property
    def status(self) -> Literal["ok", "warn", "fail"]:
        return self.bad if self.remedy else "ok"

    @property
    def rank(self) -> int:
        return ("fail", "warn", "ok").index(self.status)


def groups(fields: Fields) -> dict[str, list[Finding]]:
    """Return the findings by heading; a heading without any is left out."""
    every = {
        "GPU and link": of_gpu, "copy methods": of_copy_methods, "packages": of_packages, "limits": of_limits,
        "folders": of_folders, "stores": of_stores,
    }  # fmt: skip
    return {heading: found for heading, of in every.items() if (found := list(of(fields)))}


def verdict(fields: Fields, findings: Iterable[Finding]) -> str:
    """Return the first line: can transfers run here, and how many findings fail or warn?"""
    statuses = [each.status for each in findings]
    counts = f"{statuses.count('fail')} fail, {statuses.count('warn')} warn"
    if fields["simulated"] is False:
        return f"doctor: ready: {fields['device']}, {fields['link']} ({counts})"
    if fields["simulated"]:
        reason = "no GPU to use" if fields["problem"] is not None else "no GPU was asked for"
        return f"doctor: {reason}; the simulated device works ({counts})"
    return f"doctor: no device to use ({counts})"


def of_gpu(fields: Fields) -> Iterator[Finding]:
    gpus, problem, again = fields["gpus"], fields["problem"], "run `kvoffload doctor` again"
    if problem is not None:
        remedy = f"install the NVIDIA driver, check that `nvidia-smi` works, {again}"
        if fields["packages"].get("cuda-bindings", "") is None:
            remedy = f"install cuda-bindings, see packages, and {again}"
        elif problem.startswith("cuda-bindings"):  # too old
            remedy = f"{_INSTALL_BINDINGS}, and {again}"
        yield Finding("GPUs", f"none: {problem}", remedy, "fail")
    elif gpus is None:
        yield Finding("GPUs", "not looked for: --backend simulated")
    else:
        names = ", ".join(f"{index}: {name}" for index, name in enumerate(gpus))
        yield Finding("GPUs", names or "none", "" if gpus else "check that `nvidia-smi` works", "fail")
    if fields["simulated"] is None and gpus:
        remedy = "see who uses the GPU with `nvidia-smi`, or choose another one with --device"
        yield Finding("device", f"cannot be opened: {fields['device_problem']}", remedy, "fail")
    if fields["simulated"]:
        yield Finding("device", "simulated: the CPU copies real bytes, without a driver; times mean nothing")
    if fields["simulated"] is not False:
        return
    yield Finding("device", f"{fields['index']}: {fields['device']}")
    yield Finding("driver", f"CUDA {fields['driver']}, cuda-bindings {fields['bindings']}")
    memory = f"{mib(fields['gpu_memory_free_bytes'])} free of {mib(fields['gpu_memory_bytes'])}"
    yield Finding("GPU memory", memory)
    sms = f"{fields['compute_capability']}, {fields['multiprocessors']} SMs, {fields['copy_engines']} copy engines"
    yield Finding("compute capability", sms)
    width, most = fields["link_width"], fields["max_link_width"]
    generation = f", generation {fields['link_generation']}" if fields["link_generation"] else ""
    limit = f"{fields['max_link_speed'] or 'speed unknown'} x{most or '?'}"
    link = f"{fields['link']}{generation}, at most {limit}, {fields['pci_address']}; an idle GPU may show less"
    narrow = bool(width) and width < (most or 0)
    remedy = f"the link has {width} of {most} lanes: check the slot and the riser" if narrow else ""
    yield Finding("link", link, remedy)
    node = fields["numa_node"]
    where = "Linux does not say" if node is None else f"{node} ({fields['numa_cpus'] or 0} usable CPUs)"
    away = node is not None and not fields["numa_cpus"]
    remedy = "let the process run on the CPUs of the GPU's NUMA node (numactl --cpunodebind)" if away else ""
    yield Finding("NUMA node", where, remedy)


def of_copy_methods(fields: Fields) -> Iterator[Finding]:
    where = " on the simulated device" if fields["simulated"] else ""
    for name, reason in fields.get("copiers", {}).items():  # without a device there are none
        if reason is None:
            memory = f", through at most {mib(fields['staging_bytes'])} of GPU memory for each direction"
            yield Finding(name, f"can run{where}{memory if name == 'pack' else ''}")
        else:
            yield Finding(name, f"cannot run: {reason}", "the others do its copies, more slowly")
    if fields["simulated"] is not False:
        return
    for name, reason in fields["missing"].items():
        yield Finding(f"driver feature, {name}", f"not used: {reason}")
    measured = fields["profile_is_measured"]
    remedy = "" if measured else "engines choose copy methods by another machine's figures: run `kvoffload tune`"
    yield Finding("profile", fields["profile"], remedy)
    speeds = ", ".join(f"{each} x{min(found):.2f}" for each, found in fields["codec"].items() if found)
    text = f"{speeds} of pack without it; leave it out if a percent of the blocks do not fit it, see `unfit`"
    yield Finding("codec bf16-12", text if speeds else "not in the profile: `kvoffload tune` measures it")
    operations = "can be called" if fields["stream_memory_operations"] else "not used: cannot be called"
    yield Finding("driver feature, stream memory operations", operations)


def of_packages(fields: Fields) -> Iterator[Finding]:
    yield Finding("Python", f"{fields['python']} on {fields['platform']}")
    for name, version in fields["packages"].items():
        if version is not None:
            yield Finding(name, version)
        elif name in _CUDA_PACKAGES:
            yield Finding(name, "not installed", _INSTALL_BINDINGS if name == "cuda-bindings" else "", "fail")
        else:
            yield Finding(name, "not installed", f"pip install {name}")
    extras = [f"{name} {version}" for name, version in fields["extras"].items() if version is not None]
    lacking = [name for name, version in fields["extras"].items() if version is None]
    yield Finding("optional, installed", ", ".join(extras) or "none")
    if lacking:
        yield Finding("optional, not installed", ", ".join(lacking))


def of_limits(fields: Fields) -> Iterator[Finding]:
    memory = fields["memory"]

    def size(name: str, otherwise: str) -> str:
        return otherwise if memory[name] is None else mib(memory[name])

    available = memory["available_bytes"]
    small = available is not None and available < _SMALL_MEMORY_BYTES
    text = f"{size('available_bytes', 'unknown')} available of {size('total_bytes', 'unknown')}"
    remedy = "pinned memory is part of this: choose a small pool_bytes" if small else ""
    yield Finding("host memory", text, remedy)
    limit = memory["cgroup_limit_bytes"]
    used = "no limit" if limit is None else f"{mib(memory['cgroup_usage_bytes'])} used of {mib(limit)}"
    yield Finding("memory cgroup", used)
    locked = size("locked_memory_limit_bytes", "unlimited")
    yield Finding("RLIMIT_MEMLOCK", f"{locked}; does not limit the memory that CUDA pins")
    yield Finding("usable CPUs", str(memory["usable_cpus"]))
    problem = fields["cache_folder_problem"]
    if problem:
        remedy = f"set {cachefiles.FOLDER_VARIABLE} to a folder that you can write, for kernels and profiles"
        yield Finding("cache folder", f"{fields['cache_folder']} cannot be written: {problem}", remedy)
    else:
        yield Finding("cache folder", fields["cache_folder"])


def of_folders(fields: Fields) -> Iterator[Finding]:
    for each in fields["folders"]:
        if each["problem"] is not None:
            remedies = {os.strerror(errno.ENOENT): f"make it: mkdir -p {each['folder']}"}
            remedies[os.strerror(errno.ENOTDIR)] = "give the folder of the file"
            remedies[os.strerror(errno.EROFS)] = "mount it for writing, or give another folder"
            other = "give this user's own folder, no symbolic link, that other users cannot write"
            remedy = remedies.get(each["problem"], other)
            yield Finding(each["folder"], f"cannot be used: {each['problem']}", remedy, "fail")
            continue
        name, kind = each["folder"], each["file_system"]
        text = f"{kind or 'file system unknown'}, mode {each['mode']}, {mib(each['free_bytes'])} free"
        if each["direct_io"] is not None:
            text += f"; {'direct' if each['direct_io'] else 'buffered'} I/O, {mib(each['probe_bytes'])} of 1 MiB each: "
            text += f"write {each['write_gb_per_s']} GB/s, read {each['read_gb_per_s']} GB/s"
        yield Finding(name, text)
        if kind in _IN_MEMORY:
            yield Finding(name, f"{kind} is host memory, not a disk", "give a folder on a disk")
        elif each["direct_io"] is False:
            remedy = "records go through the page cache, which takes CPU time and memory: give a folder on ext4 or XFS"
            yield Finding(name, "no direct I/O", remedy)
        if kind in _NETWORK:
            remedy = "give a folder on a local disk: locks and syncs are only as good as the server's"
            yield Finding(name, f"{kind} is a network file system", remedy)
        if each["free_bytes"] < _SMALL_DISK_BYTES:
            yield Finding(name, "little space is free", "free some, or choose a small disk_bytes")


def of_stores(fields: Fields) -> Iterator[Finding]:
    for each in fields["stores"]:
        name, says = each["store"], each["says"]
        if each["problem"] is not None:
            yield Finding(name, f"cannot be used: {each['problem']}", each["remedy"], "fail")
            continue
        text = f"{mib(each['probe_bytes'])}, 1 MiB each: write {each['write_gb_per_s']} GB/s, read "
        text += f"{each['read_gb_per_s']} GB/s; a question takes {each['ask_seconds'] * 1e3:.2f} ms"
        yield Finding(name, "; ".join((text, *(f"{what} {value}" for what, value in says.items()))))
        if says.get("max_bytes") == 0:
            yield Finding(name, "its memory has no limit", "set maxmemory, or it grows until it is killed")
        elif says.get("when_full") == "noeviction":
            remedy = "set maxmemory-policy to allkeys-lru: once it is full, it takes no more records"
            yield Finding(name, "evicts nothing", remedy)
        elif "volatile" in says.get("when_full", ""):
            remedy = "give the tier an expiry, or set maxmemory-policy to allkeys-lru"
            yield Finding(name, "evicts only records that expire", remedy)
        if "conditional_puts" in says:
            remedy = "if several machines write, use a store with conditional puts: with this one each sends all bytes"
            yield Finding(name, "overwrites objects that it should only create", remedy)
