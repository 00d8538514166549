"""`bench vllm`: every method's bytes are compared, vLLM's classes are fakes; the report; no times."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from faketorch import FakeBackend, FakeWorker, fake_classes

from kvoffload.commands import main
from kvoffload.errors import CapabilityError
from kvoffload.terminal.console import WIDTH, Output
from kvoffload_bench import vllm, vllm_classes, vllm_report
from kvoffload_bench.field_compute import Situation
from kvoffload_bench.harness import Lab
from kvoffload_bench.vllm import VllmPlan
from kvoffload_bench.vllm_methods import BACKEND, ENGINE, ENGINE_COPIES, WORKER, Geometry, series_of

SMALL = Geometry(3, 64)
SIMULATED = ("bench", "vllm", "--backend", "simulated")


def plan(**changes: Any) -> VllmPlan:
    whole = VllmPlan([SMALL], [2], ["store", "load", "both"], [Situation.IDLE], None)
    return whole._replace(**changes)


def cells(lab: Lab, plan: VllmPlan, **options: Any) -> list[dict[str, Any]]:
    with fake_classes(lab.device, **options) as classes:
        found: list[dict[str, Any]] = vllm.measure(plan, lab, classes, lambda *_: None)["cells"]
        return found


# transfers ------------------------------------------------------------------------------------------------------------


def test_every_method_moves_the_right_blocks_in_every_direction(lab: Lab) -> None:
    found = cells(lab, plan())
    assert [(each["direction"], each["method"]) for each in found] == [
        (direction, method)
        for direction in ("store", "load", "both")
        for method in (ENGINE, ENGINE_COPIES, WORKER, BACKEND)
    ]
    assert [each["wrong"] for each in found] == [0] * 12
    assert {each["transfers"] for each in found} == {32, 64}
    assert {each["nbytes"] for each in found} == {2 * 3 * 64}
    assert all(sum(each["chosen"].values()) > 0 for each in found if each["method"] in (ENGINE, ENGINE_COPIES))


class SkippingWorker(FakeWorker):
    skip = 1


class SkippingBackend(FakeBackend):
    skip = 2


@pytest.mark.parametrize(
    ("options", "method", "rows"),
    [({"worker": SkippingWorker}, WORKER, 3 * 32), ({"backend": SkippingBackend}, BACKEND, 3 * 2 * 32)],
)
def test_blocks_that_a_method_leaves_out_are_counted(lab: Lab, options: dict[str, Any], method: str, rows: int) -> None:
    rounds = 1 + lab.repeats
    for each in cells(lab, plan(), **options):
        both = 2 if each["direction"] == "both" else 1
        assert each["wrong"] == (rounds * rows * both if each["method"] == method else 0)


def test_a_failed_transfer_of_the_worker_ends_the_run(lab: Lab) -> None:
    class FailingWorker(FakeWorker):
        fails = True

    with pytest.raises(RuntimeError, match="transfers of vLLM's worker failed"):
        cells(lab, plan(), worker=FailingWorker)


@pytest.mark.parametrize(("expandable", "allocator"), [(False, "default"), (True, "expandable-segments")])
def test_a_cell_names_the_allocator_that_its_tensor_is_from(lab: Lab, expandable: bool, allocator: str) -> None:
    found = cells(lab, plan(directions=["load"]), expandable=expandable)
    assert {each["allocator"] for each in found} == {allocator}


@pytest.mark.parametrize(
    ("geometry", "blocks", "transfers"), [((32, 65536), 4, 16), ((160, 8192), 4, 25), ((61, 18432), 256, 1)]
)
def test_a_series_moves_128_mib_or_one_transfer(geometry: tuple[int, int], blocks: int, transfers: int) -> None:
    assert series_of(Geometry(*geometry), blocks) == (blocks, transfers)


# vLLM's classes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.usefixtures("_without_vllm")
def test_without_vllm_the_command_names_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SIMULATED) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "needs vLLM, which is not installed" in error
    assert all(name in error for name in ("vllm==0.33.*", "msgspec", "psutil", "pyzmq", "regex", "requests", "PyTorch"))


def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.34.1")
    with pytest.raises(CapabilityError, match=r"found 0\.34\.1"):
        vllm_classes.version()


def test_what_is_compiled_is_replaced_and_the_log_is_kept_from_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = "vllm._C_stable_libtorch"
    monkeypatch.setitem(sys.modules, kernels, None)  # restored at the end
    del sys.modules[kernels]
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "")  # the same
    del os.environ["VLLM_LOGGING_STREAM"]
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.33.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    seen: list[tuple[str, bool]] = []

    def module(name: str) -> Any:
        seen.append((os.environ["VLLM_LOGGING_STREAM"], kernels in sys.modules))
        return SimpleNamespace(name=name)

    monkeypatch.setattr(importlib, "import_module", module)
    found = vllm_classes.manager_classes()
    assert (found.base.name, found.manager.name) == ("vllm.v1.kv_offload.base", "vllm.v1.kv_offload.cpu.manager")
    assert seen == [("ext://sys.stderr", True)] * 2


def test_the_batch_copy_is_one_call_with_vllms_arguments() -> None:
    calls: list[Any] = []

    class Attributes(ctypes.Structure):
        _fields_ = (("srcAccessOrder", ctypes.c_uint),)

    def function(*arguments: Any) -> int:
        order = Attributes.from_address(arguments[4]).srcAccessOrder
        calls.append((*arguments[:4], order, arguments[6], arguments[8]))
        return 1 if arguments[3] == 3 else 0

    def addresses(address: int, count: int) -> Any:
        return type("Pointers", (), {"data_ptr": lambda _: address, "__len__": lambda _: count})()

    memory = SimpleNamespace(_resolve_batch_memcpy=lambda: (function, 1), _CUmemcpyAttributes=Attributes)
    stream = SimpleNamespace(cuda_stream=77)
    torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda: stream))
    copy = vllm_classes.batch_copy_of(memory, torch)
    copy(addresses(10, 2), addresses(20, 2), addresses(30, 2), is_src_access_order_any=True)
    copy(addresses(10, 2), addresses(20, 2), addresses(30, 2))
    copy(addresses(10, 0), addresses(20, 0), addresses(30, 0))
    assert calls == [(20, 10, 30, 2, 3, 1, 77), (20, 10, 30, 2, 1, 1, 77)]
    with pytest.raises(RuntimeError, match="error 1 at copy 0"):
        copy(addresses(10, 3), addresses(20, 3), addresses(30, 3))


# the scheduler --------------------------------------------------------------------------------------------------------


class FakeManager:
    """vLLM's manager of a cache that has room for everything; with `declines` it stores nothing."""

    def __init__(self, capacity: int, cache_policy: str, declines: bool = False) -> None:
        self.keys: set[bytes] = set()
        self.calls: list[str] = []
        self.capacity, self.policy, self.declines = capacity, cache_policy, declines

    def on_new_request(self, request: Any) -> None:
        self.calls.append(f"new {request.number}")

    def on_request_finished(self, request: Any) -> None:
        self.calls.append(f"end {request.number}")

    def lookup(self, key: bytes, request: Any) -> str:
        assert request.positions[key] == 16
        return "hit" if key in self.keys else "miss"

    def prepare_store(self, keys: Sequence[bytes], request: Any) -> Any:
        assert [request.positions[key] for key in keys] == [16 * n for n in range(1, len(keys) + 1)]
        return None if self.declines else SimpleNamespace(keys_to_store=keys)

    def complete_store(self, keys: Sequence[bytes], request: Any) -> None:  # noqa: ARG002
        self.keys.update(() if self.declines else keys)

    def prepare_load(self, keys: Sequence[bytes], request: Any) -> None:  # noqa: ARG002
        self.calls.append(f"load {len(keys)}")

    def complete_load(self, keys: Sequence[bytes], request: Any) -> None: ...

    def touch(self, keys: Sequence[bytes], request: Any) -> None: ...


