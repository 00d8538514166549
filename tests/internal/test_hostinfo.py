"""What Linux says, read from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.internal import hostinfo

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hostinfo, "PROC", tmp_path)
    monkeypatch.setattr(hostinfo, "SYS", tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 102400 kB\nMemAvailable: 51200 kB\n")
    return tmp_path


def group(folder: Path, limit: str, used: int, inactive_file: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{key} {inactive_file}\n")


def test_without_a_cgroup_it_is_the_machine(tree: Path) -> None:
    (tree / "self/cgroup").write_text("0::/\n")
    assert hostinfo.tightest_cgroup() is None
    assert hostinfo.available_bytes() == 50 * MIB


def test_page_cache_is_not_in_the_way(tree: Path) -> None:
    (tree / "self/cgroup").write_text("0::/pod\n")
    group(tree / "fs/cgroup/pod", str(40 * MIB), 39 * MIB, inactive_file=30 * MIB)
    assert hostinfo.available_bytes() == 31 * MIB


def test_a_parent_limits_its_children(tree: Path) -> None:
    (tree / "self/cgroup").write_text("0::/job/step/task\n")
    group(tree / "fs/cgroup/job/step/task", "max", 7 * MIB)
    group(tree / "fs/cgroup/job", str(8 * MIB), 7 * MIB)
    tightest = hostinfo.tightest_cgroup()
    assert tightest is not None
    assert (tightest.path, tightest.headroom_bytes) == (str(tree / "fs/cgroup/job"), MIB)
    assert hostinfo.available_bytes() == MIB


def test_version_1_counts_too_and_its_huge_number_is_no_limit(tree: Path) -> None:
    (tree / "self/cgroup").write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    group(tree / "fs/cgroup/memory/docker/abc", str(9223372036854771712), 5 * MIB, version=1)
    assert hostinfo.tightest_cgroup() is None
    group(tree / "fs/cgroup/memory/docker", str(10 * MIB), 6 * MIB, inactive_file=MIB, version=1)
    assert hostinfo.available_bytes() == 5 * MIB


def test_use_beyond_the_limit_leaves_nothing(tree: Path) -> None:
    (tree / "self/cgroup").write_text("0::/pod\n")
    group(tree / "fs/cgroup/pod", str(MIB), 2 * MIB)
    assert hostinfo.available_bytes() == 0


def test_a_pci_device_without_numbers_says_none(tree: Path) -> None:
    folder = tree / "bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("-1\n")
    (folder / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    (folder / "current_link_width").write_text("16\n")
    device = hostinfo.pci_device("0000:01:00.0")
    assert (device.generation, device.link_width, device.numa_node, device.max_link_speed) == (5, 16, None, None)
    assert hostinfo.numa_node_cpus(device.numa_node) == frozenset()
