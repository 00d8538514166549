"""`bench interop`: every way verified, wrong bytes counted, what is missing named; simulated, no times."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benching import run_json
from fakecupy import FakeStream, fake_cupy

import kvoffload
from kvoffload.bench import cupy_methods as cupyways
from kvoffload.bench import frameworks_compared as interop
from kvoffload.bench import jax_methods as jaxways
from kvoffload.bench.contiguous import CONTIGUOUS_COPY
from kvoffload.bench.cupy_methods import CupyMethods
from kvoffload.bench.framework_data import POISON_ELEMENT, FrameworkData, FrameworkMethod, run_warmed
from kvoffload.bench.lab import Lab
from kvoffload.bench.rounds import WARM_UP, Scenario
from kvoffload.bench.tools import SMALL
from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output

SIMULATED = ("bench", "interop", "--backend", "simulated")
GEOMETRY = MODELS["llama-3.1-8b"].scaled(1 / 64)
NO_WRONG = {"store": 0, "load": 0}
ROWS = 64 * 4  # of a transfer of 4 blocks
IN_A_ROW = interop._IN_A_ROW
OCCASIONS = ("one at a time", f"{IN_A_ROW} in a row")
JAXS_OWN = (jaxways.OWN, jaxways.OWN_IDS, jaxways.OWN_JITTED, jaxways.PER_BLOCK)

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")


@pytest.fixture
def data(lab: Lab) -> Iterator[FrameworkData]:
    with closing(FrameworkData(lab, GEOMETRY, 4)) as data:
        yield data


# what is moved --------------------------------------------------------------------------------------------------------


def test_cargo_is_random_blocks_and_slots_and_normal_numbers(data: FrameworkData, lab: Lab) -> None:
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
    with closing(FrameworkData(lab, GEOMETRY, 200)) as crowded:
        assert len(set(crowded.blocks.tolist())) == 200, "the cache grows with the transfer"


def test_rounds_run_each_case_warm_then_poisoned_in_random_orders() -> None:
    seen: list[str] = []

    def scenario(name: str) -> Scenario:
        def run() -> float:
            seen.append(f"{name} run")
            return float(len(seen))

        return Scenario(
            run,
            lambda: seen.append(f"{name} poison"),
            lambda: seen.append(f"{name} wrong") or 2,  # type: ignore[func-returns-value]
            10,
            lambda: seen.append(f"{name} warm"),
        )

    done: list[tuple[int, int]] = []
    names = [f"way {number}" for number in range(6)]
    timings = run_warmed({name: scenario(name) for name in names}, 3, 7, lambda *each: done.append(each))
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    runs = [each.removesuffix(" run") for each in seen if each.endswith("run")]
    rounds = [tuple(runs[start : start + 6]) for start in range(0, 24, 6)]
    assert all(sorted(each) == names for each in rounds)
    assert len(set(rounds)) == 4
    for start in range(0, len(seen), 4):
        assert [each.rpartition(" ")[2] for each in seen[start : start + 4]] == ["warm", "poison", "run", "wrong"]
    for name, timing in timings.items():
        assert timing.seconds == [place + 1 for place, each in enumerate(seen) if each == f"{name} run"][WARM_UP:]
        assert timing.wrong == 2 * (WARM_UP + 3)


# CuPy -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy_ways(data: FrameworkData, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FrameworkMethod]]:
    with fake_cupy(data.lab.device) as cupy, monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        with closing(CupyMethods(data)) as made:
            yield {name: make() for name, make in made.makers.items()}


def wrong_rows(data: FrameworkData, method: FrameworkMethod, times: int = 1) -> dict[str, int]:
    """After so many timed stores in a row, and as many loads."""
    found = {}
    for direction in Direction:
        method.source(direction).fill()
        scenario = method.scenario(direction, data, times)
        scenario.warm_up()
        scenario.poison()
        assert scenario.execute() > 0
        found[str(direction)] = scenario.wrong()
    return found


CUPY_WAYS = (
    *(cupyways.OURS, cupyways.OURS_LIST, cupyways.COPIES, cupyways.BLOCKS),
    *(cupyways.PAGEABLE, cupyways.PINNED, cupyways.PINNED_LIST),
)


@pytest.mark.parametrize("times", [1, IN_A_ROW])
@pytest.mark.parametrize("name", CUPY_WAYS)
def test_every_way_of_cupy_moves_the_blocks_and_nothing_else(
    data: FrameworkData, cupy_ways: dict[str, FrameworkMethod], name: str, times: int
) -> None:
    assert tuple(cupy_ways) == CUPY_WAYS
    method = cupy_ways[name]
    assert wrong_rows(data, method, times) == NO_WRONG
    cache: Any = method.cache
    everything = np.stack([np.array(plane) for plane in (cache.kv if hasattr(cache, "kv") else cache.planes)])
    rest = np.setdiff1d(np.arange(data.shape[1]), data.blocks)
    assert (everything[:, data.blocks] == data.right).all()
    assert not everything[:, rest].any()


def test_the_ways_of_cupy_do_not_spoil_each_others_blocks(
    data: FrameworkData, cupy_ways: dict[str, FrameworkMethod]
) -> None:
    tried = [interop._Tried(method, {}) for method in cupy_ways.values()]
    for direction in Direction:
        timings = interop._timings(data, tried, direction, lambda *_: None)
        assert {name: timing.wrong for name, timing in timings.items()} == {
            CONTIGUOUS_COPY: 0,
            **{f"CuPy: {name}, {occasion}": 0 for name in CUPY_WAYS for occasion in OCCASIONS},
        }


def test_one_array_of_cupy_folds_and_a_list_does_not(cupy_ways: dict[str, FrameworkMethod]) -> None:
    carried = {name: interop._try(lambda name=name: cupy_ways[name]).carried for name in CUPY_WAYS}  # type: ignore[misc]
    assert carried[cupyways.OURS] == {"store": "strided", "load": "strided"}
    assert set(carried[cupyways.OURS_LIST]) == {"store", "load"}
    assert "strided" not in carried[cupyways.OURS_LIST].values()
    assert not any(carried[name] for name in CUPY_WAYS[2:])


@pytest.mark.parametrize("name", [cupyways.OURS, cupyways.OURS_LIST])
def test_cupys_stream_follows_our_loads_and_the_host_waits_for_our_stores(
    data: FrameworkData, cupy_ways: dict[str, FrameworkMethod], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    followed: list[tuple[kvoffload.Job, object]] = []
    order_before = kvoffload.Job.order_before

    def noted(job: kvoffload.Job, stream: object) -> None:
        followed.append((job, stream))
        order_before(job, stream)

    monkeypatch.setattr(kvoffload.Job, "order_before", noted)
    method = cupy_ways[name]
    stored = method.carry_out(Direction.STORE, 3)
    assert [job.finished for job in stored] == [True] * 3
    loaded = method.carry_out(Direction.LOAD, 3)
    assert [job for job, _ in followed] == loaded
    assert all(isinstance(stream, FakeStream) for _, stream in followed)
    assert wrong_rows(data, method) == NO_WRONG


@pytest.mark.parametrize("name", [cupyways.COPIES, cupyways.BLOCKS, cupyways.PINNED, cupyways.PINNED_LIST])
def test_a_store_that_is_not_waited_for_is_counted(
    data: FrameworkData, cupy_ways: dict[str, FrameworkMethod], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(FakeStream, "synchronize", FakeStream.reach)
    assert wrong_rows(data, cupy_ways[name])["store"] == ROWS


@pytest.mark.parametrize("name", CUPY_WAYS)
def test_a_look_of_cupys_that_comes_before_its_load_is_counted(
    data: FrameworkData, cupy_ways: dict[str, FrameworkMethod], name: str
) -> None:
    assert_early_looks_are_counted(data, cupy_ways[name])


def assert_early_looks_are_counted(data: FrameworkData, method: FrameworkMethod) -> None:
    cache: Any = method.cache
    method.host.fill()
    method.scenario(Direction.LOAD, data, 2).poison()
    cache.look()
    method.carry_out(Direction.LOAD, 2)
    assert cache.wrong() == 1, "of three looks the first, though all blocks are right"
    method.scenario(Direction.LOAD, data, 2).poison()
    method.carry_out(Direction.LOAD, 2)
    assert cache.wrong() == 0


@pytest.mark.parametrize("name", CUPY_WAYS)
def test_blocks_that_are_not_moved_are_counted(
    data: FrameworkData, cupy_ways: dict[str, FrameworkMethod], name: str
) -> None:
    """Every poison spoils all that is compared."""
    method = cupy_ways[name]
    for direction, target in ((Direction.STORE, method.host), (Direction.LOAD, method.cache)):
        method.source(direction).fill()
        method.carry_out(direction)
        assert target.wrong() == 0
        method.scenario(direction, data, 1).poison()
        if name == cupyways.PAGEABLE and direction is Direction.STORE:
            continue  # there is no array until the next store
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
    contiguous = {"framework": None, "method": CONTIGUOUS_COPY, "carried": {}, "wrong": NO_WRONG}
    assert fields["methods"] == [contiguous | {"in_a_row": times} for times in (1, IN_A_ROW)]
    assert (fields["benchmark"], fields["simulated"], fields["wrong_rows"]) == ("interop", True, 0)
    assert (fields["planes"], fields["block_bytes"], fields["blocks"], fields["nbytes"]) == (64, 512, 32, 1 << 20)
    assert (fields["comparisons"], fields["ratios"]) == ([], [])


@needs_jax
def test_what_jax_can_do_on_the_cpu_is_verified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    fields = run_json(capsys, *SIMULATED, "--blocks", "40", "--repeats", "2")
    carried = {row["method"]: row["carried"] for row in fields["methods"]}
    names = [jaxways.OWNED, jaxways.STAGED, *JAXS_OWN, CONTIGUOUS_COPY]
    assert [(row["in_a_row"], row["method"]) for row in fields["methods"]] == [
        (times, name) for times in (1, IN_A_ROW) for name in names
    ]
    assert carried[jaxways.OWNED] == {"store": "strided", "load": "strided"}
    assert not any(carried[name] for name in JAXS_OWN)
    assert set(fields["not_run"]) == {"CuPy", "JAX: AdoptedCache", "JAX: CallbackCache"}
    for row in fields["methods"]:
        assert row["wrong"] == NO_WRONG
        assert not {"gb_per_s", "median_us", "samples_us"} & set(row), "no time is a GPU's"
    assert fields["comparisons"] == []


@needs_jax
@pytest.mark.parametrize("name", [jaxways.OWNED, jaxways.STAGED, *JAXS_OWN])
def test_blocks_that_jax_has_not_moved_are_counted(data: FrameworkData, name: str) -> None:
    with closing(jaxways.JaxMethods(data)) as made:
        method = made.makers[name]()
        for times in (1, IN_A_ROW):
            assert wrong_rows(data, method, times) == NO_WRONG
        method.scenario(Direction.LOAD, data, 1).poison()
        assert method.cache.wrong() == ROWS
        method.carry_out(Direction.LOAD)
        assert method.cache.wrong() == 0
        if name in (jaxways.OWNED, jaxways.STAGED):
            method.scenario(Direction.STORE, data, 1).poison()
            assert method.host.wrong() == ROWS


@needs_jax
@pytest.mark.parametrize("name", [jaxways.OWNED, jaxways.STAGED, jaxways.OWN])
def test_a_look_of_jaxs_that_comes_before_its_load_is_counted(data: FrameworkData, name: str) -> None:
    with closing(jaxways.JaxMethods(data)) as made:
        assert_early_looks_are_counted(data, made.makers[name]())


@needs_jax
@pytest.mark.parametrize("name", JAXS_OWN)
def test_each_store_of_jaxs_in_a_row_has_arrays_of_its_own_all_verified(data: FrameworkData, name: str) -> None:
    with closing(jaxways.JaxMethods(data)) as made:
        method = made.makers[name]()
        host: Any = method.host
        method.cache.fill()
        method.carry_out(Direction.STORE, 3)
        kinds = {leaf.sharding.memory_kind for leaf in made._jax.tree.leaves(host.stored)}
        assert (len(host.stored), kinds, host.wrong()) == (3, {"pinned_host"}, 0)
        host.stored[1] = host._spoiled
        assert host.wrong() == ROWS
        host.spoil()
        assert host.stored == []


@needs_jax
def test_one_program_gathers_every_block_that_jax_stores_by_itself(
    data: FrameworkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[tuple[int, ...]] = []
    gather = jaxways._gather

    def noted(cache: Any, ids: Any) -> Any:
        traced.append(ids.shape)
        return gather(cache, ids)

    monkeypatch.setattr(jaxways, "_gather", noted)
    with closing(jaxways.JaxMethods(data)) as made:
        method = made.makers[jaxways.PER_BLOCK]()
        method.cache.fill()
        method.carry_out(Direction.STORE, 2)
        host: Any = method.host
        assert traced == [()]
        assert [len(blocks) for blocks in host.stored] == [4, 4]
        assert {block.shape for block in host.stored[0]} == {(64, 256)}


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
    with closing(jaxways.JaxMethods(data)) as made:
        method = made.makers[jaxways.OWNED]()
        cache: Any = method.cache
        method.host.fill()
        method.cache.spoil()
        method.carry_out(Direction.LOAD, 3)
        first, second, third = followed
        assert first == (cache.holder,)
        assert (second[0], third[0]) == (cache.holder, cache.holder)
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


def test_a_transfer_that_failed_in_a_row_has_no_time(data: FrameworkData) -> None:
    def fail() -> None:
        raise kvoffload.TransferError("store 2 failed")

    jobs: Any = iter([SimpleNamespace(wait=lambda: None), SimpleNamespace(wait=fail), SimpleNamespace(wait=fail)])
    host: Any = SimpleNamespace(wait=lambda: None, wrong=lambda: 0)
    method = FrameworkMethod("Fake", "failing", host, host, lambda: next(jobs), lambda: None)
    with pytest.raises(kvoffload.TransferError, match="store 2 failed"):
        method.scenario(Direction.STORE, data, 3).run()


class Shelf:
    """Blocks somewhere, as an end: what is queued towards it happens when it is waited for."""

    def __init__(self, data: FrameworkData) -> None:
        self._data = data
        self.blocks = data.right.copy()
        self.queued: list[Shelf] = []

    def wait(self) -> None:
        for source in self.queued:
            self.blocks[...] = source.blocks
        self.queued.clear()

    def fill(self) -> None:
        self.blocks[...] = self._data.right

    def spoil(self) -> None:
        self.blocks[...] = POISON_ELEMENT

    def wrong(self) -> int:
        return self._data.wrong(self.blocks, self._data.right)


class FakeFramework:
    """One way that is ours, one that is not, one that loads nothing, and one that cannot run."""

    name = "Fake"

    def __init__(self, data: FrameworkData) -> None:
        self._data = data
        self.makers: dict[str, Callable[[], FrameworkMethod]] = {
            "ours": lambda: self._way("ours", ours=True),
            "theirs": lambda: self._way("theirs"),
            "idle": lambda: self._way("idle", loads=False),
            "broken": self._broken,
        }

    def _way(self, name: str, *, ours: bool = False, loads: bool = True) -> FrameworkMethod:
        cache, host = Shelf(self._data), Shelf(self._data)
        job: Any = SimpleNamespace(copier="cart", wait=lambda: None) if ours else None

        def store() -> Any:
            host.queued.append(cache)
            return job

        def load() -> Any:
            if loads:
                cache.queued.append(host)
            return job

        return FrameworkMethod(self.name, name, cache, host, store, load)

    def _broken(self) -> FrameworkMethod:
        raise RuntimeError("out of order\nand more")

    def close(self) -> None:
        self._data = None  # type: ignore[assignment]


@pytest.fixture
def fake_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_frameworks", lambda data, _: [FakeFramework(data)])


@pytest.mark.usefixtures("fake_framework")
def test_wrong_bytes_are_counted_and_fail_and_a_way_that_raises_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = run_json(capsys, *SIMULATED, "--blocks", "4", "--repeats", "2", code=1)
    every_row = ROWS * (WARM_UP + 2)
    wrong = {"ours": NO_WRONG, "theirs": NO_WRONG, "idle": {"store": 0, "load": every_row}, CONTIGUOUS_COPY: NO_WRONG}
    assert [(row["in_a_row"], row["method"], row["wrong"]) for row in fields["methods"]] == [
        (times, name, rows) for times in (1, IN_A_ROW) for name, rows in wrong.items()
    ]
    assert fields["wrong_rows"] == 2 * every_row
    assert fields["not_run"] == {"Fake: broken": "RuntimeError: out of order"}


@pytest.mark.usefixtures("fake_framework")
def test_the_table_says_simulated_and_has_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATED, "--blocks", "4"]) == 1
    out = capsys.readouterr().out
    for occasion in OCCASIONS:
        assert f"4 blocks of 64 x 512 B, 0.12 MiB, {occasion}, SIMULATED" in out
    lines = [line for line in out.splitlines() if "Fake: ours" in line]
    assert [[cell.strip() for cell in line.strip("│").split("│")][1:] for line in lines] == [["0", "0", "cart"]] * 2
    assert "GB/s" not in out
    assert "not run: Fake: broken: RuntimeError: out of order" in out


@pytest.mark.usefixtures("fake_framework")
def test_times_and_ratios_of_a_device_that_has_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(scenarios: dict[str, Scenario], *options: Any) -> Any:
        """Ours takes 1 ms, theirs 2 ms, the idle one 4 ms; in a row theirs 1.5 ms. The contiguous copy goes wrong."""
        found = run_warmed(scenarios, *options)
        found[CONTIGUOUS_COPY] = replace(found[CONTIGUOUS_COPY], wrong=3)
        for name, alone, in_a_row in (("ours", 1, 1), ("theirs", 2, 1.5), ("idle", 4, 4)):
            for occasion, milliseconds in zip(OCCASIONS, (alone, in_a_row), strict=True):
                found[f"Fake: {name}, {occasion}"].seconds[:] = [milliseconds * 1e-3]
        return found

    monkeypatch.setattr(interop, "run_warmed", timed)
    with monkeypatch.context() as patch:
        patch.setattr(lab.device, "simulated", False)
        fields = interop._measure(lab, GEOMETRY, 4, lambda *_: None)
    ours = fields["methods"][0]
    nbytes = 64 * 4 * 512
    assert ours["gb_per_s"] == {direction: pytest.approx(nbytes / 1e-3 / 1e9) for direction in Direction}
    assert (ours["median_us"]["load"], ours["samples_us"]["load"]) == (pytest.approx(1000), [1000])
    idle = [row["wrong"]["load"] for row in fields["methods"] if row["method"] == "idle"]
    assert fields["wrong_rows"] == sum(idle) + 2 * 3, (
        "what the contiguous copy does wrong counts once, though it has two rows"
    )
    assert {(each["framework"], each["ours"]) for each in fields["comparisons"]} == {("Fake", "ours")}
    compared = {(each["in_a_row"], each["other"], each["direction"]): each["value"] for each in fields["comparisons"]}
    assert len(compared) == len(fields["comparisons"])
    assert {key: value for key, value in compared.items() if key[1] != CONTIGUOUS_COPY} == {
        (times, other, direction): pytest.approx(value)
        for times, other, value in ((1, "theirs", 2), (1, "idle", 4), (IN_A_ROW, "theirs", 1.5), (IN_A_ROW, "idle", 4))
        for direction in Direction
    }
    assert (IN_A_ROW, CONTIGUOUS_COPY, "load") in compared
    named = [(each["ratio"], each["which"], each["value"], each["at"]) for each in fields["ratios"]]
    assert named == [
        (f"Fake: ours / without it, {direction}, {occasion}", "lowest", pytest.approx(value), "theirs")
        for occasion, value in zip(OCCASIONS, (2, 1.5), strict=True)
        for direction in Direction
    ]
    interop._show(fields | {"simulated": False}, Output(as_json=False))
    alone, _, in_a_row = capsys.readouterr().out.partition(OCCASIONS[1])
    for part, occasion, ratio in ((alone, OCCASIONS[0], "2.00"), (in_a_row, OCCASIONS[1], "1.50")):
        assert f"Fake, {occasion}: GB/s over those of ..., store / load" in " ".join(part.split())
        lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in part.splitlines()]
        assert ["Fake: ours", "0.1", "0.1", "1000", "1000", "0", "0", "cart"] in lines
        assert ["theirs", f"{ratio} / {ratio}"] in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "gpt-oss-20b"), "gpt-oss-20b has 2 groups"),
        (("--model", "nobody"), "unknown model 'nobody'"),
        (("--blocks", "0"), "must be at least 1"),
    ],
)
def test_bench_interop_refuses_bad_options(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert main([*SIMULATED, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("gpu_device")
def test_bench_interop_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "qwen2.5-0.5b", "--blocks", "8", "--repeats", "2")
    fields = run_json(capsys, "bench", "interop", *options, "--backend", "cuda")
    assert fields["wrong_rows"] == 0
    assert set(fields["not_run"]) <= {"CuPy", "JAX"}, "what is installed works, all of it"
    for row in fields["methods"]:
        assert min(row["gb_per_s"].values()) > 0