class KVOffloadManager(FakeManager):
    """In the place of `kvoffload.vllm`'s, which needs vLLM."""

    def __init__(self, capacity: int, policy: str) -> None:
        super().__init__(capacity, policy)


@pytest.fixture(autouse=True)
def _own_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvoffload.vllm", SimpleNamespace(KVOffloadManager=KVOffloadManager))


class FakeRequest:
    def __init__(self, number: str) -> None:
        self.number, self.positions = number, dict[bytes, int]()

    def set_offload_key_position(self, key: bytes, end: int) -> None:
        self.positions[key] = end


BASE = SimpleNamespace(LookupResult=SimpleNamespace(HIT="hit"), ReqContext=FakeRequest)
MANAGERS = vllm_classes.ManagerClasses(BASE, SimpleNamespace(CPUOffloadingManager=FakeManager))


def test_every_call_of_every_manager_is_timed() -> None:
    callers = vllm_report.managers(MANAGERS, 1024)
    assert list(callers) == ["KVOffloadManager, prefix", "KVOffloadManager, lru", *vllm_report.CACHES]
    records = vllm_report.measure(callers, 1024, 3, lambda *_: None, (1, 4))
    assert [(each["name"], each["keys"]) for each in records] == [(name, n) for n in (1, 4) for name in callers]
    assert [each["vllm"] for each in records] == 2 * [False, False, True, True]
    assert {each["keys"]: each["stored"] for each in records} == {1: 4, 4: 16}
    assert all(set(each["us"]) == set(vllm_report.CALLS) for each in records)
    ratios = vllm_report.scheduler_ratios(records)
    assert [(each["keys"], each["call"], each["over"]) for each in ratios] == [
        (keys, call, name) for keys in (1, 4) for call in vllm_report.CALLS for name in vllm_report.CACHES
    ]


