"""The choice between ways: what it minimises, what it never does, what it says, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from counting import steps
from helpers import STAGING, rig, simulated
from hypothesis import given
from hypothesis import strategies as st

import kvoffload
from kvoffload.copiers import selection
from kvoffload.copiers.observed import Way
from kvoffload.copiers.selection import PREFERENCES, TOLERANCE, Expected, Question, Selection, check_prefer, two_ways
from kvoffload.device.streams import NO_WAIT
from kvoffload.planning.transfer_plan import Direction
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload.tuning import COPIERS, HostCosts, Profile, ProfileKey, Shape, Situation, default_profile
from kvoffload.tuning.costs import Costs, Curve, FlatCosts, StridedCosts

H200 = default_profile(ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3"))
ALL = frozenset(COPIERS)
COPY_ENGINE = ALL - {"pack"}


def choose(where: Shape, available: Iterable[str], *more: Any, **options: Any) -> Selection:
    return selection.choose(Question(where, frozenset(available), *more, **options))


def rank(where: Shape, available: Iterable[str], *more: Any, **options: Any) -> list[Expected]:
    return selection.rank(Question(where, frozenset(available), *more, **options))


KIB = 1 << 10
KEEPS_THE_CALLER = {"batch": HostCosts(2e-3, 0.0)}


def shape(
    block_bytes: int, blocks: int, planes: int = 64, *, folds: bool = True, direction: Direction = Direction.LOAD
) -> Shape:
    plane_blocks = blocks * planes
    operations = blocks if folds else plane_blocks
    return Shape(direction, blocks, plane_blocks, operations, plane_blocks, plane_blocks * block_bytes)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Folded or not; of layouts with several blocks in a slot also with rows of more than one block."""
    blocks, planes = draw(st.integers(1, 9000)), draw(st.integers(1, 160))
    nbytes = draw(st.sampled_from([64, 2048, 4096, 18 * KIB, 65536, 1 << 20]))
    merged = draw(st.integers(1, 8))
    runs = -(-blocks // merged)
    rows = runs * planes
    operations = draw(st.sampled_from([runs, rows]))
    return Shape(draw(st.sampled_from(Direction)), blocks, blocks * planes, operations, rows, blocks * planes * nbytes)


def profile_of(**seconds: float) -> Profile:
    """Copiers that take these seconds, whatever the transfer: strided, batch, loop."""

    def always(value: float) -> FlatCosts:
        return FlatCosts((Curve(1, (1, 1 << 40), (value, value)), Curve(1 << 40, (1, 1 << 40), (value, value))))

    strided = StridedCosts(seconds.pop("strided"), (1,), (0.0,), (0.0,)) if "strided" in seconds else None
    costs = Costs(55e9, strided, {name: always(value) for name, value in seconds.items()})
    return Profile(None, "made for a test", {Direction.STORE: costs, Direction.LOAD: costs})


# what is chosen -------------------------------------------------------------------------------------------------------


@given(shapes(), st.sets(st.sampled_from(sorted(ALL)), min_size=1))
def test_the_least_weight_wins_unless_the_caller_counts(where: Shape, available: set[str]) -> None:
    available |= {"strided", "loop"}
    by_time, by_peace = (rank(where, available, H200, prefer) for prefer in ("latency", "overlap"))
    assert {each.copier for each in by_time} == {each.copier for each in by_peace} <= available
    packs = "pack" in available and where.rows > where.blocks
    assert packs == ("pack" in {each.copier for each in by_time})
    if packs and where.nbytes >= 32 << 20:
        assert by_time[0].copier == by_peace[0].copier == "pack"
        return
    assert by_time[0].weight == min(each.weight for each in by_time)
    if by_peace[0].copier == "pack":
        assert by_peace[0].weight == min(each.weight for each in by_peace)
        return
    copies = [each for each in by_peace if each.copier != "pack"]
    soonest = min(each.host + each.seconds for each in copies)
    as_soon = [each for each in copies if each.host + each.seconds <= TOLERANCE * soonest]
    assert by_peace[0] in as_soon
    assert by_peace[0].host == min(each.host for each in as_soon)


@given(shapes())
def test_a_choice_for_a_class_is_hardly_worse_than_one_for_the_transfer(where: Shape) -> None:
    copier = choose(where, COPY_ENGINE, H200, "latency").copier
    least = min(each.weight for each in rank(where, COPY_ENGINE, H200, "latency"))
    assert H200.seconds(copier, where) + H200.seconds_around(copier, where) <= 1.06 * TOLERANCE * least


def test_transfers_that_are_alike_are_carried_alike() -> None:
    copiers = {choose(shape(4096, blocks), ALL, H200, "latency").copier for blocks in range(1000, 1008)}
    assert len(copiers) == 1


def test_known_cases_on_an_h200() -> None:
    def copier(where: Shape, prefer: str = "overlap", available: frozenset[str] = ALL) -> str:
        return choose(where, available, H200, prefer).copier

    few = Shape(
        Direction.STORE, 4, 128, 4, 128, 8 << 20
    )  # of 32 planes; batch takes 1% less time, and its call 70 us more
    assert copier(few) == "strided"
    assert copier(shape(256 * KIB, 64), available=COPY_ENGINE) == "strided"
    assert copier(shape(32 * KIB, 64), available=COPY_ENGINE) == "strided"
    assert copier(shape(4 * KIB, 64, folds=False), available=COPY_ENGINE) == "batch"


@pytest.mark.parametrize("direction", Direction)
def test_pack_carries_large_transfers_and_small_rows(direction: Direction) -> None:
    """On an H200 it carried 4 / 16 / 64 MiB beside large products with 49 / 51 / 51 GB/s, strided copies with 38."""

    def copier(where: Shape, prefer: str = "overlap") -> str:
        return choose(where, ALL, H200, prefer).copier

    for rows in (4 * KIB, 8 * KIB, 32 * KIB):
        for folds in (True, False):
            for prefer in PREFERENCES:
                assert (
                    copier(shape(rows, (64 << 20) // (64 * rows), folds=folds, direction=direction), prefer) == "pack"
                )
    assert copier(shape(32 * KIB, 2, direction=direction)) == "strided"
    assert copier(shape(32 * KIB, 8, direction=direction)) == ("pack" if direction is Direction.STORE else "strided")
    assert copier(shape(32 * KIB, 8, direction=direction), "latency") == "pack"
    assert copier(shape(4 * KIB, 32, folds=False, direction=direction)) == "pack", "contiguous copies have 9 GB/s"
    block_major = Shape(direction, 32, 32 * 64, 32, 32, 64 << 20)
    assert copier(block_major) == "batch"


def test_what_pack_waits_beside_large_products_is_part_of_its_price() -> None:
    """A transfer of 1 MiB: contiguous copies of the blocks take 100 us."""
    where = shape(4096, 4, folds=False)
    for seconds, best in ((1.4e-4, "batch"), (5e-4, "pack")):
        rows = FlatCosts((Curve(4096, (256,), (seconds,)), Curve(256 * KIB, (4,), (1e-4,))))
        costs = Costs(55e9, None, {"batch": rows})
        profile = Profile(None, "made for a test", {Direction.STORE: costs, Direction.LOAD: costs})
        assert choose(where, ALL, profile, "overlap").copier == best
        assert choose(where, ALL, profile, "latency").copier == "pack"


def test_the_fastest_wins_unless_it_keeps_the_caller() -> None:
    profile = profile_of(strided=1.09e-4, batch=1.0e-4)
    assert choose(shape(4096, 8), COPY_ENGINE, profile, "overlap").copier == "batch"
    profile = replace(profile, host=KEEPS_THE_CALLER)
    assert choose(shape(4096, 8), COPY_ENGINE, profile, "overlap").copier == "strided"
    assert choose(shape(4096, 8, folds=False), COPY_ENGINE, profile, "overlap").copier == "batch", "nothing else can"
    profile = replace(profile_of(strided=12e-3, batch=1.0e-4), host=KEEPS_THE_CALLER)
    large = shape(4096, 1024)  # 256 MiB, for which a caller may be kept four times as long
    assert choose(large, COPY_ENGINE, profile, "overlap").copier == "batch"
    assert choose(shape(4096, 8), COPY_ENGINE, profile, "overlap").copier == "batch", "12 ms are longer than 2.1"


@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("direction", Direction)
def test_overlap_counts_the_call_among_copies_that_need_no_multiprocessor(direction: Direction, blocks: int) -> None:
    where = shape(64 * KIB, blocks, 32, direction=direction)
    found = {each.copier: each for each in rank(where, COPY_ENGINE, H200, "overlap", opposite=True)}
    assert found["strided"].host < found["batch"].host
    assert choose(where, COPY_ENGINE, H200, "overlap", opposite=True).copier == "strided"


def test_latency_counts_from_the_call() -> None:
    profile = profile_of(strided=1.09e-4, batch=1.0e-4)
    where = shape(4096, 8)  # 512 rows in 8 operations
    assert choose(where, COPY_ENGINE, profile, "latency").copier == "batch"
    fixed = replace(profile, around={"batch": HostCosts(2e-5, 0.0), "strided": HostCosts(1e-5, 0.0)})
    assert choose(where, COPY_ENGINE, fixed, "latency").copier == "strided"
    copies = replace(profile, around={"batch": HostCosts(0.0, 1e-7), "strided": HostCosts(0.0, 1e-7)})
    assert choose(where, COPY_ENGINE, copies, "latency").copier == "strided", "512 copies take 51 us more"
    assert rank(where, COPY_ENGINE, copies, "latency")[0].seconds == pytest.approx(1.09e-4), "on the GPU's clock"


def field_of(store: dict[Situation, dict[str, float]]) -> Profile:
    """A profile whose times are those of each situation."""
    costs = {situation: profile_of(**seconds).costs for situation, seconds in store.items()}
    profile = profile_of(**store[Situation.IDLE])
    return replace(profile, situations={each: found for each, found in costs.items() if each is not Situation.IDLE})


def test_overlap_takes_what_falls_behind_least_where_it_falls_behind_most() -> None:
    times = {
        Situation.IDLE: {"strided": 1.0e-4, "batch": 2.9e-4},
        Situation.LARGE_PRODUCTS: {"strided": 9.0e-4, "batch": 3.0e-4},
        Situation.SMALL_PRODUCTS: {"strided": 1.0e-4, "batch": 2.9e-4},
    }
    where = shape(4096, 8)
    assert choose(where, COPY_ENGINE, field_of(times), "latency").copier == "strided"
    choice = choose(where, COPY_ENGINE, field_of(times), "overlap")
    assert choice.copier == "batch"
    assert "expected concurrent with compute" in choice.reason
    times[Situation.LARGE_PRODUCTS] = {"strided": 1.2e-4, "batch": 3.0e-4}
    assert choose(where, COPY_ENGINE, field_of(times), "overlap").copier == "strided"


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_what_the_other_direction_slows_is_not_taken_with_it(prefer: str) -> None:
    times = {situation: {"strided": 1.0e-4, "batch": 2.2e-4} for situation in Situation}
    times[Situation.BOTH_DIRECTIONS] = {"strided": 3.0e-4, "batch": 2.3e-4}
    where, profile = shape(4096, 8), field_of(times)
    assert choose(where, COPY_ENGINE, profile, prefer).copier == "strided"
    assert choose(where, COPY_ENGINE, profile, prefer, opposite=True).copier == "batch"


def test_an_engine_remembers_a_choice_for_the_situation_that_it_was_made_for() -> None:
    times = {situation: {"strided": 1.0e-4, "batch": 3.0e-4} for situation in Situation}
    times[Situation.BOTH_DIRECTIONS] = {"strided": 4.0e-4, "batch": 2.0e-4}
    with simulated() as device, rig(device, profile=field_of(times), prefer="latency") as bench:
        engine, held = bench.engine, bench.stream()
        chosen = [engine.store([1], [1], after=NO_WAIT).copier]
        engine.drain(10)
        gate = bench.gate(held)
        engine.load([8], [8], after=held)
        chosen.append(engine.store([1], [1], after=NO_WAIT).copier)
        gate.open()
        engine.drain(10)
        chosen.append(engine.store([1], [1], after=NO_WAIT).copier)
        assert chosen == ["strided", "batch", "strided"]


def test_an_engine_remembers_a_choice_for_as_many_parts() -> None:
    """A load in parts is no other load: what was chosen for the one is no answer for the other."""
    with simulated() as device, rig(device, profile=profile_of(strided=3e-5, batch=1e-5), prefer="latency") as bench:
        reasons = {parts: bench.engine.load([1], [1], after=NO_WAIT, parts=parts).reason for parts in (1, 2, 4)}
        bench.engine.drain(10)
    assert len(set(reasons.values())) == 3, reasons


def test_a_simulated_device_takes_kernels_that_are_asked_for_alone() -> None:
    """Interpreting one takes milliseconds."""
    profile = profile_of(strided=1.0, batch=1e-4)
    with simulated() as device, rig(device, staging_bytes=STAGING, profile=profile, prefer="latency") as bench:
        copiers = [bench.engine.store([1], [1], after=NO_WAIT, copier=copier).copier for copier in (None, "pack")]
        bench.engine.drain(10)
    assert copiers == ["batch", "pack"]


def test_a_situation_without_costs_of_a_method_is_no_price() -> None:
    """As in a profile that was put together by hand."""
    times = {situation: {"batch": 1.0e-4, "strided": 1.0e-4} for situation in Situation}
    del times[Situation.LARGE_PRODUCTS]["strided"]
    for parts in (1, 3):
        found = rank(shape(4096, 8), COPY_ENGINE, field_of(times), "overlap", parts)
        assert found[0].copier == "batch"
        assert {each.weight for each in found[1:]} == {inf}


def test_where_nothing_was_measured_there_is_a_method_nevertheless() -> None:
    profile = profile_of()
    for available, copier in ((ALL, "strided"), ({"batch", "loop"}, "batch"), ({"loop"}, "loop")):
        for prefer in PREFERENCES:
            choice = choose(shape(4096, 8), available, profile, prefer)
            assert choice.copier == copier
            assert rank(shape(4096, 8), available, profile, prefer)[0].seconds == inf
            assert "kvoffload tune" in choice.reason


def test_a_profile_of_nothing_but_zeros_is_no_error() -> None:
    profile = profile_of(strided=0.0, batch=0.0)
    for prefer in PREFERENCES:
        assert rank(shape(4096, 8), ALL, profile, prefer)[0].seconds > 0


# loads in parts -------------------------------------------------------------------------------------------------------


def in_parts(block_bytes: int, blocks: int, parts: int, planes: int = 64) -> Shape:
    """Of planes that fold within a part."""
    return shape(block_bytes, blocks, planes)._replace(operations=blocks * parts)


@pytest.mark.parametrize(
    ("blocks", "parts", "measured"),
    [(32, 2, 1459e-6), (32, 4, 1637e-6), (32, 8, 2033e-6), (32, 16, 2796e-6)],
)
def test_what_parts_take_by_strided_copies_is_near_what_an_h200_took(blocks: int, parts: int, measured: float) -> None:
    where = in_parts(32 * KIB, blocks, parts)
    assert rank(where, {"strided"}, H200, "latency", parts)[0].seconds == pytest.approx(measured, rel=0.08)


@given(shapes(), st.integers(1, 64), st.sampled_from(PREFERENCES))
def test_a_further_part_costs_time(where: Shape, parts: int, prefer: str) -> None:
    one = {each.copier: each.seconds for each in rank(where, COPY_ENGINE, H200, prefer)}
    several = {each.copier: each.seconds for each in rank(where, COPY_ENGINE, H200, prefer, parts)}
    assert set(one) == set(several)
    for copier, seconds in one.items():
        assert several[copier] == pytest.approx(seconds + (parts - 1) * 30e-6)


# what it says ---------------------------------------------------------------------------------------------------------


def test_the_reason_has_figures() -> None:
    profile = profile_of(strided=1.05e-4, batch=1e-4)
    where = shape(4096, 16)  # 4.19 MB
    assert choose(where, COPY_ENGINE, profile, "latency").reason == (
        "batch: 41.9 GB/s expected, the fastest; next is strided with 39.9 GB/s"
    )
    assert choose(where, {"loop", "batch"}, profile, "latency").reason == "batch: 41.9 GB/s expected, the only copier"
    kept = replace(profile, host=KEEPS_THE_CALLER)
    assert choose(where, COPY_ENGINE, kept, "overlap").reason == (
        "strided: 39.9 GB/s expected, 1.05x of batch (41.9 GB/s), and costs the host less"
    )
    slower = replace(profile_of(strided=1e-3, batch=1.2e-3), host=KEEPS_THE_CALLER)
    large = choose(shape(32 * KIB, 32), ALL, slower, "overlap").reason
    assert large.startswith("pack: 53")
    assert large.endswith("GB/s expected; selected from 32 MiB on")


@pytest.mark.parametrize("prefer", ["speed", "", None, 1, ["overlap"]])
def test_preferences_are_two(prefer: object) -> None:
    with pytest.raises(ValueError, match=r"prefer must be 'overlap' .* or 'latency'"):
        check_prefer(prefer)
    assert [check_prefer(each) for each in PREFERENCES] == list(PREFERENCES)


# what it costs --------------------------------------------------------------------------------------------------------


def test_a_choice_that_was_made_before_takes_few_steps() -> None:
    """Transfers of a server differ in their number of blocks alone."""
    some = [shape(4096, blocks) for blocks in range(1, 1000)]

    def choose_all() -> None:
        for where in some:
            choose(where, ALL, H200, "overlap")

    choose_all()
    taken = steps(choose_all)
    assert taken < 40 * len(some)


# the engine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefer", "copier"),
    [("latency", "batch"), ("overlap", "strided")],
    ids=["soonest from the call", "least on the GPU"],
)
def test_an_engine_chooses_by_its_profile_and_preference(device: kvoffload.Device, prefer: Any, copier: str) -> None:
    around = {"strided": HostCosts(1e-4, 0.0)}
    profile = replace(profile_of(batch=1.5e-4, loop=1.0, strided=1e-4), around=around)
    planes = device.allocate_planes(4, block_bytes=256, num_blocks=8)
    layout = kvoffload.KVLayout([planes])
    with kvoffload.OffloadEngine(layout, device=device, num_slots=8, prefer=prefer, profile=profile) as engine:
        engine.slots[:] = 7
        job = engine.load([1, 2], [3, 4], after=NO_WAIT)
        assert job.wait().copier == job.copier == copier
        assert " us expected" in job.reason
        assert engine.store([3, 4], [5, 6], after=NO_WAIT, copier="loop").wait().copier == "loop"
        assert (engine.slots[5:7, :1024] == 7).all()


def test_a_simulated_engine_goes_by_the_default_for_an_unknown_gpu(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(4, block_bytes=256, num_blocks=8)
    with kvoffload.OffloadEngine(kvoffload.KVLayout([planes]), device=device, num_slots=8) as engine:
        assert engine.profile is default_profile(None)


def test_an_engine_refuses_other_preferences(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(4, block_bytes=256, num_blocks=8)
    with pytest.raises(ValueError, match="prefer must be"):
        kvoffload.OffloadEngine(kvoffload.KVLayout([planes]), device=device, prefer="throughput")  # type: ignore[arg-type]


def test_without_batch_calls_there_is_still_a_choice(seed: int) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed, driver_version=(12, 4), bindings_version=(12, 9)))
    planes = device.allocate_planes(4, block_bytes=256, num_blocks=8)
    layout = kvoffload.KVLayout([planes])
    with kvoffload.OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0) as engine:
        assert engine.load([1, 2], [3, 4], after=NO_WAIT).wait().copier in ("strided", "loop")
    check_clean_close(device)


@pytest.mark.parametrize("blocks", [2, 32])
def test_the_caller_has_a_price_and_the_profiles_choice_still_goes_first(blocks: int) -> None:
    """4 MiB, which the copy engine carries first, and 64 MiB, which pack does."""
    where = Shape(Direction.STORE, blocks, 64 * blocks, blocks, 64 * blocks, blocks << 21)
    strided, flat = H200.host_seconds("strided", where), H200.host_seconds("batch", contiguous(where))
    packed, by_engine = ways_of(where)
    assert by_engine.extra == strided
    assert packed.extra == pytest.approx(flat + 40e-6)
    expected = [way.ratio * way.predicted + way.extra for way in (packed, by_engine)]
    first = choose(where, ALL, H200, "overlap").copier
    assert first == ("pack" if blocks == 32 else "strided")
    assert (packed, by_engine)[expected.index(min(expected))].copier == first
    assert [way.extra for way in ways_of(where, prefer="latency")] == [
        H200.seconds_around("batch", contiguous(where)),
        H200.seconds_around("strided", where),
    ]


def test_in_a_series_the_caller_costs_what_copies_do_not_hide() -> None:
    """64 rows of 32 KiB in separate allocations, 4 MiB: 128 copies keep their caller longer than the link."""
    where = shape(32 * KIB, 2, folds=False)
    packed, flat = ways_of(where, queued=True)
    alone = ways_of(where)
    assert flat.copier == "batch"
    assert 0.0 < flat.extra < alone[1].extra
    assert packed.extra < alone[0].extra
    assert all(way.extra == 0.0 for way in ways_of(shape(32 * KIB, 16), queued=True))


def contiguous(where: Shape) -> Shape:
    """A copy for each block."""
    return where._replace(plane_blocks=where.blocks, operations=where.blocks, rows=where.blocks)


def ways_of(where: Shape, *, prefer: str = "overlap", queued: bool = False) -> tuple[Way, Way]:
    found = two_ways(Question(where, ALL, H200, prefer), queued)
    assert found is not None
    return found
