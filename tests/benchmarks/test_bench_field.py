"""`bench field`: every cell verified; what may be printed of a series; the worst place first; options."""

from __future__ import annotations

import argparse
import re
from math import inf
from typing import Any

import pytest
from benching import run_json, times_in

import kvoffload
from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.layout.coding import Coding
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output
from kvoffload.testing import SimulatedDriver
from kvoffload_bench import field
from kvoffload_bench.field_compute import ComputeTimes, Situation, Span, compute_ended, slowdown
from kvoffload_bench.field_methods import CHOICE, GRID, FieldSetup, SeriesSize, StreamSubmitter, by_engine, series_size
from kvoffload_bench.field_report import chosen_text, compare, show, worst, worst_text
from kvoffload_bench.harness import CONTIGUOUS_COPY, ContiguousCopy, Lab, Timing
from kvoffload_bench.series import EngineSubmitter, Recorded, figures, repeats_now
from kvoffload_bench.setup import Placement

SIMULATED = ("bench", "field", "--backend", "simulated")
ONE = (*SIMULATED, "--layouts", "plane-major", "--situations", "idle", "--directions", "both")
METHODS = {CHOICE, "strided", "pack", "batch", "loop", "flat batch", GRID, CONTIGUOUS_COPY}


# every cell -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layouts", "situations", "directions"),
    [
        (("block-major", "plane-major", "scattered"), ("idle",), ("store", "both")),
        (("block-major",), ("large-products", "decode-loop"), ("load",)),
    ],
)
def test_every_cell_is_verified_and_has_no_times(
    capsys: pytest.CaptureFixture[str],
    layouts: tuple[str, ...],
    situations: tuple[str, ...],
    directions: tuple[str, ...],
) -> None:
    options = ("--layouts", *layouts, "--situations", *situations, "--directions", *directions)
    options = (*options, "--model", "gpt-oss-120b-tp2", "--transfers", "1")
    fields = run_json(capsys, *SIMULATED, *options)
    methods: dict[tuple[str, ...], set[str]] = {}
    for cell in fields["cells"]:
        place = cell["layout"], cell["situation"], cell["direction"]
        methods.setdefault(place, set()).add(cell["method"])
        assert (cell["wrong"], cell["model"], cell["groups"]) == (0, "gpt-oss-120b-tp2", 2)
        assert cell["transfers"] == (2 if cell["direction"] == "both" else 1)
    assert list(methods) == [
        (layout, situation, direction) for layout in layouts for situation in situations for direction in directions
    ]
    assert all(found == METHODS for found in methods.values())
    assert (fields["benchmark"], fields["wrong_rows"]) == ("field", 0)
    assert times_in(fields) == []
    assert not {"comparisons", "summary", "worst"} & set(fields)


def test_each_copier_is_the_one_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, *ONE)
    chosen = [cell["chosen"] for cell in fields["cells"] if "chosen" in cell]
    assert [cell["method"] for cell in fields["cells"] if "chosen" in cell] == [CHOICE]
    assert [sum(counts.values()) for counts in chosen[0].values()] == [2, 2]


def test_a_codec_is_one_more_method_whose_bytes_are_verified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*ONE, "--transfers", "1", "--codec", "bf16-12")
    fields = run_json(capsys, *options)
    assert {cell["method"] for cell in fields["cells"]} == METHODS | {"bf16-12"}
    assert (fields["wrong_rows"], fields["not_run"]) == (0, {})
    assert len({cell["nbytes"] for cell in fields["cells"] if cell["method"] != CONTIGUOUS_COPY}) == 1
    small = run_json(capsys, *options, "--model", "qwen2.5-0.5b")
    assert "multiple of 512 bytes" in small["not_run"]["bf16-12"]
    assert {cell["method"] for cell in small["cells"]} == METHODS
    encode = Coding.encode

    def one_bit(coding: Coding, blocks: Any) -> Any:
        records, fits = encode(coding, blocks)
        records[:, 7] ^= 1
        return records, fits

    monkeypatch.setattr(Coding, "encode", one_bit)  # of what is expected
    fields = run_json(capsys, *options, code=1)
    assert {cell["method"] for cell in fields["cells"] if cell["wrong"]} == {"bf16-12"}


