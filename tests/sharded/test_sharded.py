"""ShardedEngine: what is special to several devices; the rest is in `tests/engine/test_contract.py`."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import pytest
from sharding import Machine, machine

import kvoffload
from kvoffload import NO_WAIT, KVLayout, LayoutError, Plane, ShardedEngine, ShardedLayout, TransferError


@pytest.fixture
def two() -> Iterator[Machine]:
    with machine() as made:
        yield made


def planes(count: int, *, block_bytes: int = 64, num_blocks: int = 4, address: int = 4096) -> list[Plane]:
    return [
        Plane(address + index * num_blocks * block_bytes, block_bytes=block_bytes, num_blocks=num_blocks)
        for index in range(count)
    ]


# transfers ------------------------------------------------------------------------------------------------------------


def test_a_job_that_another_call_has_seen_end_is_not_reported_after_wait(two: Machine) -> None:
    """The devices are asked one by one by others, too: by `open_device`, by an allocation."""
    job = two.engine.store([1], [1])
    two.settle()
    for device in two.devices:
        device.advance_engines()
    job.wait(10)
    assert two.engine.poll() == []


def test_devices_may_have_other_planes_and_block_bytes() -> None:
    with machine((1, 4, 2), groups=2, blocks_per_slot=3) as made:
        engine, mirrors = made.engine, made.mirrors()
        engine.store([0, 5, 2, 9], [4, 1], group=1, first_sub_block=2).wait(10)
        engine.load([4, 1], [7, 8, 1], group=1, first_sub_block=1).wait(10)
        mirrors.expect("store", [0, 5, 2, 9], [4, 1], group=1, first_sub_block=2)
        mirrors.expect("load", [7, 8, 1], [4, 1], group=1, first_sub_block=1)
        mirrors.check()


def test_a_device_can_have_two_shards() -> None:
    with kvoffload.open_device(backend="simulated") as device:
        layouts = [KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)]) for _ in range(2)]
        with ShardedEngine(layouts, devices=[device, device], num_slots=4, staging_bytes=0) as engine:
            engine.store([1, 2], [0, 1]).wait(10)
            assert engine.load([0, 1], [2, 3]).wait(10).nbytes == 2 * 2 * 2 * 64


def test_a_plan_of_each_device(two: Machine) -> None:
    reports = two.engine.plan("store", [1, 2], [0, 1], copier="strided")
    assert [report.nbytes for report in reports] == [2 * 3 * 64, 2 * 2 * 80]
    assert two.engine.statistics().in_flight == 0


# refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (7, r"after must be a list with one value for each of the 2 devices, .* got 7"),
        ([NO_WAIT], r"after must be a list with one value for each of the 2 devices"),
        ([NO_WAIT, "stream"], r"after must be a stream handle"),
    ],
)
def test_what_is_refused_happens_on_no_device(two: Machine, after: Any, text: str) -> None:
    mirrors = two.mirrors()
    with pytest.raises(TypeError, match=text):
        two.engine.store([1], [1], after=after)
    two.settle()
    mirrors.check()
    assert two.engine.submitted == 0
    assert two.engine.poll() == []
    two.whole()


def test_the_device_that_refuses_is_named(two: Machine) -> None:
    with pytest.raises(LayoutError) as caught:
        two.engine.load([1], [1], parts=3)  # the planes of the second device are 2
    assert caught.value.__notes__ == ["on shard 1 (device 1)"]
    with pytest.raises(TypeError) as wrong:
        two.engine.store([1], [1], after=[NO_WAIT, "x"])
    assert wrong.value.__notes__ == ["on shard 1 (device 1)"]


def test_a_captured_stream_of_the_last_device_is_refused_before_any_stream_waits(two: Machine) -> None:
    streams, held, marker = two.one_each(), two.stream(0), two.marker(0)
    gate = two.hold(0, held)
    job = two.engine.store([1], [1], after=[held, NO_WAIT])
    simulator: Any = two.simulator
    with two.devices[1].current():
        simulator.cuStreamBeginCapture(streams[1], 2)
    with pytest.raises(TransferError, match=r"stream\[1\].*captur"):
        job.order_before(streams)
    with two.devices[1].current():
        simulator.cuStreamEndCapture(streams[1])
    two.fill(0, marker, 9, streams[0])
    two.settle()
    assert not job.done
    assert (marker.to_numpy() == 9).all(), "the stream of the first device waits for nothing"
    gate.open()
    job.wait(10)
    two.whole()


@pytest.mark.parametrize("streams", [5, [1], [1, 1, 1], [1, None]])
def test_order_before_takes_one_stream_for_each_device(two: Machine, streams: Any) -> None:
    job = two.engine.store([1], [1])
    with pytest.raises(TypeError, match=r"^stream(\[1\])? must be"):
        job.order_before(streams)
    with pytest.raises(ValueError, match="part"):
        job.order_before([1, 1], part=1)
    job.wait(10)


DESCRIBED: Any = {"dtype": "uint8", "tokens_per_block": 4, "block_axes": ("tokens", "heads")}
LAYOUT = KVLayout([planes(2)], **DESCRIBED)
DIFFERENT = {
    "num_groups": KVLayout([planes(2, address=1 << 20)] * 2, **DESCRIBED),
    "num_blocks": KVLayout([planes(2, num_blocks=5, address=1 << 20)], **DESCRIBED),
    "blocks_per_slot": KVLayout([planes(2, address=1 << 20)], blocks_per_slot=2, **DESCRIBED),
    "tokens_per_block": KVLayout([planes(2, address=1 << 20)], **{**DESCRIBED, "tokens_per_block": 8}),
    "dtype": KVLayout([planes(2, address=1 << 20)], **{**DESCRIBED, "dtype": "float16"}),
    "block_axes": KVLayout([planes(2, address=1 << 20)], **{**DESCRIBED, "block_axes": ("heads", "tokens")}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_layouts_must_agree(what: str) -> None:
    with pytest.raises(LayoutError, match=rf"layouts\[1\] has .*{what}"):
        ShardedLayout([LAYOUT, DIFFERENT[what]])


def test_layouts_must_not_share_memory() -> None:
    with pytest.raises(LayoutError, match=r"layouts\[0\] and layouts\[1\] share bytes"):
        ShardedLayout([LAYOUT, KVLayout([planes(1, address=4096 + 2 * 64)], **DESCRIBED)])
    side_by_side = [
        KVLayout([[Plane(4096 + 64 * index, block_bytes=64, block_stride=128, num_blocks=4)]]) for index in range(2)
    ]
    assert ShardedLayout(side_by_side).num_groups == 1


@pytest.mark.parametrize("layouts", [[], None, [None], LAYOUT])
def test_layouts_are_a_list_of_layouts(layouts: Any) -> None:
    with pytest.raises((TypeError, LayoutError), match="layouts"):
        ShardedLayout(layouts)


def test_the_fingerprint_is_of_all_shards_in_order() -> None:
    wide = KVLayout([planes(2, block_bytes=128, address=1 << 20)], **DESCRIBED)
    prints = [ShardedLayout(each).fingerprint for each in ([LAYOUT], [LAYOUT, wide], [wide, LAYOUT])]
    assert len({*prints, LAYOUT.fingerprint, wide.fingerprint}) == 5
    assert all(len(each) == 16 for each in prints)
    message = (2).to_bytes(8, "little") + LAYOUT.fingerprint + wide.fingerprint  # as docs/keys.md says
    assert prints[1] == blake2b(message, digest_size=16, person=b"kvoffload shards").digest()
    keys = kvoffload.chain_keys(range(8), layout=ShardedLayout([LAYOUT, wide]), salt="")
    assert len(keys) == 2
    assert keys != kvoffload.chain_keys(range(8), layout=LAYOUT, salt="")


def test_the_repr_of_a_layout_says_the_order_of_each_device() -> None:
    stacked = [Plane((1 << 20) + 64 * index, block_bytes=64, block_stride=128, num_blocks=4) for index in range(2)]
    described = repr(ShardedLayout([LAYOUT, KVLayout([stacked], **DESCRIBED)]))
    assert "[KVLayout(2 planes x 64 B x 4 blocks (plane-major), " in described
    assert ", KVLayout(2 planes x 64 B x 4 blocks (block-major), " in described


@pytest.mark.parametrize("devices", [None, [None], [1, 2]])
def test_devices_are_devices(devices: Any) -> None:
    with pytest.raises(TypeError, match="devices must be a list of devices"):
        ShardedEngine([LAYOUT], devices=devices)


def test_as_many_devices_as_layouts(device: kvoffload.Device) -> None:
    with pytest.raises(ValueError, match="2, and 1 layouts"):
        ShardedEngine([LAYOUT], devices=[device, device])


def test_an_engine_that_cannot_be_made_leaves_nothing(two: Machine) -> None:
    """The planes of the second are not memory of its device; the first is made by then."""
    before = two.simulator.leaks()
    layouts = [KVLayout([two.devices[0].allocate_planes(1, block_bytes=64, num_blocks=4)]) for _ in range(2)]
    with pytest.raises(LayoutError, match="memory of device 0"):
        ShardedEngine(layouts, devices=two.devices, num_slots=4)
    del layouts
    two.devices[0].reclaim()
    assert two.simulator.leaks() == before


# the end --------------------------------------------------------------------------------------------------------------


def test_a_dropped_engine_finishes_its_transfers() -> None:
    made = Machine()
    streams, mirrors = made.one_each(), made.mirrors()
    gate = made.hold(0, streams[0])
    made.engine.store([1], [1], after=streams)
    pools = made.engine.slots
    made.engine = None
    gate.open()
    for device in made.devices:
        device.close(10)
    for mirror, pool in zip(mirrors, pools, strict=True):
        mirror.expect("store", [1], [1])
        assert (pool == mirror.pool).all()


def test_an_engine_shows_the_engine_of_each_device(two: Machine) -> None:
    assert "shard" not in repr(two.engine)
    assert repr(two.engine).startswith("ShardedEngine([OffloadEngine(")
