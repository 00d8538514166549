"""`benchmarks/marshal.py`: runs as a program, without a GPU; its driver is given every descriptor."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.driver import FlatTable, SourceOrder

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "marshal.py"


@pytest.mark.parametrize("options", [("--json",), ()])
def test_marshal_counts_nanoseconds_without_a_gpu(options: tuple[str, ...]) -> None:
    command = [sys.executable, str(PROGRAM), "--repeats", "2", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    if not options:
        assert "per descriptor" in done.stdout
        return
    fields = json.loads(done.stdout)
    assert fields["descriptors"] >= 1024
    assert fields["operations"] >= 128
    assert (fields["descriptor_bar_ns"], fields["operation_bar_ns"]) == (25.0, 50.0)
    for what in ("descriptor", "operation"):
        assert 0 < fields[f"{what}_best_ns"] <= fields[f"{what}_ns"]


def test_the_idle_driver_is_given_every_descriptor() -> None:
    spec = util.spec_from_file_location("marshal_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = util.module_from_spec(spec)
    spec.loader.exec_module(program)
    driver = program.idle_driver()
    seen: list[tuple[list[Any], list[Any], list[int], int]] = []

    def keep(*given: Any) -> tuple[int]:
        seen.append(given[:4])
        return (0,)

    driver.intercept("cuMemcpyBatchAsync", lambda _: keep)
    table = FlatTable(8)
    targets, sources, sizes = np.arange(24, dtype=np.uint64).reshape(3, 8)
    table.fill(targets, sources, sizes)
    driver.copy_batch(table, 2, 7, SourceOrder.STREAM, 16)
    ((given_targets, given_sources, given_sizes, count),) = seen
    assert [int(each) for each in given_targets] == targets[2:7].tolist()
    assert [int(each) for each in given_sources] == sources[2:7].tolist()
    assert (given_sizes, count) == (sizes[2:7].tolist(), 5)
