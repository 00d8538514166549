"""Cards in a notebook: well-formed, escaped, with the right numbers, in every state of the object."""

from __future__ import annotations

import re

import pytest
from pages import Page, page, row
from programs import run_program
from tiering import until

import kvoffload
from kvoffload.layout.fold import fold
from kvoffload.observability import notebook as html
from kvoffload.testing import SimulatedDriver

BLOCK_BYTES = 4096


@pytest.fixture
def layout(device: kvoffload.Device) -> kvoffload.KVLayout:
    planes = device.allocate_planes(16, block_bytes=BLOCK_BYTES, num_blocks=32)
    return kvoffload.KVLayout([planes], dtype="float16", tokens_per_block=16)


@pytest.fixture
def engine(device: kvoffload.Device, layout: kvoffload.KVLayout) -> kvoffload.OffloadEngine:
    return kvoffload.OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0)


# layouts --------------------------------------------------------------------------------------------------------------


def test_a_layout_that_folds(layout: kvoffload.KVLayout) -> None:
    shown = page(layout)
    assert row(shown, "planes") == "16 planes x 4 KiB x 32 blocks, 64 KiB a block"
    assert row(shown, "folding") == ("16 planes fold into 1 operation a block: 16 rows of 4 KiB")
    assert row(shown, "slot") == "blocks_per_slot=1, slot_bytes=65,536 (64 KiB)"
    assert shown.widths == [100 / 16] * 16
    assert (row(shown, "dtype"), row(shown, "tokens per block")) == ("float16", "16")


def test_a_slot_is_drawn_to_scale_with_its_padding() -> None:
    planes = [kvoffload.Plane(0x100000 * n, block_bytes=nbytes, num_blocks=4) for n, nbytes in ((1, 1000), (2, 2072))]
    shown = page(kvoffload.KVLayout([planes], blocks_per_slot=2))
    assert shown.widths == pytest.approx([100 * part / 8192 for part in (2000, 4144, 2048)], rel=1e-3)
    assert "2 planes, 2 blocks each, 6 KiB" in shown.text
    assert "padding, 2 KiB" in shown.text


def test_a_block_major_slot_is_drawn_block_by_block() -> None:
    planes = [kvoffload.Plane(0x100000 + n * 1024, block_bytes=1024, num_blocks=4, block_stride=2048) for n in range(2)]
    shown = page(kvoffload.KVLayout([planes], blocks_per_slot=3, block_axes=("tokens", "dim")))
    assert shown.widths == pytest.approx([25] * 4)
    assert "3 blocks of 2 planes each, 6 KiB" in shown.text
    assert row(shown, "folding") == "2 planes fold into 1 operation a block: 1 row of 2 KiB"
    assert row(shown, "axes of a block") == "tokens, dim"


def test_a_layout_of_several_groups() -> None:
    """Planes in descending order cannot fold: slots hold them in ascending order."""
    falling = [kvoffload.Plane(0x9000000 - n * 0x100000, block_bytes=512, num_blocks=8) for n in range(3)]
    rising = [kvoffload.Plane(0x100000 * (n + 1), block_bytes=4096, num_blocks=1) for n in range(2)]
    shown = page(kvoffload.KVLayout([falling, rising]))
    assert row(shown, "group 0: folding") == ("3 planes do not fold (3 operations a block): 3 rows of 512 B")
    assert row(shown, "group 1: planes") == "2 planes x 4 KiB x 1 block, 8 KiB a block"
    assert sum(shown.widths) == pytest.approx(200, rel=1e-3)  # a bar for each group


def test_many_planes_are_drawn_as_one() -> None:
    planes = [kvoffload.Plane(0x10000 * (n + 1), block_bytes=4096, num_blocks=1) for n in range(400)]
    assert page(kvoffload.KVLayout([planes])).widths == [100.0]


def test_planes_of_many_sizes_are_summed_up() -> None:
    planes = [kvoffload.Plane(0x10000 * (n + 1), block_bytes=512 * (n + 1), num_blocks=1) for n in range(5)]
    layout = kvoffload.KVLayout([planes])
    assert row(page(layout), "planes").startswith("5 planes x 512 B/1 KiB/1.50 KiB/... x 1 block")
    assert row(page(layout), "folding").endswith("1 row of 512 B, 1 row of 1 KiB, 1 row of 1.50 KiB, ...")
    assert fold(layout)[0].folds == 5


def test_showing_a_layout_loads_no_cuda() -> None:
    program = """
    import sys, kvoffload
    plane = kvoffload.Plane(4096, block_bytes=512, num_blocks=8)
    assert "fold" in kvoffload.KVLayout([[plane]])._repr_html_()
    print([name for name in sys.modules if name.split(".")[0] in ("cuda", "triton", "matplotlib")])
    """
    assert run_program(program).strip() == "[]"