def test_bytes_give_the_size_of_a_transfer(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, *ONE, "--bytes", "8KiB")
    [cell] = [each for each in fields["cells"] if each["method"] == CHOICE]
    nbytes = cell["nbytes"]
    assert nbytes == cell["blocks"] * cell["planes"] * cell["block_bytes"]
    assert 8192 <= nbytes < 8192 + nbytes // cell["blocks"], "whole blocks, no more than are needed"
    assert fields["wrong_rows"] == 0


def test_a_transfer_that_copies_nothing_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = EngineSubmitter.submit

    def skip_a_load(submitter: EngineSubmitter, direction: Direction, index: int) -> None:
        if (direction, index) != (Direction.LOAD, 1):
            submit(submitter, direction, index)

    monkeypatch.setattr(EngineSubmitter, "submit", skip_a_load)
    fields = run_json(capsys, *ONE, code=1)
    for cell in fields["cells"]:
        skipped = cell["method"] not in ("flat batch", GRID, CONTIGUOUS_COPY)
        assert cell["wrong"] == (cell["blocks"] * cell["planes"] if skipped else 0)


def test_wrong_bytes_of_other_methods_and_of_the_limit_are_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = StreamSubmitter.submit

    def skip_the_last(submitter: StreamSubmitter, direction: Direction, index: int) -> None:
        if index == 0:
            submit(submitter, direction, index)

    monkeypatch.setattr(StreamSubmitter, "submit", skip_the_last)
    fields = run_json(capsys, *ONE, code=1)
    wrong = {cell["method"] for cell in fields["cells"] if cell["wrong"]}
    assert wrong == {"flat batch", GRID, CONTIGUOUS_COPY}


@pytest.mark.parametrize("placement", list(Placement))
def test_one_planted_byte_is_one_wrong_row(lab: Lab, placement: Placement) -> None:
    model = MODELS["gpt-oss-120b-tp2"].scaled(1 / 64)
    with FieldSetup(lab, model, placement, SeriesSize(2, 2, 1)) as setup:
        both = tuple(Direction)
        submitter = by_engine(setup, dict.fromkeys(both))

        def move() -> None:
            setup.poison(both)
            for index in range(3):
                for direction in both:
                    submitter.submit(direction, index)
            while not submitter.done():
                pass
            submitter.finish()

        move()
        assert setup.wrong(both) == 0
        setup.poison(both)
        rows = 2 * 2 * 2 * (1 if placement is Placement.INTERLEAVED else 36)
        assert [setup.wrong([each]) for each in both] == [rows, rows]
        move()
        slots = setup.transfer(Direction.STORE, 1)[1].slots
        setup.setup.engine.slots[slots[1], 3] ^= 1
        assert [setup.wrong([each]) for each in both] == [1, 0]


def test_the_transfers_of_a_series_share_no_block_and_no_slot(lab: Lab) -> None:
    model = MODELS["gpt-oss-120b-tp2"].scaled(1 / 64)
    with FieldSetup(lab, model, Placement.FOLDED, SeriesSize(2, 3, 1)) as setup:
        for group in range(2):
            found = [setup.transfer(direction, index)[group] for direction in Direction for index in range(4)]
            for ids in ([each.blocks for each in found], [each.slots for each in found]):
                assert len({int(one) for some in ids for one in some}) == 2 * 2 * 4


def test_without_kernels_the_idle_gpu_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.kernels.why_not", lambda _: "kernels need Triton, which is not installed")
    options = ("--layouts", "plane-major", "--directions", "store", "--situations", "idle", "decode-loop")
    fields = run_json(capsys, *SIMULATED, *options)
    assert {cell["situation"] for cell in fields["cells"]} == {"idle"}
    assert {"pack", GRID, "decode-loop"} <= set(fields["not_run"])


