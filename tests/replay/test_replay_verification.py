"""The verification of `replay` is real: a wrong byte is found, wherever it went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_oracles import generated_trace, keys_of, write_trace
from replaying import HYBRID, TINY, replay

import kvoffload
from kvoffload.cache.reservations import CacheJob
from kvoffload.cache.tiering.promotion import Promotion
from kvoffload.driver import address_of
from kvoffload.replay.verified import VerifiedCache
from kvoffload.testing import SimulatedDriver, check_clean_close


def flip(array: Any, index: Any) -> None:
    array[index] ^= 1


@pytest.fixture
def one_flipped_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of the pool goes wrong when the first request that stored something has ended."""
    steps = VerifiedCache.steps
    done: list[bool] = []

    def steps_then_flip(self: VerifiedCache, keys: Sequence[bytes], lane: int = 0) -> Iterator[CacheJob | Promotion]:
        yield from steps(self, keys, lane)
        if self.counts.blocks_stored and not done:
            flip(self.engine.slots, (0, self.layout.groups[0].payload_bytes - 1))
            done.append(True)

    monkeypatch.setattr(VerifiedCache, "steps", steps_then_flip)


@pytest.mark.usefixtures("one_flipped_byte")
def test_a_byte_that_went_wrong_in_the_pool_is_counted_and_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3], [1, 2, 3]])
    code, fields = replay(capsys, path, "--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4)
    assert (code, fields["verified_blocks"], fields["corrupt_blocks"]) == (1, 3, 1)


@pytest.mark.usefixtures("one_flipped_byte")
def test_a_byte_that_went_wrong_is_caught_while_requests_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3]] * 12)
    options = ("--model", "qwen2.5-0.5b", "--scale", 0.01, "--slots", 4, "--in-flight", 4)
    code, fields = replay(capsys, path, *options)
    loads = fields["blocks_hit"] // 3
    assert (code, fields["blocks_stored"], fields["verified_blocks"]) == (1, 3, 3 * loads)
    assert 8 <= loads <= 11
    assert loads - 3 <= fields["corrupt_blocks"] <= loads  # up to three began before the byte went wrong


def test_a_load_that_copies_nothing_is_caught(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with VerifiedCache(device, HYBRID, capacity=8, longest=4) as served:
        served.serve([b"1", b"2"])
        load = served.cache.load
        monkeypatch.setattr(served.cache, "load", lambda *_, after: load([], [[], []], after=after))
        served.serve([b"1", b"2"])
        assert served.counts.corrupt_blocks == 2


def test_the_readback_plane_by_plane_catches_what_the_engines_agree_on(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.replay.verified.SAMPLE_EVERY", 1)
    monkeypatch.setattr(
        "kvoffload.internal.patterns.KeyPatterns.wrong", lambda *_: []
    )  # as if the comparison were blind
    with VerifiedCache(device, TINY, capacity=8, longest=4, blocks_per_key=2) as served:
        served.serve([b"1", b"2", b"3"])
        served.serve([b"1", b"2", b"3"])
        assert (served.counts.sampled_blocks, served.counts.corrupt_blocks) == (3, 0)
        flip(served.engine.slots, (1, 17))
        served.serve([b"1", b"2", b"3"])
        assert (served.counts.sampled_blocks, served.counts.corrupt_blocks) == (6, 1)


def test_poison_reaches_every_block_that_a_load_is_about_to_write(device: kvoffload.Device) -> None:
    with VerifiedCache(device, HYBRID, capacity=8, longest=3) as served:
        places = np.array([2, 0])
        served._poison(places)
        for group in served.layout.groups:
            for plane in group.planes:
                for place in places.tolist():
                    found = np.empty(plane.block_bytes, dtype=np.uint8)
                    with device.current():
                        address = plane.address + place * plane.block_stride
                        device.driver.copy_to_host(address_of(found), address, found.nbytes)
                    assert (found == 0xA5).all()


@pytest.mark.parametrize("level", [((12, 4), (12, 9)), ((13, 0), (13, 5))], ids=["no-batch-calls", "raw-addresses"])
def test_replay_is_right_at_other_capability_levels(level: Any, seed: int) -> None:
    device = kvoffload.open_device(
        backend=SimulatedDriver(seed=seed, driver_version=level[0], bindings_version=level[1])
    )
    trace = generated_trace(seed, requests=40)
    with VerifiedCache(device, HYBRID, capacity=20, longest=max(map(len, trace)), seed=seed) as served:
        for ids in trace:
            served.serve(keys_of(ids))
        assert served.counts.corrupt_blocks == 0
        assert served.counts.verified_blocks > 0
    check_clean_close(device)
