"""`bench interop`: every method verified, wrong bytes counted, missing frameworks named; simulated, no times."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from benching import refused, run_json

from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output
from kvoffload_bench import interop, jax_methods
from kvoffload_bench.framework_data import POISON_ELEMENT, FrameworkData, FrameworkMethod
from kvoffload_bench.harness import CONTIGUOUS_COPY, WARM_UP, Lab, Scenario, time_rounds

SIMULATED = ("bench", "interop", "--backend", "simulated")
GEOMETRY = MODELS["llama-3.1-8b"].scaled(1 / 64)
NO_WRONG = {"store": 0, "load": 0}
ROWS = 64 * 4  # of a transfer of 4 blocks
BACK_TO_BACK = interop._BACK_TO_BACK
OCCASIONS = ("one at a time", f"{BACK_TO_BACK} back to back")


class Shelf:
    """Blocks on one side of a fake framework; a queued transfer to it executes in `wait`."""

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

    def poison(self) -> None:
        self.blocks[...] = POISON_ELEMENT

    def wrong(self) -> int:
        return self._data.wrong(self.blocks, self._data.right)


class FakeFramework:
    """One method of this library, one of the framework, one that loads nothing, and one that cannot be used."""

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
    monkeypatch.setattr(interop, "frameworks_here", lambda data, _: [FakeFramework(data)])


@pytest.mark.usefixtures("fake_framework")
def test_wrong_bytes_are_counted_and_fail_and_a_method_that_raises_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = run_json(capsys, *SIMULATED, "--blocks", "4", "--repeats", "2", code=1)
    every_row = ROWS * (WARM_UP + 2)
    wrong = {"ours": NO_WRONG, "theirs": NO_WRONG, "idle": {"store": 0, "load": every_row}, CONTIGUOUS_COPY: NO_WRONG}
    assert [(row["back_to_back"], row["method"], row["wrong"]) for row in fields["methods"]] == [
        (times, name, rows) for times in (1, BACK_TO_BACK) for name, rows in wrong.items()
    ]
    assert fields["wrong_rows"] == 2 * every_row
    assert fields["not_run"] == {"Fake: broken": "RuntimeError: out of order"}


@pytest.mark.usefixtures("fake_framework")
def test_on_the_simulated_device_the_verdict_and_what_was_wrong_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATED, "--blocks", "4"]) == 1
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert text.startswith(
        f"bench interop: 16 transfers verified, 2 wrong ({2 * ROWS * (WARM_UP + 1):,} rows of bytes)"
    )
    wrong = [line for line in out.splitlines() if "method idle" in line]
    assert len(wrong) == 2
    assert "Fake: broken: RuntimeError: out of order" in out
    assert "GB/s" not in out


@pytest.mark.usefixtures("fake_framework")
def test_times_and_ratios_of_a_device_that_has_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(scenarios: dict[str, Scenario], *options: Any) -> Any:
        """Ours takes 1 ms, theirs 2 ms (1.5 ms back to back), the idle one 4 ms. The contiguous copy has wrong rows."""
        found = time_rounds(scenarios, *options)
        found[CONTIGUOUS_COPY] = replace(found[CONTIGUOUS_COPY], wrong=3)
        for name, alone, back_to_back in (("ours", 1, 1), ("theirs", 2, 1.5), ("idle", 4, 4)):
            for occasion, milliseconds in zip(OCCASIONS, (alone, back_to_back), strict=True):
                found[f"Fake: {name}, {occasion}"].seconds[:] = [milliseconds * 1e-3]
        return found

    monkeypatch.setattr(interop, "time_rounds", timed)
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
    compared = {
        (each["back_to_back"], each["other"], each["direction"]): each["value"] for each in fields["comparisons"]
    }
    assert len(compared) == len(fields["comparisons"])
    assert {key: value for key, value in compared.items() if key[1] != CONTIGUOUS_COPY} == {
        (times, other, direction): pytest.approx(value)
        for times, other, value in (
            (1, "theirs", 2),
            (1, "idle", 4),
            (BACK_TO_BACK, "theirs", 1.5),
            (BACK_TO_BACK, "idle", 4),
        )
        for direction in Direction
    }
    assert (BACK_TO_BACK, CONTIGUOUS_COPY, "load") in compared
    named = [(each["ratio"], each["which"], each["value"], each["at"]) for each in fields["ratios"]]
    assert named == [
        (f"Fake: ours / without it, {direction}, {occasion}", "lowest", pytest.approx(value), "theirs")
        for occasion, value in zip(OCCASIONS, (2, 1.5), strict=True)
        for direction in Direction
    ]
    interop._show(fields | {"simulated": False}, Output(as_json=False))
    lines = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert lines.count(["Fake: ours", "0.1", "0.1", "1000", "1000", "cart"]) == 2


def test_a_tree_of_arrays_is_timed_and_verified(lab: Lab) -> None:
    pytest.importorskip("jax")
    found = jax_methods.time_tree(lab.device, 8, 2)
    assert (found["leaves"], found["wrong"]) == (8, 0)
    assert {name: len(taken) for name, taken in found["samples_us"].items()} == {
        "step": 2,
        "no transfer": 2,
        "after transfers": 2,
        "after=cache": 2,
    }


def test_a_model_of_several_groups_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpt-oss-20b has 2 groups" in refused(capsys, *SIMULATED, "--model", "gpt-oss-20b")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_interop_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    options = ("--model", "qwen2.5-0.5b", "--blocks", "8", "--repeats", "2")
    fields = run_json(capsys, "bench", "interop", *options, *on_gpu)
    assert fields["wrong_rows"] == 0
    assert set(fields["not_run"]) <= {"CuPy", "JAX"}, "what is installed works, all of it"
    assert [(tree["leaves"], tree["wrong"]) for tree in fields["trees"]] == [(1, 0), (8, 0), (64, 0)]
    for row in fields["methods"]:
        assert min(row["gb_per_s"].values()) > 0