def test_what_the_driver_lacks_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    old = kvoffload.open_device(backend=SimulatedDriver(driver_version=(12, 4), bindings_version=(13, 3)))
    monkeypatch.setattr("kvoffload.terminal.console.open_device", lambda *_, **__: old)
    fields = run_json(capsys, *ONE)
    assert {"batch", "flat batch"} <= set(fields["not_run"])
    assert "flat batch" not in {cell["method"] for cell in fields["cells"]}
    assert fields["wrong_rows"] == 0


def test_a_part_of_the_contiguous_copy_can_be_queued(lab: Lab) -> None:
    copy = ContiguousCopy(lab, 4 * 4096)
    try:
        scenario = copy.scenario(Direction.STORE)
        scenario.poison()
        lab.timer.seconds(lambda: copy.queue(Direction.STORE, lab.timer.stream, first=4096, nbytes=2 * 4096))
        assert scenario.wrong() == 2
    finally:
        copy.close()


# times ----------------------------------------------------------------------------------------------------------------


def times(spans: list[tuple[float, float]], series: float, **changes: Any) -> ComputeTimes:
    found = ComputeTimes([Span(*span) for span in spans], len(spans), True, True, series)
    return found._replace(**changes)


BUSY = [(0.0, 1e-3), (1.002e-3, 2e-3), (2.003e-3, 3e-3)]


@pytest.mark.parametrize(
    ("recorded", "ended"),
    [
        (times(BUSY, 2.5e-3), False),
        (times(BUSY, 2.5e-3, running_at_end=False), True),
        (times(BUSY, 2.5e-3, running_at_begin=False), True),
        (times([(0.0, 1e-3), (1.04e-3, 3e-3)], 2.5e-3), False),  # the gap of two events
        (times([(0.0, 1e-3), (1.06e-3, 3e-3)], 2.5e-3), True),  # 60 us of 2.5 ms without a product
        (times([(0.0, 1e-3), (1.06e-3, 30e-3)], 29e-3), False),  # 60 us of 29 ms
    ],
)
def test_a_computation_that_ended_or_paused_during_a_series_is_seen(recorded: ComputeTimes, ended: bool) -> None:
    assert compute_ended(recorded) is ended


def test_the_slowdown_is_that_of_the_series_and_not_of_the_window() -> None:
    alone = 1.0
    assert slowdown(times([(0, 1), (1, 2), (2, 3)], 2.0), alone) == 1
    # 4 seconds for 3 products: one was lost in a series of 2, during which one product was done instead of two
    assert slowdown(times([(0, 1), (1, 2.5), (2.5, 4)], 2.0), alone) == 2
    assert slowdown(times([(0, 3), (3, 6)], 2.0), alone) == inf
    assert slowdown(times([(0, 1)], 0.9, products=1), alone) is None


def test_rounds_during_which_the_computation_ended_are_not_counted() -> None:
    recorded = Recorded([9.0, 1.0, 2.0, 4.0], [[9.0]] * 4)
    late = times([(0, 1), (1, 2), (2, 3)], 2.0)
    recorded.compute = [late, late, late._replace(running_at_end=False), late]
    recorded.calls = [[9.0], [1e-6, 2e-6], [3e-6], [6e-6]]
    timing = Timing(8_000_000_000, recorded.seconds[1:])
    found = figures(recorded, timing, 1, 1.0)
    assert found["gb_per_s"] == (8 + 2) / 2
    assert (found["rounds"], found["rounds_compute_ended"]) == (3, 1)
    assert found["samples_gb_per_s"] == [8, 4, 2]
    assert (found["call_median_us"], found["call_max_us"]) == (2.5, 6)
    assert found["compute_slowdown"] == 1
    recorded.compute = [late._replace(running_at_end=False)] * 4
    found = figures(recorded, timing, 1, 1.0)
    assert (found["gb_per_s"], found["compute_slowdown"], found["rounds_compute_ended"]) == (None, None, 3)
    idle = figures(Recorded([1.0], [[1e-6]]), Timing(10**9, [1.0]), 0, None)
    assert idle["gb_per_s"] == 1
    assert "compute_slowdown" not in idle


