"""`bench growth`: bytes while pools grow and afterwards; wrong bytes are counted; no times here."""

from __future__ import annotations

from contextlib import ExitStack, closing

import numpy as np
import pytest
from benching import run_json, times_in

from kvoffload import NO_WAIT, Growing, open_device
from kvoffload_bench.growth import GROWING, PINNED, Gpu, Run
from kvoffload_bench.harness import SMALL, Lab
from kvoffload_bench.sharded import ShardSize

SIZE = ShardSize(4, 256, 2, 1)


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_pool_is_verified_while_it_grows_and_afterwards(capsys: pytest.CaptureFixture[str], gpus: int) -> None:
    fields = run_json(capsys, "bench", "growth", "--backend", "simulated", "--gpus", str(gpus))
    methods = [each["method"] for each in fields["pools"]]
    assert methods == ["at once", "pieces of 64.0 KiB", "pieces of 16.0 KiB"]
    assert all(each["pinning_error"] is None for each in fields["pools"])
    seen = [(each["method"], each["situation"], each["direction"]) for each in fields["transfers_of_pools"]]
    for method in methods:
        assert (method, PINNED, "store") in seen
        assert (method, PINNED, "load") in seen
    assert ("at once", GROWING, "store") not in seen
    assert all(each["count"] >= 1 for each in fields["transfers_of_pools"])
    assert (fields["gpus"], fields["wrong_rows"]) == (gpus, 0)
    assert times_in(fields) == []


def test_what_is_not_copied_is_counted(seed: int) -> None:
    with ExitStack() as undo:
        device = undo.enter_context(open_device(backend="simulated"))
        lab = undo.enter_context(Lab(device, SMALL, repeats=1, seed=seed))
        gpu = undo.enter_context(Gpu(lab, SIZE, seed))
        run = Run([gpu], SIZE, Growing(1 << 16, piece_bytes=1 << 14), seed)
        with closing(run.engine):
            run.first_store()
            run.until_pinned()
            rows = [run.engine.slots[0][slot, : SIZE.row_bytes] for slot in (0, 1)]
            gpu.poison()
            gpu.poison(rows)
            assert (gpu.wrong(), gpu.wrong(rows)) == (2, 2)
            run.engine.store(np.arange(2), [0, 1], after=NO_WAIT).wait()
            run.engine.load([0, 1], np.arange(2) + 2, after=NO_WAIT).wait()
            assert (gpu.wrong(), gpu.wrong(rows)) == (0, 0)
            rows[1][-1] ^= 1
            assert gpu.wrong(rows) == 1
