"""The methods that `bench interop` compares: each moves the right blocks, and wrong bytes are counted."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benching import run_json
from fakecupy import FakeStream, fake_cupy

import kvoffload
from kvoffload.internal.models import MODELS
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench import cupy_methods, interop, jax_methods
from kvoffload_bench.cupy_methods import CupyMethods
from kvoffload_bench.framework_data import FrameworkData, FrameworkMethod
from kvoffload_bench.harness import CONTIGUOUS_COPY, SMALL, Lab

SIMULATED = ("bench", "interop", "--backend", "simulated")
GEOMETRY = MODELS["llama-3.1-8b"].scaled(1 / 64)
NO_WRONG = {"store": 0, "load": 0}
ROWS = 64 * 4  # of a transfer of 4 blocks
BACK_TO_BACK = interop._BACK_TO_BACK
OCCASIONS = ("one at a time", f"{BACK_TO_BACK} back to back")
JAXS_OWN = (jax_methods.OWN, jax_methods.OWN_JITTED)

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")


@pytest.fixture
def data(lab: Lab) -> FrameworkData:
    return FrameworkData(lab, GEOMETRY, 4)


# what is moved --------------------------------------------------------------------------------------------------------


def test_data_are_random_blocks_and_slots_and_normal_numbers(data: FrameworkData, lab: Lab) -> None:
    assert data.shape == (64, SMALL.plane_bytes // 512, 256)
    assert data.right.shape == (64, 4, 256)
    assert (data.right_by_block[3, 7] == data.right[7, 3]).all()
    assert np.diff(np.sort(data.blocks)).min() > 1
    assert (data.blocks.min() >= 0, data.blocks.max() < data.shape[1]) == (True, True)
    assert len(set(data.slots.tolist())) == 4
    assert data.slots.max() < data.num_slots
    as_fp16, as_bf16 = data.right.view(np.float16), data.right.astype(np.uint32) << 16
    for numbers, smallest in ((as_fp16, np.finfo(np.float16).tiny), (as_bf16.view(np.float32), 1.2e-38)):
        assert np.isfinite(numbers).all()
        assert np.abs(numbers).min() >= smallest
    crowded = FrameworkData(lab, GEOMETRY, 200)
    assert len(set(crowded.blocks.tolist())) == 200, "the cache grows with the transfer"


# CuPy -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy_by_name(data: FrameworkData, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FrameworkMethod]]:
    with fake_cupy(data.lab.device) as cupy, monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        with closing(CupyMethods(data)) as made:
            yield {name: make() for name, make in made.makers.items()}


def wrong_rows(data: FrameworkData, method: FrameworkMethod, times: int = 1) -> dict[str, int]:
    """After so many timed stores back to back, and as many loads."""
    found = {}
    for direction in Direction:
        method.source(direction).fill()
        scenario = method.scenario(direction, data, times)
        scenario.poison()
        assert scenario.execute() > 0
        found[str(direction)] = scenario.wrong()
    return found


CUPY_METHODS = (*(cupy_methods.OURS, cupy_methods.OURS_LIST, cupy_methods.COPIES, cupy_methods.PINNED),)


@pytest.mark.parametrize("times", [1, BACK_TO_BACK])
@pytest.mark.parametrize("name", CUPY_METHODS)
def test_every_method_of_cupy_moves_the_blocks_and_nothing_else(
    data: FrameworkData, cupy_by_name: dict[str, FrameworkMethod], name: str, times: int
) -> None:
    assert tuple(cupy_by_name) == CUPY_METHODS
    method = cupy_by_name[name]
    assert wrong_rows(data, method, times) == NO_WRONG
    cache: Any = method.cache
    everything = np.stack([np.array(plane) for plane in cache.planes])
    rest = np.setdiff1d(np.arange(data.shape[1]), data.blocks)
    assert (everything[:, data.blocks] == data.right).all()
    assert not everything[:, rest].any()


def test_the_methods_of_cupy_do_not_overwrite_each_others_blocks(
    data: FrameworkData, cupy_by_name: dict[str, FrameworkMethod]
) -> None:
    tried = [interop._Tried(method, {}) for method in cupy_by_name.values()]
    for direction in Direction:
        timings = interop._timings(data, tried, direction)
        assert {name: timing.wrong for name, timing in timings.items()} == {
            CONTIGUOUS_COPY: 0,
            **{f"CuPy: {name}, {occasion}": 0 for name in CUPY_METHODS for occasion in OCCASIONS},
        }


def test_one_array_of_cupy_folds_and_a_list_does_not(cupy_by_name: dict[str, FrameworkMethod]) -> None:
    carried = {name: interop._try(lambda name=name: cupy_by_name[name]).copiers for name in CUPY_METHODS}  # type: ignore[misc]
    assert carried[cupy_methods.OURS] == {"store": "strided", "load": "strided"}
    assert set(carried[cupy_methods.OURS_LIST]) == {"store", "load"}
    assert "strided" not in carried[cupy_methods.OURS_LIST].values()
    assert not any(carried[name] for name in CUPY_METHODS[2:])


@pytest.mark.parametrize("name", [cupy_methods.OURS, cupy_methods.OURS_LIST])
def test_cupys_stream_follows_our_loads_and_the_host_waits_for_our_stores(
    data: FrameworkData, cupy_by_name: dict[str, FrameworkMethod], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    followed: list[tuple[kvoffload.Job, object]] = []
    order_before = kvoffload.Job.order_before

    def noted(job: kvoffload.Job, stream: Any) -> None:
        followed.append((job, stream))
        order_before(job, stream)

    monkeypatch.setattr(kvoffload.Job, "order_before", noted)
    method = cupy_by_name[name]
    stored = method.execute(Direction.STORE, 3)
    assert [job.finished for job in stored] == [True] * 3
    loaded = method.execute(Direction.LOAD, 3)
    assert [job for job, _ in followed] == loaded
    assert all(isinstance(stream, FakeStream) for _, stream in followed)
    assert wrong_rows(data, method) == NO_WRONG


@pytest.mark.parametrize("name", [cupy_methods.COPIES, cupy_methods.PINNED])
def test_a_store_that_is_not_waited_for_is_counted(
    data: FrameworkData, cupy_by_name: dict[str, FrameworkMethod], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(FakeStream, "synchronize", FakeStream.reach)
    assert wrong_rows(data, cupy_by_name[name])["store"] == ROWS


@pytest.mark.parametrize("name", CUPY_METHODS)
def test_a_look_of_cupys_that_comes_before_its_load_is_counted(
    data: FrameworkData, cupy_by_name: dict[str, FrameworkMethod], name: str
) -> None:
    assert_early_looks_are_counted(data, cupy_by_name[name])


def assert_early_looks_are_counted(data: FrameworkData, method: FrameworkMethod) -> None:
    cache: Any = method.cache
    method.host.fill()
    method.scenario(Direction.LOAD, data, 2).poison()
    cache.look()
    method.execute(Direction.LOAD, 2)
    assert cache.wrong() == 1, "of three looks the first, though all blocks are right"
    method.scenario(Direction.LOAD, data, 2).poison()
    method.execute(Direction.LOAD, 2)
    assert cache.wrong() == 0


@pytest.mark.parametrize("name", CUPY_METHODS)
def test_blocks_that_are_not_moved_are_counted(
    data: FrameworkData, cupy_by_name: dict[str, FrameworkMethod], name: str
) -> None:
    """`poison` overwrites all bytes that are compared."""
    method = cupy_by_name[name]
    for direction, target in ((Direction.STORE, method.host), (Direction.LOAD, method.cache)):
        method.source(direction).fill()
        method.execute(direction)
        assert target.wrong() == 0
        method.scenario(direction, data, 1).poison()
        assert target.wrong() == ROWS


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # and so it is gone afterwards
    monkeypatch.setitem(sys.modules, "jax", None)


@pytest.mark.usefixtures("no_jax")
def test_frameworks_that_are_missing_are_named_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, *SIMULATED)
    assert fields["not_run"]["CuPy"] == "it computes on GPUs, and this device is simulated"
    assert "pip install 'kvoffload[jax]'" in fields["not_run"]["JAX"]
    contiguous = {"framework": None, "method": CONTIGUOUS_COPY, "copiers": {}, "wrong": NO_WRONG}
    assert fields["methods"] == [contiguous | {"back_to_back": times} for times in (1, BACK_TO_BACK)]
    assert (fields["benchmark"], fields["simulated"], fields["wrong_rows"]) == ("interop", True, 0)
    assert (fields["planes"], fields["block_bytes"], fields["blocks"], fields["nbytes"]) == (64, 512, 32, 1 << 20)
    assert (fields["comparisons"], fields["ratios"]) == ([], [])


@needs_jax
def test_what_jax_can_do_on_the_cpu_is_verified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    fields = run_json(capsys, *SIMULATED, "--blocks", "40", "--repeats", "2")
    carried = {row["method"]: row["copiers"] for row in fields["methods"]}
    names = [jax_methods.OWNED, *JAXS_OWN, CONTIGUOUS_COPY]
    assert [(row["back_to_back"], row["method"]) for row in fields["methods"]] == [
        (times, name) for times in (1, BACK_TO_BACK) for name in names
    ]
    assert carried[jax_methods.OWNED] == {"store": "strided", "load": "strided"}
    assert not any(carried[name] for name in JAXS_OWN)
    assert set(fields["not_run"]) == {"CuPy"}
    for row in fields["methods"]:
        assert row["wrong"] == NO_WRONG
        assert not {"gb_per_s", "median_us", "samples_us"} & set(row), "no time is a GPU's"
    assert fields["comparisons"] == []


@needs_jax
@pytest.mark.parametrize("name", [jax_methods.OWNED, *JAXS_OWN])
def test_blocks_that_jax_has_not_moved_are_counted(data: FrameworkData, name: str) -> None:
    with closing(jax_methods.JaxMethods(data)) as made:
        method = made.makers[name]()
        for times in (1, BACK_TO_BACK):
            assert wrong_rows(data, method, times) == NO_WRONG
        method.scenario(Direction.LOAD, data, 1).poison()
        assert method.cache.wrong() == ROWS
        method.execute(Direction.LOAD)
        assert method.cache.wrong() == 0
        if name == jax_methods.OWNED:
            method.scenario(Direction.STORE, data, 1).poison()
            assert method.host.wrong() == ROWS


@needs_jax
@pytest.mark.parametrize("name", [jax_methods.OWNED, jax_methods.OWN])
def test_a_look_of_jaxs_that_comes_before_its_load_is_counted(data: FrameworkData, name: str) -> None:
    with closing(jax_methods.JaxMethods(data)) as made:
        assert_early_looks_are_counted(data, made.makers[name]())


@needs_jax
@pytest.mark.parametrize("name", JAXS_OWN)
def test_each_store_of_jaxs_back_to_back_has_arrays_of_its_own_all_verified(data: FrameworkData, name: str) -> None:
    with closing(jax_methods.JaxMethods(data)) as made:
        method = made.makers[name]()
        host: Any = method.host
        method.cache.fill()
        method.execute(Direction.STORE, 3)
        kinds = {leaf.sharding.memory_kind for leaf in made._jax.tree.leaves(host.stored)}
        assert (len(host.stored), kinds, host.wrong()) == (3, {"pinned_host"}, 0)
        host.stored[1] = host._programs.poison
        assert host.wrong() == ROWS
        host.poison()
        assert host.stored == []


@needs_jax
def test_a_load_that_follows_another_also_follows_what_looked_at_that(
    data: FrameworkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[tuple[Any, ...]] = []
    submit = kvoffload.OffloadEngine.load

    def noted(engine: kvoffload.OffloadEngine, slots: Any, blocks: Any, after: Any) -> kvoffload.Job:
        followed.append(after)
        return submit(engine, slots, blocks, after=after)

    monkeypatch.setattr(kvoffload.OffloadEngine, "load", noted)
    with closing(jax_methods.JaxMethods(data)) as made:
        method = made.makers[jax_methods.OWNED]()
        cache: Any = method.cache
        method.host.fill()
        method.cache.poison()
        method.execute(Direction.LOAD, 3)
        first, second, third = followed
        assert [len(each) for each in (first, second, third)] == [1, 2, 2], "the array, and what looked at it"
        assert [second[1] is cache._seen[0], third[1] is cache._seen[1]] == [True, True]


# any framework --------------------------------------------------------------------------------------------------------


def test_a_row_is_queued_then_waited_for_then_asked_how_it_went(
    data: FrameworkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    clock = iter([10.0, 16.0])

    def now() -> float:
        done.append("clock")
        return next(clock)

    job: Any = SimpleNamespace(wait=lambda: done.append("job"))

    def move() -> Any:
        done.append("move")
        return job

    host: Any = SimpleNamespace(wait=lambda: done.append("wait"), wrong=lambda: 0)
    scenario = FrameworkMethod("Fake", "noted", host, host, move, move).scenario(Direction.STORE, data, 3)
    monkeypatch.setattr(time, "perf_counter", now)
    assert scenario.execute() == 2.0, "seconds of one of the three"
    assert done == ["clock", "move", "move", "move", "wait", "clock", "job", "job", "job"]


def test_a_transfer_that_failed_back_to_back_has_no_time(data: FrameworkData) -> None:
    def fail() -> None:
        raise kvoffload.TransferError("store 2 failed")

    jobs: Any = iter([SimpleNamespace(wait=lambda: None), SimpleNamespace(wait=fail), SimpleNamespace(wait=fail)])
    host: Any = SimpleNamespace(wait=lambda: None, wrong=lambda: 0)
    method = FrameworkMethod("Fake", "failing", host, host, lambda: next(jobs), lambda: None)
    with pytest.raises(kvoffload.TransferError, match="store 2 failed"):
        method.scenario(Direction.STORE, data, 3).execute()
