"""`engine.plan`: says what `store` and `load` would do, and does nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from helpers import STAGING, choose_kernels_too
from pages import page, row

import kvoffload
from kvoffload import ClosedError, Direction, KVLayout, LayoutError, OffloadEngine, PlanReport
from kvoffload.simulator import SimulatedDriver
from kvoffload.tuning import default_profile


@pytest.fixture
def engine(device: kvoffload.Device) -> OffloadEngine:
    """Two groups: 8 planes that fold, in slots of two blocks; and 3 that do not."""
    folding = device.allocate_planes(8, block_bytes=4096, num_blocks=32)
    apart = [device.allocate_planes(1, block_bytes=512, num_blocks=16)[0] for _ in range(3)]
    return OffloadEngine(KVLayout([folding, apart], blocks_per_slot=2), device=device, num_slots=16)


@pytest.mark.parametrize("direction", Direction)
def test_it_says_what_a_job_then_does(engine: OffloadEngine, direction: Direction) -> None:
    report = engine.plan(direction, [4, 5, 9, 20], [7, 2])
    store = direction is Direction.STORE
    job = engine.store([4, 5, 9, 20], [7, 2]) if store else engine.load([7, 2], [4, 5, 9, 20])
    job.wait()
    assert (report.direction, report.copier, report.reason, report.nbytes) == (
        direction,
        job.copier,
        job.reason,
        job.nbytes,
    )
    assert report.blocks == 4


@pytest.mark.parametrize(
    ("blocks", "slots", "group", "first_sub_block", "operations", "rows"),
    [
        ([4, 9], [0], 0, 0, 2, 16),  # an operation a block, with a row for each plane
        ([4, 5], [0], 0, 0, 1, 8),  # adjacent in one slot: wider rows
        ([4, 5], [0, 1], 0, 1, 2, 16),  # not in two
        ([4, 9], [0], 1, 0, 6, 6),  # what does not fold
    ],
)
def test_operations_and_rows(
    engine: OffloadEngine,
    blocks: list[int],
    slots: list[int],
    group: int,
    first_sub_block: int,
    operations: int,
    rows: int,
) -> None:
    report = engine.plan("store", blocks, slots, group=group, first_sub_block=first_sub_block)
    assert (report.operations, report.rows) == (operations, rows)


def test_nothing_is_submitted_or_reserved(device: kvoffload.Device, engine: OffloadEngine) -> None:
    before = engine.statistics()
    for _ in range(3):
        engine.plan("store", [1, 2], [0])
        engine.plan("load", [1, 2], [0], copier="loop")
    assert engine.statistics() == before
    assert device.simulator.pending_operations() == 0
    assert engine.store([1, 2], [0]).wait().job_id == 1


def test_alternatives_are_the_other_methods_with_their_times(engine: OffloadEngine) -> None:
    report = engine.plan("load", range(8), range(4))
    assert report.copier == "strided"
    names = [copier for copier, _ in report.alternatives]
    assert names == ["batch"], "kernels are interpreted here, so none would be chosen"
    assert 0 < report.seconds < report.alternatives[0].seconds < inf


def test_a_copier_asked_for_by_name(engine: OffloadEngine) -> None:
    report = engine.plan("store", [1, 2], [0], copier="loop")
    assert (report.copier, report.reason) == ("loop", "asked for by name")
    assert [copier for copier, _ in report.alternatives] == ["strided", "batch"]


def test_the_order_of_preference_is_the_engines(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where kernels may be chosen."""
    planes = device.allocate_planes(64, block_bytes=2048, num_blocks=128)
    choose_kernels_too(monkeypatch)
    with OffloadEngine(
        KVLayout([planes]), device=device, num_slots=128, staging_bytes=STAGING, prefer="latency"
    ) as engine:
        report = engine.plan("store", range(128), range(128))
    assert report.copier == "pack"
    assert [copier for copier, _ in report.alternatives] == ["strided", "batch"]
    assert report.seconds <= min(seconds for _, seconds in report.alternatives)


def test_on_a_simulated_device_the_times_are_of_a_real_one_and_it_says_which(engine: OffloadEngine) -> None:
    report = engine.plan("store", [1, 2], [0])
    assert report.simulated
    assert report.profile == default_profile(None).source == engine.profile.source
    shown = page(report)
    assert "simulated: times are those of another device" in shown.texts
    assert row(shown, "expected from") == report.profile
    assert report.profile in repr(report)


def test_it_shows_what_it_holds(engine: OffloadEngine) -> None:
    report = engine.plan("store", [4, 9], [0])
    shown = page(report)
    assert row(shown, "transfer") == "store of 2 blocks, 64 KiB"
    assert row(shown, "operations") == "2 if strided, 16 if flat"
    assert row(shown, "why") == report.reason
    methods = shown.texts[shown.texts.index("GB/s") + 1 :]
    assert methods[:4] == ["strided", f"{report.seconds * 1e6:.1f} us", f"{65536 / report.seconds / 1e9:.1f}", "chosen"]
    assert [text for text in methods if text in ("batch", "loop", "chosen")] == ["chosen", "batch"]


def test_a_method_that_was_not_measured(engine: OffloadEngine) -> None:
    report = replace(engine.plan("store", [4, 9], [0]), seconds=inf, simulated=False, profile="<b>mine</b>")
    shown = page(report)
    assert row(shown, "strided") == "not measured"
    assert row(shown, "not measured") == "-"
    assert row(shown, "expected from") == "<b>mine</b>"
    assert "simulated" not in shown.text


@pytest.mark.parametrize("direction", Direction)
def test_nothing_to_copy(engine: OffloadEngine, direction: Direction) -> None:
    report = engine.plan(direction, [], [])
    assert (report.copier, report.reason, report.nbytes, report.alternatives) == (None, "nothing to copy", 0, ())
    assert "nothing to copy" in page(report).texts
    assert "0 blocks" in repr(report)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("store", [32], [0]), {}, LayoutError, r"blocks\[0\] is 32"),
        (("store", [1, 2, 3], [0]), {}, LayoutError, "need 2 slots"),
        (("store", [1, 2, 3, 4], [0, 0]), {}, LayoutError, r"slots\[0\] repeats 0"),
        (("load", [1, 1], [0]), {}, LayoutError, r"blocks\[0\] repeats 1"),
        (("load", [1], [0]), {"group": 2}, LayoutError, "group must be"),
        (("load", [1], [0]), {"first_sub_block": 2}, LayoutError, "first_sub_block must be"),
        (("store", [1], [0]), {"copier": "swift"}, ValueError, "copier must be one of"),
        (("sideways", [1], [0]), {}, ValueError, "sideways"),
    ],
)
def test_wrong_arguments_are_refused_as_by_a_transfer(
    engine: OffloadEngine, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine.plan(*arguments, **options)


def test_closed_engines_and_devices_plan_nothing() -> None:
    with kvoffload.open_device(backend=SimulatedDriver()) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=8)])
        first, second = (OffloadEngine(layout, device=device, num_slots=1, staging_bytes=0) for _ in range(2))
        report = first.plan("store", [1], [0])
        first.close()
        with pytest.raises(ClosedError, match="engine is closed"):
            first.plan("store", [1], [0])
    with pytest.raises(ClosedError, match="is closed"):
        second.plan("store", [1], [0])
    assert isinstance(report, PlanReport)
    page(report)