def test_a_type_is_escaped() -> None:
    plane = kvoffload.Plane(4096, block_bytes=512, num_blocks=8)
    layout = kvoffload.KVLayout([[plane]], dtype="<f2&\"'>.float16")
    assert row(page(layout), "dtype") == "<f2&\"'>.float16"
    assert "<f2" not in layout._repr_html_()


# engines --------------------------------------------------------------------------------------------------------------


def test_an_engine_counts_its_jobs_and_says_that_it_is_simulated(
    device: kvoffload.Device, engine: kvoffload.OffloadEngine
) -> None:
    engine.store([1, 2], [0, 1]).wait()
    engine.store([3], [2]).wait()
    engine.load([2], [4]).wait()
    device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
    with pytest.raises(kvoffload.TransferError):
        engine.store([5], [3]).wait()
    shown = page(engine)
    totals = shown.texts[shown.texts.index("GB/s on the GPU clock") + 1 :]
    assert totals == ["store", "2", "1", "192 KiB", "simulated", "load", "1", "0", "64 KiB", "simulated"]
    assert "simulated: no GPU, times mean nothing" in shown.texts
    assert row(shown, "pool") == "8 slots x 64 KiB, 512 KiB pinned"
    assert "16 planes fold into 1 operation a block" in row(shown, "folding")
    assert row(shown, "jobs").startswith("0 in flight, 0 of them held")
    statistics = engine.statistics()
    assert row(shown, "in use") == f"0 of {statistics.streams} streams, 0 of {statistics.events} events"


def test_an_engine_with_work_in_flight(device: kvoffload.Device, engine: kvoffload.OffloadEngine) -> None:
    device.simulator.scheduler.drift_probability = 0.0
    engine.store([1, 2], [0, 1])
    engine.store([3], [2])
    before = device.simulator.faults.total_calls
    shown = page(engine)
    assert row(shown, "jobs").startswith("2 in flight")
    assert re.match(r"[1-9]\d* of \d+ streams, [1-9]", row(shown, "in use"))
    assert device.simulator.faults.total_calls == before, "showing asks the driver nothing"
    engine.drain()