def test_loads_of_keys_that_were_declined_are_not_timed() -> None:
    manager = FakeManager(8, "lru", declines=True)
    callers: dict[str, Any] = {vllm_report.CACHES[0]: vllm_report.ManagerCalls(BASE, manager)}
    (record,) = vllm_report.measure(callers, 8, 2, lambda *_: None, (4,))
    assert record["stored"] == 0
    assert (record["us"]["prepare_load"], record["us"]["lookup"]) == (None, None)
    assert not any(call.startswith("load") for call in manager.calls)
    assert manager.calls[-2:] == ["new 4", "end 4"]


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_classes, "version", lambda: "0.33.0")
    monkeypatch.setattr(vllm_classes, "manager_classes", lambda: MANAGERS)
    monkeypatch.setattr(vllm_report, "CAPACITY", 2048)


@pytest.mark.usefixtures("_with_vllm")
def test_on_the_simulated_device_bytes_are_verified_and_only_the_schedulers_calls_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main((*SIMULATED, "--repeats", "1")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bench vllm: 0 transfers verified, 0 wrong; times need a GPU"
    assert "not run: transfers: vLLM's classes copy on a GPU" in lines
    assert [line for line in lines if len(line) > WIDTH] == []
    assert any("CPUOffloadingManager, arc" in line for line in lines)
    assert "GB/s" not in "".join(lines)


@pytest.mark.usefixtures("_with_vllm")
def test_packages_that_only_managers_need_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise CapabilityError("cannot import cbor2")

    monkeypatch.setattr(vllm_classes, "manager_classes", missing)
    assert main((*SIMULATED, "--geometries", "32x64K")) == 0
    assert "not run: calls of the scheduler: cannot import cbor2" in capsys.readouterr().out


# the report -----------------------------------------------------------------------------------------------------------


def cell(method: str, rate: float | None, slowdown: float | None = None, **place: Any) -> dict[str, Any]:
    record = {"allocator": "default", "situation": "idle", "model": "32x64K", "blocks": 4, "direction": "load"}
    record |= place | {"method": method, "gb_per_s": rate, "call_median_us": 50.0, "wrong": 0}
    record["rounds_compute_ended"] = 0
    if slowdown is None or rate is None:
        return record
    rounds = {"samples_compute_slowdown": [slowdown, None, 1.01 * slowdown, slowdown], "samples_gb_per_s": [rate] * 4}
    return record | {"compute_slowdown": slowdown} | rounds


def test_ratios_are_to_the_faster_of_vllms_classes() -> None:
    cells = [cell(ENGINE, 40.0), cell(ENGINE_COPIES, 30.0), cell(WORKER, 20.0), cell(BACKEND, 10.0)]
    cells += [cell(ENGINE, 30.0, blocks=32), cell(WORKER, 20.0, blocks=32), cell(BACKEND, 60.0, blocks=32)]
    cells += [cell(ENGINE, None, blocks=256), cell(WORKER, 20.0, blocks=256), cell(ENGINE, 10.0, direction="both")]
    found = vllm_report.compare(cells)
    assert [(each["vllm"]["method"], each[ENGINE]["ratio"]) for each in found] == [(WORKER, 2.0), (BACKEND, 0.5)]
    assert found[0][ENGINE_COPIES]["ratio"] == 1.5
    summary = vllm_report.summarize(found)
    mine = summary[ENGINE]
    assert (mine["cells"], mine["at_least_1"], mine["median"]) == (2, 1, 1.25)
    assert (mine["lowest"]["blocks"], mine["highest"]["blocks"]) == (32, 4)
    assert mine["busy_cells"] == 0
    assert summary[ENGINE_COPIES]["cells"] == 1


def test_what_computation_loses_is_compared_for_the_same_bytes_by_round() -> None:
    busy = {"situation": "large-products"}
    cells = [cell(ENGINE, 40.0, 1.10, **busy), cell(WORKER, 20.0, 1.20, **busy)]
    cells += [cell(ENGINE, 20.0, 1.50, blocks=32, **busy), cell(WORKER, 20.0, 1.25, blocks=32, **busy)]
    cells += [cell(ENGINE, 20.0, 1.50, blocks=256, **busy), cell(WORKER, 20.0, 1.505, blocks=256, **busy)]
    found = vllm_report.compare(cells)
    assert [each[ENGINE]["loses"] for each in found] == ["less", "more", "alike"]
    mib_seconds = (1 << 20) / 40e9
    assert found[0][ENGINE]["lost_us_per_mib"] == pytest.approx((1 - 1 / 1.1) * mib_seconds * 1e6)
    summary = vllm_report.summarize(found)[ENGINE]
    assert summary["loses"] == {"less": 1, "more": 1, "alike": 1}
    assert (summary["most_lost"]["blocks"], summary["busy_cells"]) == (32, 3)
    assert summary["lost_us_per_mib"]["ours"] == pytest.approx(sum(each[ENGINE]["lost_us_per_mib"] for each in found))


def test_few_rounds_say_nothing_of_what_computation_loses() -> None:
    cells = [cell(ENGINE, 40.0, 1.10, situation="large-products"), cell(WORKER, 20.0, 1.20, situation="large-products")]
    for each in cells:
        each["samples_compute_slowdown"] = [None, *each["samples_compute_slowdown"][1:3]]
    (found,) = vllm_report.compare(cells)
    assert "loses" not in found[ENGINE]
    assert vllm_report.summarize([found])[ENGINE]["busy_cells"] == 0


def test_the_report_names_the_worst_cell_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    busy = {"situation": "small-products", "allocator": "expandable-segments", "direction": "both", "model": "160x8K"}
    found = [cell(ENGINE, 140.0), cell(ENGINE_COPIES, 130.0), cell(WORKER, 120.0), cell(BACKEND, 110.0)]
    found += [cell(ENGINE, 9.0, 4.25, blocks=256, **busy), cell(BACKEND, 10.0, 12.25, blocks=256, **busy)]
    comparisons = vllm_report.compare(found)
    us: dict[str, float | None] = dict.fromkeys(vllm_report.CALLS, 12345.6)
    records = [
        {"name": "KVOffloadManager, prefix", "vllm": False, "keys": 512, "stored": 0, "us": us},
        {"name": vllm_report.CACHES[0], "vllm": True, "keys": 512, "stored": 0, "us": us | {"touch": None}},
    ]
    fields = {
        "cells": found, "comparisons": comparisons, "summary": vllm_report.summarize(comparisons), "vllm": "0.33.0",
        "batch_copy": vllm_classes.REBUILT, "triton": True, "scheduler": records, "scheduler_capacity": 65536,
        "scheduler_ratios": vllm_report.scheduler_ratios(records),
    }  # fmt: skip
    vllm_report.show(fields, Output(False))
    text = capsys.readouterr().out
    assert text.startswith("bench vllm: kvoffload is 1.03 times as fast")
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    whole = " ".join(text.split())
    assert "1 of 2 cells >= 1.0x, median 1.03, lowest 0.90 (256x160x8K, both, small-products" in whole
    assert "most 89.1 us (256x160x8K, both, small-products" in whole
    assert "with vLLM's 96.3 us (256x160x8K" in whole


def test_nothing_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {"cells": [], "comparisons": [], "summary": {}, "scheduler": []}
    vllm_report.show(fields, Output(False))
    assert capsys.readouterr().out == "bench vllm: transfers were not measured\n"


@pytest.mark.gpu
def test_on_a_gpu_every_byte_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("vllm", "torch", "msgspec"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    options = ("--geometries", "160x8K", "61x18K", "--blocks", "4", "--repeats", "1", "--parts", "transfers")
    assert main(("bench", "vllm", *options, "--json")) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["wrong_rows"] == 0
    assert {each["method"] for each in fields["cells"]} == {ENGINE, ENGINE_COPIES, WORKER, BACKEND}
