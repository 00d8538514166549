"""The choice between ways: what it minimises, what it never does, what it says, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from counting import steps
from helpers import STAGING, rig, simulated
from hypothesis import given
from hypothesis import strategies as st

import kvoffload
from kvoffload.copiers.selection import PREFERENCES, TOLERANCE, check_prefer, choose, rank
from kvoffload.device.streams import NO_WAIT
from kvoffload.planning.transfer_plan import Direction
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload.tuning import CopyMethod, HostCosts, Profile, ProfileKey, Shape, Situation, default_profile
from kvoffload.tuning.costs import Costs, Curve, FlatCosts, StridedCosts

H200 = default_profile(ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3"))
ALL = frozenset({"strided", "pack", "batch", "loop"})
KERNELS = {"gather", "split"}
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


def profile_of(slowdowns: dict[str, float], **seconds: float) -> Profile:
    """Ways that take these seconds, whatever the transfer: strided, batch, loop, and gather1 to gather8."""

    def always(value: float) -> FlatCosts:
        return FlatCosts((Curve(1, (1, 1 << 40), (value, value)), Curve(1 << 40, (1, 1 << 40), (value, value))))

    strided = StridedCosts(seconds.pop("strided"), (1,), (0.0,), (0.0,)) if "strided" in seconds else None
    gather = {int(name[-1]): always(value) for name, value in seconds.items() if name.startswith("gather")}
    flat = {name: always(value) for name, value in seconds.items() if not name.startswith("gather")}
    costs = Costs(55e9, strided, flat, gather)
    return Profile(None, "made for a test", {Direction.STORE: costs, Direction.LOAD: costs}, slowdowns)


# what is chosen -------------------------------------------------------------------------------------------------------


@given(shapes(), st.integers(0, 12), st.sets(st.sampled_from(sorted(ALL)), min_size=1))
def test_the_least_weight_wins_unless_the_copy_engine_is_as_good(
    where: Shape, sm_limit: int, available: set[str]
) -> None:
    if available <= KERNELS and sm_limit == 0:
        available.add("loop")
    by_time = rank(where, available, H200, "latency", sm_limit)
    assert all(each.weight >= each.seconds for each in by_time)
    by_peace = rank(where, available, H200, "overlap", sm_limit)
    copiers = {each.method.copier for each in by_peace}
    assert "split" not in copiers or copiers == {"split"}
    rest = {each.method for each in by_time if each.method.copier != "split"} or {each.method for each in by_time}
    assert {each.method for each in by_peace} == rest
    best, least = by_time[0], min(each.weight for each in by_time)
    if best.seconds < inf:
        assert best.weight <= TOLERANCE * least
        assert best.weight == least or not best.method.programs
    best, least = by_peace[0], min(each.weight for each in by_peace)
    copies = [each for each in by_peace if not each.method.programs]
    if best.seconds < inf and any(each.weight <= TOLERANCE * least for each in copies):
        soonest = min(each.host + each.seconds for each in copies)
        as_soon = [each for each in copies if each.host + each.seconds <= TOLERANCE * soonest]
        assert best in as_soon
        assert best.host == min(each.host for each in as_soon)
    elif best.seconds < inf:
        assert best.weight == least
    assert {each.method.copier for each in by_time} <= available


@given(shapes(), st.integers(0, 12), st.sampled_from(PREFERENCES))
def test_pitfall_35_no_more_programs_than_allowed_and_none_at_all_for_zero(
    where: Shape, sm_limit: int, prefer: str
) -> None:
    for each in rank(where, ALL, H200, prefer, sm_limit):
        assert each.method.programs <= min(sm_limit, 8)
        assert (each.method.programs > 0) == (each.method.copier in KERNELS)
    assert choose(where, ALL, H200, prefer, sm_limit).method.programs <= sm_limit


@pytest.mark.parametrize(
    ("sm_limit", "gather"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (6, {1, 2, 3, 4, 6}), (64, {1, 2, 3, 4, 8})]
)
def test_programs_that_are_offered(sm_limit: int, gather: set[int]) -> None:
    methods = [each.method for each in rank(shape(8192, 64), ALL, H200, "latency", sm_limit)]
    assert {method.programs for method in methods if method.copier == "gather"} == gather
    assert {method.programs for method in methods if method.copier == "split"} == gather & {1, 2}


@given(shapes(), st.sampled_from(PREFERENCES))
def test_splits_have_whole_blocks_on_both_sides_and_something_that_folds(where: Shape, prefer: str) -> None:
    method = choose(where, ALL, H200, prefer, 4).method
    if method.copier == "split":
        assert 0 < round(method.share * where.blocks) < where.blocks
        assert where.rows > where.operations or where.nbytes >= 65536 * where.rows


@given(shapes())
def test_a_choice_for_a_class_is_hardly_worse_than_one_for_the_transfer(where: Shape) -> None:
    method = choose(where, ALL, H200, "latency", 4).method
    least = min(each.weight for each in rank(where, ALL, H200, "latency", 4))
    assert H200.seconds(method, where) + H200.seconds_around(method, where) <= 1.06 * TOLERANCE * least


@given(shapes())
def test_expected_seconds_are_those_of_the_transfer(where: Shape) -> None:
    choice = choose(where, ALL, H200, "latency", 4)
    assert choice.seconds == pytest.approx(H200.seconds(choice.method, where), rel=0.12)


def test_transfers_that_are_alike_are_carried_alike() -> None:
    methods = {choose(shape(4096, blocks), ALL, H200, "latency", 4).method for blocks in range(1000, 1008)}
    assert len(methods) == 1


def test_known_cases_on_an_h200() -> None:
    def method(where: Shape, prefer: str, sm_limit: int = 4) -> CopyMethod:
        return choose(where, ALL, H200, prefer, sm_limit).method

    assert method(shape(256 * KIB, 64), "overlap") == "strided"
    few = Shape(
        Direction.STORE, 4, 128, 4, 128, 8 << 20
    )  # of 32 planes; batch takes 1% less time, and its call 70 us more
    assert method(few, "overlap") == "strided"
    assert method(shape(32 * KIB, 64), "overlap").copier in ("strided", "split")
    assert method(shape(32 * KIB, 64), "overlap", 0) == "strided"
    assert method(shape(4 * KIB, 64, folds=False), "latency").copier == "gather"
    assert method(shape(4 * KIB, 64, folds=False), "overlap", 2).copier == "gather"
    assert method(shape(4 * KIB, 64, folds=False), "overlap", 0) == "batch"


def test_what_computation_loses_is_part_of_the_price() -> None:
    """A kernel of 4 programs that takes 100 us, in which small products lose 50 us, against longer ones that do not."""
    where = shape(4096, 8)
    slow = {"gather 4": 2.0, "gather 2": 1.0}

    def method(prefer: str, profile: Profile, opposite: bool = False) -> str:
        return choose(where, ALL, profile, prefer, 4, 1, opposite).method.label

    for strided, best in ((1.2e-4, "strided"), (1.7e-4, "gather 4")):
        profile = profile_of(slow, gather4=1.0e-4, strided=strided)
        assert (method("latency", profile), method("overlap", profile)) == ("gather 4", best)
    profile = profile_of(slow, gather4=1.0e-4, gather2=1.2e-4)
    assert method("overlap", profile) == "gather 3", "between both; it slows as the next lower one that was measured"
    profile = profile_of({"gather 4": 1.3}, gather4=1.0e-4, strided=1.2e-4)
    assert method("overlap", profile) == "gather 4"
    assert method("overlap", profile, opposite=True) == "strided", "the other direction slows computation once more"


def test_of_methods_alike_in_slow_down_the_fastest_wins_unless_it_keeps_the_caller() -> None:
    profile = profile_of({}, strided=1.09e-4, batch=1.0e-4)
    assert choose(shape(4096, 8), ALL, profile, "overlap", 0).method.copier == "batch"
    profile = replace(profile, host=KEEPS_THE_CALLER)
    assert choose(shape(4096, 8), ALL, profile, "overlap", 0).method.copier == "strided"
    assert choose(shape(4096, 8, folds=False), ALL, profile, "overlap", 0).method.copier == "batch", "nothing else can"
    profile = replace(profile_of({}, strided=12e-3, batch=1.0e-4), host=KEEPS_THE_CALLER)
    large = shape(4096, 1024)  # 256 MiB, for which a caller may be kept four times as long
    assert choose(large, ALL, profile, "overlap", 0).method.copier == "batch"
    assert choose(shape(4096, 8), ALL, profile, "overlap", 0).method.copier == "batch", "12 ms are longer than 2.1"


@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("direction", Direction)
def test_overlap_counts_the_call_among_copies_that_need_no_multiprocessor(direction: Direction, blocks: int) -> None:
    where = shape(64 * KIB, blocks, 32, direction=direction)
    found = {each.method.copier: each for each in rank(where, ALL, H200, "overlap", 0, opposite=True)}
    assert found["strided"].host < found["batch"].host
    assert choose(where, ALL, H200, "overlap", 0, opposite=True).method.copier == "strided"


def test_latency_counts_from_the_call() -> None:
    profile = profile_of({}, strided=1.09e-4, batch=1.0e-4)
    where = shape(4096, 8)  # 512 rows in 8 operations
    assert choose(where, ALL, profile, "latency", 0).method.copier == "batch"
    fixed = replace(profile, around={"batch": HostCosts(2e-5, 0.0), "strided": HostCosts(1e-5, 0.0)})
    assert choose(where, ALL, fixed, "latency", 0).method.copier == "strided"
    copies = replace(profile, around={"batch": HostCosts(0.0, 1e-7), "strided": HostCosts(0.0, 1e-7)})
    assert choose(where, ALL, copies, "latency", 0).method.copier == "strided", "512 copies take 51 us more"
    assert choose(where, ALL, copies, "latency", 0).seconds == pytest.approx(1.09e-4), "on the GPU's clock"


def field_of(store: dict[Situation, dict[str, float]]) -> Profile:
    """A profile whose times are those of each situation."""
    costs = {situation: profile_of({}, **seconds).costs for situation, seconds in store.items()}
    profile = profile_of({}, **store[Situation.IDLE])
    return replace(profile, situations={each: found for each, found in costs.items() if each is not Situation.IDLE})


def test_overlap_takes_what_falls_behind_least_where_it_falls_behind_most() -> None:
    times = {
        Situation.IDLE: {"gather4": 1.0e-4, "batch": 2.9e-4},
        Situation.LARGE_PRODUCTS: {"gather4": 9.0e-4, "batch": 3.0e-4},
        Situation.SMALL_PRODUCTS: {"gather4": 1.0e-4, "batch": 2.9e-4},
    }
    where = shape(4096, 8, folds=False)
    assert choose(where, ALL, field_of(times), "latency", 4).method.copier == "gather"
    choice = choose(where, ALL, field_of(times), "overlap", 4)
    assert choice.method.copier == "batch"
    assert "expected concurrent with compute" in choice.reason
    times[Situation.LARGE_PRODUCTS] = {"gather4": 1.2e-4, "batch": 3.0e-4}
    assert choose(where, ALL, field_of(times), "overlap", 4).method.copier == "gather"


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_what_the_other_direction_slows_is_not_taken_with_it(prefer: str) -> None:
    times = {situation: {"gather4": 1.0e-4, "batch": 2.2e-4} for situation in Situation}
    times[Situation.BOTH_DIRECTIONS] = {"gather4": 3.0e-4, "batch": 2.3e-4}
    where, profile = shape(4096, 8, folds=False), field_of(times)
    assert choose(where, ALL, profile, prefer, 4).method.copier == "gather"
    assert choose(where, ALL, profile, prefer, 4, opposite=True).method.copier == "batch"


def test_an_engine_remembers_a_choice_for_the_situation_that_it_was_made_for() -> None:
    times = {situation: {"strided": 1.0e-4, "batch": 3.0e-4} for situation in Situation}
    times[Situation.BOTH_DIRECTIONS] = {"strided": 4.0e-4, "batch": 2.0e-4}
    with simulated() as device, rig(device, profile=field_of(times), prefer="latency") as bench:
        engine, held = bench.engine, bench.stream()
        chosen = [engine.store([1], [1], after=NO_WAIT).method]
        engine.drain(10)
        gate = bench.gate(held)
        engine.load([8], [8], after=held)
        chosen.append(engine.store([1], [1], after=NO_WAIT).method)
        gate.open()
        engine.drain(10)
        chosen.append(engine.store([1], [1], after=NO_WAIT).method)
        assert chosen == ["strided", "batch", "strided"]


def test_a_simulated_device_takes_kernels_that_are_asked_for_alone() -> None:
    """Interpreting one takes milliseconds."""
    profile = profile_of({}, gather4=1.0e-4, batch=3.0e-4)
    with simulated() as device, rig(device, staging_bytes=STAGING, profile=profile, prefer="latency") as bench:
        methods = [bench.engine.store([1], [1], after=NO_WAIT, copier=copier).method for copier in (None, "gather")]
        bench.engine.drain(10)
    assert [method and method.copier for method in methods] == ["batch", "gather"]


def test_a_situation_without_costs_of_a_method_is_no_price() -> None:
    """As in a profile that was put together by hand."""
    times = {situation: {"batch": 1.0e-4, "gather4": 1.0e-4} for situation in Situation}
    del times[Situation.LARGE_PRODUCTS]["gather4"]
    for parts in (1, 3):
        found = rank(shape(4096, 8, folds=False), ALL - {"split"}, field_of(times), "overlap", 4, parts)
        assert found[0].method.copier == "batch"
        assert {each.weight for each in found[1:]} == {inf}


def test_where_nothing_was_measured_there_is_a_method_nevertheless() -> None:
    profile = profile_of({})
    for available, copier in ((ALL, "strided"), ({"batch", "loop"}, "batch"), ({"loop"}, "loop")):
        for prefer in PREFERENCES:
            choice = choose(shape(4096, 8), available, profile, prefer, 4)
            assert (choice.method.copier, choice.seconds) == (copier, inf)
            assert "kvoffload tune" in choice.reason
    assert choose(shape(4096, 8), {"gather"}, profile, "overlap", 4).method.programs > 0


def test_a_profile_of_nothing_but_zeros_is_no_error() -> None:
    profile = profile_of({}, strided=0.0, batch=0.0, gather4=0.0)
    for prefer in PREFERENCES:
        assert choose(shape(4096, 8), ALL, profile, prefer, 4).seconds > 0


@pytest.mark.parametrize("copier", sorted(ALL))
def test_of_one_copier_its_best_method(copier: str) -> None:
    """What a copier that is forced by name leaves open."""
    for where in (shape(4096, 64), shape(4096, 64, folds=False), shape(4096, 1)):
        method = choose(where, (copier,), H200, "latency", 4).method
        assert method.copier == copier
        assert (method.programs > 0) == (copier in KERNELS)


# loads in parts -------------------------------------------------------------------------------------------------------

PARTS_ABLE = ALL - {"split"}


def in_parts(block_bytes: int, blocks: int, parts: int, planes: int = 64) -> Shape:
    """Of planes that fold within a part."""
    return shape(block_bytes, blocks, planes)._replace(operations=blocks * parts)


@given(shapes(), st.integers(1, 64), st.sampled_from(PREFERENCES))
def test_a_further_part_costs_time(where: Shape, parts: int, prefer: str) -> None:
    one = {each.method: each.seconds for each in rank(where, PARTS_ABLE, H200, prefer, 4)}
    several = {each.method: each.seconds for each in rank(where, PARTS_ABLE, H200, prefer, 4, parts)}
    assert set(one) == set(several)
    more = {method: several[method] - one[method] for method in one if one[method] < inf}
    for method, seconds in more.items():
        least = (parts - 1) * (8e-6 if method.copier == "gather" else 30e-6)
        if method.copier == "gather" and prefer == "overlap":  # each launch waits for the products' programs
            assert seconds >= least - 1e-9
        else:
            assert seconds == pytest.approx(least)


@pytest.mark.parametrize(
    ("blocks", "parts", "measured"),
    [(32, 2, 1459e-6), (32, 4, 1637e-6), (32, 8, 2033e-6), (32, 16, 2796e-6)],
)
def test_what_parts_take_by_strided_copies_is_near_what_an_h200_took(blocks: int, parts: int, measured: float) -> None:
    where = in_parts(32 * KIB, blocks, parts)
    assert choose(where, {"strided"}, H200, "latency", 0, parts).seconds == pytest.approx(measured, rel=0.08)


def test_known_cases_of_parts_on_an_h200() -> None:
    """Layer by layer the kernel, as far as it may; big blocks, and with "overlap" few parts, the copy engine."""
    for parts in (4, 8, 16, 32):
        for prefer, engine_for in (("latency", 0), ("overlap", 32)):
            method = choose(in_parts(32 * KIB, 32, parts), PARTS_ABLE, H200, prefer, 4, parts).method
            assert (method.copier == "gather") == (parts > engine_for)
    assert choose(in_parts(256 * KIB, 64, 2), PARTS_ABLE, H200, "overlap", 4, 2).method == "strided"
    assert choose(in_parts(32 * KIB, 32, 8), PARTS_ABLE, H200, "overlap", 0, 8).method == "strided"
    assert choose(in_parts(32 * KIB, 32, 64), PARTS_ABLE, H200, "overlap", 0, 64).method == "batch"


# what it says ---------------------------------------------------------------------------------------------------------


def test_the_reason_has_figures() -> None:
    slow = {"gather 4": 1.3, "strided": 1.01}
    profile = profile_of(slow, strided=1.05e-4, gather4=1.0e-4, batch=2e-4)
    where = shape(4096, 16)  # 4.19 MB
    assert choose(where, ALL, profile, "overlap", 4).reason == (
        "strided: 39.9 GB/s expected, 1.05x of gather with 4 programs (41.9 GB/s), and slows computation less"
    )
    further = profile_of(slow, strided=1.2e-4, gather4=1.0e-4, batch=2e-4)
    assert choose(where, {"strided", "gather", "batch"}, further, "latency", 4).reason == (
        "gather with 4 programs: 41.9 GB/s expected, the fastest; next is strided with 35.0 GB/s"
    )
    reason = choose(where, {"loop", "batch"}, profile, "latency", 4).reason
    assert reason == "batch: 21.0 GB/s expected, the only method"
    profile = replace(profile_of({}, strided=1.05e-4, batch=1e-4), host=KEEPS_THE_CALLER)
    assert choose(where, ALL, profile, "overlap", 0).reason.endswith("and costs the host less")


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
            choose(where, ALL, H200, "overlap", 4)

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
    profile = replace(profile_of({}, batch=1.5e-4, loop=1.0, strided=1e-4), around=around)
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
    profile = replace(default_profile(None), slowdowns={})
    layout = kvoffload.KVLayout([planes])
    with kvoffload.OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0, profile=profile) as engine:
        assert engine.load([1, 2], [3, 4], after=NO_WAIT).wait().copier in ("strided", "loop")
    check_clean_close(device)