def test_a_measured_bandwidth(
    device: kvoffload.Device, engine: kvoffload.OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store([1, 2], [0, 1]).wait()
    totals = engine.statistics().store
    monkeypatch.setattr(device, "simulated", False)
    shown = page(engine)
    assert f"{totals.nbytes / totals.seconds / 1e9:.1f}" in shown.texts
    assert shown.texts[-1] == "-", "no load, no bandwidth"
    assert "simulated" not in shown.texts


def test_copiers_that_cannot_run_have_a_reason(layout: kvoffload.KVLayout, engine: kvoffload.OffloadEngine) -> None:
    shown = page(engine)
    assert row(shown, "copiers") == "strided, batch, loop"
    assert "not pack: staging_bytes=0 forbids kernels" in shown.texts
    with kvoffload.OffloadEngine(layout, device=engine.device, num_slots=1) as with_kernels:
        assert row(page(with_kernels), "copiers").startswith("strided, pack, batch, loop (kernels are interp")


def test_an_engine_tells_which_planes_the_driver_keeps_apart(device: kvoffload.Device) -> None:
    planes = [device.allocate_planes(1, block_bytes=BLOCK_BYTES, num_blocks=4)[0] for _ in range(3)]
    with kvoffload.OffloadEngine(kvoffload.KVLayout([planes]), device=device, num_slots=1, staging_bytes=0) as engine:
        assert row(page(engine), "folding").startswith("3 planes do not fold (3 operations a block)")


def test_closed_engines_and_devices_can_be_shown(device: kvoffload.Device, engine: kvoffload.OffloadEngine) -> None:
    engine.store([1], [1]).wait()
    cache = kvoffload.BlockCache(engine)
    engine.close()
    assert "closed" in page(engine).texts
    assert row(page(engine), "pool") == "8 slots x 64 KiB, 512 KiB not pinned any more"
    device.close()
    assert "closed" in page(engine).texts
    assert "8 free of 8" in page(cache).texts
    page(engine.layout)


def test_of_a_pool_that_has_not_grown_to_its_end_only_what_is_pinned_is_called_pinned() -> None:
    driver = SimulatedDriver(pinnable_bytes=4 * 4096)
    with kvoffload.open_device(backend=driver) as device:
        layout = kvoffload.KVLayout([device.allocate_blocks(8, planes=1, block_bytes=4096)])
        pool = kvoffload.Growing(8 * 4096, piece_bytes=2 * 4096)
        with kvoffload.OffloadEngine(layout, device=device, pool_bytes=pool, staging_bytes=0) as engine:
            until(lambda: not engine.growing)
            assert row(page(engine), "pool") == "8 slots x 4 KiB, 16 KiB pinned"


def test_a_forked_child_can_show_what_its_parent_made() -> None:
    program = """
    import os, sys, threading, warnings
    import kvoffload
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while threads run
    with kvoffload.open_device(backend="simulated") as device:
        layout = kvoffload.KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=8)])
        with kvoffload.OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0) as engine:
            cache = kvoffload.BlockCache(engine)
            with engine.lock:  # as another thread of the parent might at that moment
                child = os.fork()
            if child == 0:
                shown = [each._repr_html_() for each in (layout, engine, cache)]
                os._exit(sum("belongs to the parent" in each for each in shown))
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_program(program).strip() == "2"


# caches ---------------------------------------------------------------------------------------------------------------

KEYS = [b"key %d" % number for number in range(8)]


def test_a_cache_shows_where_its_slots_are(engine: kvoffload.OffloadEngine) -> None:
    cache = kvoffload.BlockCache(engine)
    cache.store(KEYS[:4], blocks=[0, 1, 2, 3]).wait()
    assert cache.lookup(KEYS) == 4
    cache.load(KEYS[:2], blocks=[8, 9]).wait()
    with cache.acquire(KEYS[:2]), cache.reserve(KEYS[4:5]):
        shown = page(cache)
        assert [text for text in shown.texts if re.match(r"\d+ (resident|leased|free)", text)] == [
            "2 resident", "3 leased, loading or being stored", "3 free of 8"
        ]  # fmt: skip
        assert shown.widths == [25.0, 37.5, 37.5]
    assert row(shown, "looked up") == "8 blocks, 4 hits (50.0%), 4 missed"
    assert row(shown, "moved") == "4 stored, 2 loaded"
    assert row(shown, "keys and policy").startswith("5 of 8 keys, 1 pending, 1 leases; Prefix(")
    assert "simulated: no GPU, times mean nothing" in shown.texts
    assert "tenant" not in shown.text


def test_what_a_cache_evicted_and_declined(engine: kvoffload.OffloadEngine) -> None:
    cache = kvoffload.BlockCache(engine, policy="lru")
    for start in (0, 4, 8):
        cache.store([b"%d" % number for number in range(start, start + 4)], blocks=range(4)).wait()
    cache.remove([b"11"])
    cache.reserve([b"12"]).abort()
    shown = page(cache)
    assert row(shown, "taken out") == "4 evicted, 1 removed"
    assert row(shown, "not stored") == "0 declined, 1 failed"
    assert "LRU(7 keys)" in row(shown, "keys and policy")


def test_a_cache_keeps_its_slots_in_the_bar_when_leased_keys_were_removed(engine: kvoffload.OffloadEngine) -> None:
    cache = kvoffload.BlockCache(engine)
    cache.store(KEYS[:3], blocks=[0, 1, 2]).wait()
    with cache.acquire(KEYS[:3]):
        cache.remove(KEYS[:3])
        assert sum(page(cache).widths) == pytest.approx(100)


def test_tenants_are_shown_and_escaped(engine: kvoffload.OffloadEngine) -> None:
    hostile = "<script>alert('&\"')</script>"
    cache = kvoffload.BlockCache(
        engine, tenants={hostile: kvoffload.Tenant(max_blocks=4, priority=-1), "b": kvoffload.Tenant()}
    )
    shown = page(cache)  # which knows no script
    assert shown.texts[-9:] == ["tenant", "max_blocks", "priority", hostile, "4", "-1", "b", "-", "0"]
    assert "<script" not in cache._repr_html_()


def test_showing_a_cache_asks_the_driver_nothing(device: kvoffload.Device, engine: kvoffload.OffloadEngine) -> None:
    cache = kvoffload.BlockCache(engine)
    job = cache.store(KEYS[:2], blocks=[0, 1])
    before = device.simulator.faults.total_calls
    page(cache)
    assert device.simulator.faults.total_calls == before
    job.wait()


# HTML -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (4096, "4 KiB"), (1536, "1.50 KiB"), (1 << 30, "1 GiB"), (5 << 50, "5,120 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert html.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5e-6, "1.5 us"), (0.0123, "12.30 ms"), (float("inf"), "not measured")]
)
def test_durations(seconds: float, text: str) -> None:
    assert html.duration(seconds) == text


def test_content_is_escaped_once() -> None:
    inner = html.element("td", "<&>")
    assert html.element("tr", inner, "<") == "<tr><td>&lt;&amp;&gt;</td>&lt;</tr>"
    assert html.element("p", style='"><script>') == '<p style="&quot;&gt;&lt;script&gt;"></p>'


def test_an_empty_bar_has_no_width() -> None:
    assert Page(html.bar([html.Band("nothing", 0, "red")])).widths == []
