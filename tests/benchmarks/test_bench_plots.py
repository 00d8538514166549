"""Figures of saved results: which files, from which results, and where the labels of lines go."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from printed import GPU

from kvoffload.commands import main
from kvoffload.terminal import figures
from kvoffload.terminal.console import CommandError
from kvoffload_bench import plots
from kvoffload_bench.plots import headline_of

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not here")

MADE_UP = GPU | {"repeats": 5}


def transfer_row(**fields: Any) -> dict[str, Any]:
    row = {"model": "m", "placement": "folded", "planes": 64, "block_bytes": 4096, "blocks_per_slot": 1}
    row |= {"row_bytes": 4096, "blocks": 1, "copies": 64, "nbytes": 1 << 18, "direction": "store"}
    rates = {"choice, overlap": 40.0, "strided": 40.0, "flat batch": 5.0, "contiguous copy": 50.0}
    return row | {"gb_per_s": rates} | fields


def sweep() -> dict[str, Any]:
    rows = [
        transfer_row(placement=placement, direction=direction, row_bytes=nbytes, block_bytes=nbytes, copies=copies)
        for placement in ("folded", "scattered")
        for direction in ("store", "load")
        for nbytes in (4096, 8192)
        for copies in (64, 4096)
    ]
    return {"benchmark": "sweep", "transfers": rows, **MADE_UP}


def field() -> dict[str, Any]:
    cells = [
        {"model": "m", "layout": layout, "situation": situation, "direction": direction, "method": method}
        | {"blocks": 32, "planes": 64, "block_bytes": 4096, "gb_per_s": rate}
        for layout in ("block-major", "plane-major")
        for situation in ("idle", "large-products")
        for direction in ("store", "load", "both")
        for method, rate in {"choice": 40.0, "flat batch": None, "batch": 45.0, "contiguous copy": 50.0}.items()
    ]
    for cell in cells:
        if cell["situation"] != "idle":
            cell["compute_slowdown"] = 1.25
    return {"benchmark": "field", "cells": cells, **MADE_UP}


def save(folder: Path, **results: dict[str, Any]) -> list[str]:
    names = []
    for name, fields in results.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
        names.append(str(folder / f"{name}.json"))
    return names


@needs_matplotlib
def test_bench_plot_draws_every_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = save(tmp_path, sweep=sweep(), field=field())
    target = tmp_path / "new" / "figures"
    assert main(["bench", "plot", *files, "--output", str(target)]) == 0
    written = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert written == {path.name for path in target.iterdir()}
    assert written == {*("bandwidth-store.png", "bandwidth-load.png", "field.png")}
    for path in target.iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000


@needs_matplotlib
def test_a_bar_says_what_computation_loses() -> None:
    figure = headline_of(field())
    titles = [panel.get_title() for panel in figure.axes]
    assert titles == ["idle GPU", "products, 8192 x 8192"]
    idle, busy = ([text.get_text().strip() for text in panel.texts] for panel in figure.axes)
    assert idle == ["50", "40", "40", "outlasted the computation", "not measured"]
    assert busy[:3] == ["50   x1.25", "40   x1.25", "40   x1.25"]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "the limit: contiguous copies"
    assert labels[-1].startswith("grid-stride")


@needs_matplotlib
@pytest.mark.parametrize(("key", "value"), [("layout", "plane-major"), ("direction", "store")])
def test_there_is_no_headline_of_one_layout_or_without_loads(key: str, value: str) -> None:
    fields = field()
    fields["cells"] = [cell for cell in fields["cells"] if cell[key] == value]
    assert headline_of(fields) is None


@needs_matplotlib
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is no result of"),
        (json.dumps(sweep() | {"simulated": True}), "has no times to draw"),
        ("", "cannot be read as JSON"),
        (json.dumps({"benchmark": ["sweep"]}), "is no result of"),
        (json.dumps({"benchmark": "sweep", **MADE_UP}), "KeyError: 'transfers'"),
        (json.dumps(sweep() | {"transfers": []}), "is no complete result of `bench sweep`"),
        (json.dumps(sweep() | {"transfers": [1]}), "result.json is no complete result of `bench sweep`"),
        (json.dumps(field() | {"cells": [{}]}), "result.json is no complete result of `bench field`"),
        (json.dumps({"benchmark": "submit", **MADE_UP}), "there is nothing to draw in results of: submit"),
    ],
)
def test_bench_plot_refuses_what_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    assert main(["bench", "plot", str(file), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@needs_matplotlib
def test_bench_plot_names_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (taken,) = save(tmp_path, sweep=sweep())
    assert main(["bench", "plot", taken, "--output", taken]) == 2
    assert taken in capsys.readouterr().err


@needs_matplotlib
def test_bench_plot_refuses_two_results_of_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = save(tmp_path, one=sweep(), two=field(), three=sweep())
    assert main(["bench", "plot", *files, "--output", str(tmp_path / "out")]) == 2
    assert f"{files[0]} and {files[2]} are both results of `bench sweep`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bench_submit_has_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "submit", "--backend", "simulated", "--plot", str(tmp_path)]) == 2
    assert "--plot" in capsys.readouterr().err


def test_a_folder_for_figures_is_tried(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert list(figures.require_folder(str(tmp_path / "new")).iterdir()) == []
    with pytest.raises(CommandError, match="no figures can be written into"):
        figures.require_folder(str(tmp_path / "file" / "new"))


def test_without_matplotlib_the_command_says_what_to_install_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.terminal.figures.find_spec", lambda _: None)
    files = save(tmp_path, sweep=sweep())
    for command in (("plot", *files, "--output", str(tmp_path)), ("sweep", "--plot", str(tmp_path))):
        assert main(["bench", *command]) == 2
        assert "pip install 'kvoffload[plot]'" in capsys.readouterr().err


@needs_matplotlib
def test_a_figure_names_the_gpu_and_labels_every_line() -> None:
    figure = plots.bandwidth_of(sweep(), "load")
    texts = [text.get_text() for text in figure.texts]
    assert any(GPU["device"] in text and GPU["link"] in text for text in texts)
    assert any("medians of 5 rounds or more" in text for text in texts)
    assert "host to GPU (load): 4096 copies" in figure.get_suptitle()
    for panel in figure.axes:
        labels = {text.get_text() for text in panel.texts}
        assert labels == {
            "kvoffload's choice",
            "strided, no SM",
            "one flat batch",
            "the link: one contiguous copy, 50 GB/s",
        }
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["4 KiB", "8 KiB"]
    assert plots.bandwidth_of(sweep(), "store") is not None


def test_labels_keep_apart_and_near_their_lines() -> None:
    ends = {"a": 50.0, "b": 50.5, "c": 10.0, "d": 49.0, "e": 0.1}
    places = figures.spread(ends, gap=3.0, top=55.0)
    heights = sorted(height for _, height in places.values())
    assert all(high - low >= 3.0 - 1e-9 for low, high in itertools.pairwise(heights))
    assert places["c"] == (10.0, 10.0)
    assert [name for name, _ in sorted(places.items(), key=lambda item: item[1][1])] == ["e", "c", "d", "a", "b"]
    assert max(abs(value - height) for value, height in places.values()) < 4
    assert max(heights) <= 55.0