# comparisons ----------------------------------------------------------------------------------------------------------


def cell(method: str, rate: float | None, direction: str = "store", layout: str = "plane-major", **more: Any) -> Any:
    found: dict[str, Any] = {"model": "llama-3.1-8b", "layout": layout, "situation": "large-products"}
    found |= {"direction": direction, "method": method, "blocks": 32, "planes": 64, "block_bytes": 32768, "groups": 1}
    found |= {"row_bytes": 32768, "transfers": 4, "nbytes": 64 << 20, "wrong": 0, "gb_per_s": rate, "rounds": 3}
    found |= {"rounds_compute_ended": 0, "call_median_us": 50.0, "call_max_us": 90.0, "compute_slowdown": 1.25}
    if method == CHOICE:
        found["chosen"] = {"store": {"pack": 3, "strided": 1}}
    return found | more


CELLS = [
    cell(CHOICE, 40.0),
    cell("strided", 50.0),
    cell("loop", None),
    cell(CONTIGUOUS_COPY, 54.0),
    cell("flat batch", 20.0),
    cell(CHOICE, 20.0, "load"),
    cell("strided", 19.0, "load"),
    cell("batch", 25.0, "load"),
    cell(CONTIGUOUS_COPY, 50.0, "load"),
    cell(GRID, 10.0, "load"),
    cell(CHOICE, None, "both"),
    cell(CONTIGUOUS_COPY, 90.0, "both"),
]


def test_comparisons_and_the_worst() -> None:
    first, second = compare(CELLS)
    assert (first["best_method"], first["regret"], first["choice/limit"]) == ("strided", 0.25, 40 / 54)
    assert (second["best_method"], second["regret"], second["choice/best"]) == ("batch", 0.25, 0.8)
    lowest = worst([first, second])
    assert lowest is second
    text = worst_text(second)
    for part in ("0.40: llama-3.1-8b, plane-major", "8192", "load", "32 blocks x 64 planes", "20.0 GB/s of 50.0"):
        assert part in text
    assert "best 25.0 by batch (regret 25.0%)" in text
    assert worst([]) is None


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"store": {"strided": 4}}, "strided"),
        ({"store": {"strided": 4}, "load": {"strided": 3, "batch": 2}}, "strided"),
        ({"store": {"pack": 4}, "load": {"strided": 3}}, "pac/str"),
    ],
)
def test_what_carried_the_choice(chosen: dict[str, dict[str, int]], text: str) -> None:
    assert chosen_text(chosen) == text


def test_a_codec_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    coded = [*CELLS, cell("pack", 44.0), cell("bf16-12", 55.0), cell("bf16-12", 60.0, "load")]
    comparisons = compare(coded)
    assert [each.get("codec/pack") for each in comparisons] == [1.25, None]
    show({"simulated": False, "cells": coded, "comparisons": comparisons, "wall_seconds": 1.0}, Output(False))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[-2] for line in lines if re.search(r" (store|load|both) ", line)][-3:] == ["1.25", "-", "-"]
    assert any(line.startswith("coded: GB/s of bf16 values") for line in lines)


def test_the_worst_is_printed_first_and_all_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    comparisons = compare(CELLS)
    fields: dict[str, Any] = {"simulated": False, "cells": CELLS, "comparisons": comparisons, "wall_seconds": 1.0}
    show(fields, Output(False))
    lines = capsys.readouterr().out.splitlines()
    first, second = "\n".join(lines).replace("\n  ", " ").splitlines()[:2]
    assert first.startswith("bench field: the engine's choice has 0.40 (lowest) and 0.57 (median) of the contiguous ")
    assert second.startswith("lowest choice / limit: 0.40: llama-3.1-8b, plane-major")
    assert max(map(len, lines)) <= 80
    ended = [line for line in lines if " both " in line]
    assert len(ended) == 1
    assert "ended" in ended[0]
    assert "90.0" not in ended[0]
    legend = "\n".join(lines).partition("\n\n")[0]
    for word in ("by", "/limit", "best", "regret", "slow", "max us"):
        assert re.search(rf"(^|; |, ){word}[:,] ", legend, re.MULTILINE), f"{word} is a heading"
    assert "1 line without a figure: the computation ended or paused in every" in " ".join(" ".join(lines).split())


