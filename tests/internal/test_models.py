"""The geometries and the byte patterns that follow from keys."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvoffload.internal.models import MODELS, ModelGeometry, find_model
from kvoffload.internal.patterns import KeyPatterns, word_of

# name: (planes, block bytes per plane, groups), as published benchmarks give them
EXPECTED = {
    "llama-3.1-8b": (64, 32768, 1),
    "llama-3.1-70b-tp4": (160, 8192, 1),
    "qwen2.5-0.5b": (48, 4096, 1),
    "gpt-oss-20b": (48, 16384, 2),
    "gpt-oss-120b-tp2": (72, 8192, 2),
    "deepseek-v3-mla": (61, 18432, 1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_has_its_planes_block_bytes_and_groups(name: str) -> None:
    model = MODELS[name]
    assert (model.planes, model.block_bytes, len(model.groups)) == EXPECTED[name]


@pytest.mark.parametrize("model", MODELS.values(), ids=str)
def test_groups_share_the_planes_equally(model: ModelGeometry) -> None:
    assert sum(model.planes_per_group) == model.planes
    assert len(set(model.planes_per_group)) == 1
    assert model.bytes_per_block == model.planes * model.block_bytes


@pytest.mark.parametrize("factor", [1e-6, 0.01, 0.3, 1.0])
def test_scaled_block_bytes_are_rounded_up_to_16(factor: float) -> None:
    for model in MODELS.values():
        scaled = model.scaled(factor)
        exact = model.block_bytes * factor
        assert scaled.block_bytes % 16 == 0
        assert exact <= scaled.block_bytes < exact + 16
        assert scaled.planes == model.planes


@pytest.mark.parametrize("factor", [0, -1, 1.5, float("nan")])
def test_a_scale_outside_its_range_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="scale must be above 0"):
        MODELS["llama-3.1-8b"].scaled(factor)


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-9'; known: llama-3\.1-8b, .*deepseek-v3-mla"):
        find_model("gpt-9")


# patterns -------------------------------------------------------------------------------------------------------------


def test_filled_rows_hold_the_expected_pattern_and_nothing_beyond_the_payload() -> None:
    patterns = KeyPatterns(4096 + 8, seed=3)
    rows = np.full((5, 8192), 0x5A, dtype=np.uint8)
    keys = [f"key {index}".encode() for index in range(5)]
    patterns.fill(rows, keys, group=1)
    for row, key in zip(rows, keys, strict=True):
        assert np.array_equal(row[:4104], patterns.expected(key, 1))
    assert (rows[:, 4104:] == 0x5A).all()
    assert patterns.wrong(rows, keys, 1) == []


def test_every_word_differs_between_keys_and_between_groups() -> None:
    patterns = KeyPatterns(1 << 14)
    one, other, group = (patterns.expected(*each).view(np.uint64) for each in ((b"a",), (b"b",), (b"a", 1)))
    assert (one != other).all()
    assert (one != group).all()
    assert len(np.unique(one)) == len(one)  # and no two places of a row are alike


def test_one_wrong_bit_anywhere_is_found() -> None:
    patterns = KeyPatterns(2 << 20)  # rows as big as a chunk: a thread each
    keys = [f"{index}".encode() for index in range(12)]
    rows = np.empty((12, 2 << 20), dtype=np.uint8)
    patterns.fill(rows, keys)
    rows[3, 0] ^= 1
    rows[11, -1] ^= 0x80
    assert patterns.wrong(rows, keys) == [3, 11]
    rows[[5, 6]] = rows[[6, 5]]
    assert patterns.wrong(rows, keys) == [3, 5, 6, 11]
    patterns.close()
    patterns.close()


@pytest.mark.parametrize("nbytes", [0, 4, 12, -8])
def test_a_payload_that_is_not_whole_words_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        KeyPatterns(nbytes)


def test_a_key_means_the_same_bytes_in_another_process() -> None:
    program = "from kvoffload.internal.patterns import word_of; print(int(word_of(b'key', 1)))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert int(printed.stdout) == int(word_of(b"key", 1))
