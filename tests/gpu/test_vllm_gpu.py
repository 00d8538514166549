"""kvoffload.vllm on a GPU, without vLLM: its spec over torch's tensors and streams; a disk below a worker's slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiering import SECONDS
from vllm_host import CHUNKS, content, server, with_disk
from vllm_parts import keys

import kvoffload  # isort: split

from vllm.v1.kv_offload.base import LookupResult

from kvoffload import CacheIndex

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # torch warns when it is imported


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.node.name} {tmp_path}"


def test_chunks_are_stored_and_loaded_after_what_torch_has_queued(each_device: kvoffload.Device, engine: str) -> None:
    """The model's work is under way when the store is submitted, and again when the load is."""
    with server(each_device, engine) as bench:
        for _ in range(1 if each_device.simulated else 3):
            bench.store([1, 2, 3, 4], queued=True)
            bench.cache.write({0: content(99), 1: content(98)}, queued=True)
            bench.check([3, 1])
            bench.check([2, 4], expedited=True)
            assert bench.manager.index.remove(keys(1, 2, 3, 4)) == 4


def test_chunks_come_back_from_a_disk_below_the_worker(
    each_device: kvoffload.Device, tmp_path: Path, engine: str
) -> None:
    with server(each_device, engine, **with_disk(tmp_path)) as bench:
        assert isinstance(bench.manager.index, CacheIndex)
        for first in range(0, 3 * CHUNKS, 8):
            bench.store(range(first, first + 8), queued=first == 0)
            assert bench.index.drain(SECONDS)
        assert bench.index.locate(keys(0, 3 * CHUNKS - 1, 99)) == ["disk", "host", "missing"]
        for first in range(0, 3 * CHUNKS, 4):
            bench.check(range(first, first + 4))
        bench.check([40, 7, 21, 0])
        [tier] = bench.index.tier_statistics()
        assert (tier.written, tier.not_written, tier.dropped, tier.opened) == (3 * CHUNKS, 0, 0, 0)
        assert tier.promoted >= 2 * CHUNKS
        bench.index.clear(below=False)
        bench.check([5, 6])
        context = bench.context([5, 99])
        assert bench.look_up([5, 99], context) == [LookupResult.HIT, LookupResult.MISS]
        bench.manager.on_request_finished(context)


def test_a_second_engine_finds_the_chunks_of_the_first(
    each_device: kvoffload.Device, tmp_path: Path, engine: str
) -> None:
    with server(each_device, engine, **with_disk(tmp_path)) as bench:
        bench.store(range(8))
        assert bench.index.drain(SECONDS)
    with server(each_device, f"{engine} 2", **with_disk(tmp_path)) as bench:
        bench.check(range(8))
