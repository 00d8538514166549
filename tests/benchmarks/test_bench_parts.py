"""`bench parts`: every load verified, whatever its parts; no times from the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from benching import run_json

import kvoffload
from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload.tuning import CopierName
from kvoffload_bench import layer_groups as parts
from kvoffload_bench.harness import SMALL, WARM_UP, Lab
from kvoffload_bench.setup import TransferSetup

SIMULATED = ("bench", "parts", "--backend", "simulated")
TIMES = ("call_us", "first_us", "all_us", "gpu_us", "gb_per_s")
COUNTS = [1, 2, 4, 8, 16, 32]


def test_bench_parts_verifies_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, *SIMULATED)
    assert [(row["blocks"], row["parts"]) for row in fields["parts"]] == [
        (blocks, count) for blocks in (2, 16) for count in COUNTS
    ]
    for row in fields["parts"]:
        assert (row["model"], row["planes"], row["block_bytes"]) == ("llama-3.1-8b", 64, 512)
        assert row["nbytes"] == row["blocks"] * 64 * 512
        assert row["copier"] in ("strided", "batch", "loop")
        assert row["wrong"] == 0
        assert not set(row) & set(TIMES), "no time is a GPU's"
    assert (fields["benchmark"], fields["simulated"], fields["wrong_rows"]) == ("parts", True, 0)


def test_bench_parts_of_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """On the simulated device it carries what it is asked to carry."""
    options = ("--blocks", "16", "--parts", "1,4", "--copier", "strided", "--repeats", "1")
    fields = run_json(capsys, *SIMULATED, *options)
    assert [(row["parts"], row["copier"], row["wrong"]) for row in fields["parts"]] == [
        (1, "strided", 0),
        (4, "strided", 0),
    ]


def test_bench_parts_counts_wrong_bytes_of_every_round_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_block_less(setup: TransferSetup, count: int, _: str | None) -> kvoffload.Job:
        (part,) = setup.groups
        stop = -1 if count == 2 else None
        return setup.engine.load(part.slots[:stop], part.blocks[:stop], after=kvoffload.NO_WAIT, parts=count)

    monkeypatch.setattr(parts, "load", one_block_less)
    fields = run_json(capsys, *SIMULATED, "--blocks", "64", "--parts", "1,2,4", "--repeats", "2", code=1)
    assert [row["wrong"] for row in fields["parts"]] == [0, 64 * (WARM_UP + 2), 0]
    assert fields["wrong_rows"] == 64 * (WARM_UP + 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parts", "3"), "--parts 3 does not divide the 64 planes of llama-3.1-8b: give divisors"),
        (("--copier", "pack"), "invalid choice: 'pack'"),
        (("--model", "gpt-oss-20b"), "gpt-oss-20b has 2 groups"),
    ],
)
def test_bench_parts_refuses_bad_options(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert main([*SIMULATED, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Lab]:
    """A lab on a simulated device that says it is none, so that times are kept."""
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    size = SMALL._replace(contiguous_bytes=1 << 16)
    with Lab(device, size, repeats=3, seed=seed) as lab, monkeypatch.context() as patch:
        patch.setattr(device, "simulated", False)
        yield lab
    check_clean_close(device)


def test_times_are_medians_of_the_counted_rounds(pretending: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    ordered: list[int | None] = []
    load, order_before = parts.load, kvoffload.Job.order_before

    def noted_order(job: kvoffload.Job, stream: Any, *, part: int | None = None) -> None:
        ordered.append(part)
        order_before(job, stream, part=part)

    def noted(setup: TransferSetup, count: int, copier: CopierName | None) -> kvoffload.Job:
        seen.append((count, "setup" if len(setup.groups[0].blocks) == 20 else "small_setup"))
        return load(setup, count, copier)

    monkeypatch.setattr(parts, "load", noted)
    monkeypatch.setattr(kvoffload.Job, "order_before", noted_order)
    geometry = MODELS["llama-3.1-8b"].scaled(1 / 64)
    with TransferSetup(pretending, geometry, count=20, staging_bytes=0) as setup, setup.smaller() as small_setup:
        with closing(parts._Watch(pretending)) as watch:
            rows: list[dict[str, Any]] = list(parts._measure(setup, small_setup, watch, [1, 4], None))
        assert seen.count((4, "setup")) == seen.count((4, "small_setup")) == WARM_UP + 3
        assert seen.index((4, "small_setup")) < seen.index((4, "setup")), "it warms up the caches"
    assert ordered == [0, None] * 2 * (WARM_UP + 3)
    for row in rows:
        assert row["wrong"] == 0
        assert all(np.isfinite(row[name]) for name in TIMES)
        assert min(row["call_us"], row["gpu_us"]) > 0
        assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["gpu_us"] / 1e3)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_bench_parts_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    fields = run_json(capsys, "bench", "parts", "--repeats", "3", *on_gpu)
    assert (fields["simulated"], fields["wrong_rows"]) == (False, 0)
    assert [(row["blocks"], row["parts"]) for row in fields["parts"]] == [(n, c) for n in (32, 256) for c in COUNTS]
    for row in fields["parts"]:
        assert all(np.isfinite(row[name]) for name in TIMES), "two streams of a GPU that others use may be in any order"
        assert min(row["call_us"], row["gpu_us"], row["gb_per_s"]) > 0
        if row["parts"] > 1:
            assert row["copier"] in ("strided", "batch", "loop")