# options --------------------------------------------------------------------------------------------------------------


def plan(*options: str, simulated: bool = False) -> field.Plan:
    parser = argparse.ArgumentParser()
    field.add_parser(parser.add_subparsers())
    return field.plan_of(parser.parse_args(["field", *options]), simulated=simulated)


def test_the_plan_of_the_options() -> None:
    whole = plan()
    assert [model.name for model in whole.models] == [
        *("llama-3.1-8b", "deepseek-v3-mla", "gpt-oss-120b-tp2", "qwen2.5-0.5b")
    ]
    assert (whole.layouts, whole.situations) == (list(field.LAYOUTS), list(Situation))
    assert (whole.blocks, whole.groups) == (None, 4 * 3)
    quick = plan("--quick", "--layouts", "scattered")
    assert (quick.layouts, quick.situations) == (["scattered"], [Situation.IDLE, Situation.LARGE])
    assert (quick.groups, quick.seconds) == (2 * 1, 40)
    chosen = plan("--blocks", "1,512", "--repeats", "5", "--model", "all")
    assert (chosen.blocks, chosen.seconds, len(chosen.models)) == ([1, 512], None, len(MODELS))
    twice = plan(
        "--situations", "idle", "idle", "--directions", "store", "store", "--blocks", "8,8", "--layouts", "scattered"
    )
    assert (twice.situations, twice.directions, twice.blocks) == ([Situation.IDLE], ["store"], [8])
    sizes = {"4194304": 4 << 20, "4MiB": 4 << 20, "4096 KiB": 4 << 20, "1GiB": 1 << 30}
    assert {text: plan("--bytes", text).nbytes for text in sizes} == sizes
    assert (whole.nbytes, plan("--bytes", "4MiB").blocks) == (None, None)
    small = plan(simulated=True)
    assert ([model.name for model in small.models], small.groups) == (["qwen2.5-0.5b"], 1 * 3)


def test_what_is_behind_its_schedule_gets_fewer_rounds() -> None:
    assert repeats_now(3, 100.0, 20.0, 1, 10) == 1
    assert repeats_now(3, 100.0, 9.0, 1, 10) == 3
    assert repeats_now(3, 100.0, 5.0, 0, 10) == 3
    assert repeats_now(7, None, 1000.0, 1, 10) == 7


def test_sizes_of_series() -> None:
    llama, hybrid = MODELS["llama-3.1-8b"], MODELS["gpt-oss-120b-tp2"]
    assert series_size(llama, None, 64 << 20, None) == (32, 4, 64 << 20)
    assert series_size(llama, 1, 0, None) == (1, 64, 2 << 20)
    assert series_size(llama, 512, 0, None) == (512, 2, 1 << 30)
    assert series_size(hybrid, 3, 0, 5) == (2, 5, 2 * 2 * 36 * 8192)


@pytest.mark.parametrize(
    "options",
    [
        ("--blocks", "513"),
        ("--bytes", "5GiB"),
        ("--bytes", "4MiB", "--blocks", "8"),
        ("--transfers", "65"),
        ("--layouts", "crooked"),
    ],
)
def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    assert main([*SIMULATED, *options]) == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_field_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    options = ("--quick", "--model", "llama-3.1-8b", "--layouts", "plane-major", "--repeats", "2")
    fields = run_json(capsys, "bench", "field", *options, *on_gpu)
    assert fields["wrong_rows"] == 0
    assert len(fields["comparisons"]) == 6
    limits = [each for each in fields["cells"] if each["method"] == CONTIGUOUS_COPY]
    assert all(each["rounds_compute_ended"] < each["rounds"] for each in limits)
    busy = [each for each in fields["cells"] if each["situation"] == "large-products" and each["gb_per_s"]]
    assert all(each["product_alone_us"] > 0 for each in busy)
