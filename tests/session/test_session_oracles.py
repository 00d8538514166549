"""Other readers open what `save` has written: that of safetensors, and that of the page about the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import Kind, talk, values_of, world
from documents import snippets

from kvoffload.session import session_file

KIND, TOKENS = Kind(groups=2, factor=2), talk(0, 12)


def saved(path: Path) -> Path:
    with world(KIND, capacity=8) as each:
        each.store(TOKENS)
        each.save(path, TOKENS)
    return path


def test_safetensors_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors")
    monkeypatch.setattr(session_file, "SEGMENT_BYTES", 5 * sum(each[0].nbytes for each in values_of(KIND, TOKENS)))
    path = saved(tmp_path / "file")
    with safetensors.safe_open(path, framework="np") as file:
        metadata = file.metadata()
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        tokens = file.get_tensor("tokens")
        shapes = {name: (each.get_dtype(), each.get_shape()) for name, each in found.items()}
    assert (tokens.reshape(-1) == TOKENS).all()
    assert metadata["format"] == session_file.FORMAT
    assert metadata["version"] == session_file.VERSION
    assert all(isinstance(value, str) for value in metadata.values())
    raw = path.read_bytes()
    tensors = {name: each["data"] for name, each in safetensors.deserialize(raw)}
    for group, values in enumerate(values_of(KIND, TOKENS)):
        parts = []
        for first in (0, 5, 10):
            dtype, shape = shapes[f"blocks.{group}.{first}"]
            assert dtype == "BF16"
            parts.append(np.frombuffer(tensors[f"blocks.{group}.{first}"], np.uint16).reshape(shape))
        assert (np.concatenate(parts) == values).all()


def test_the_reader_of_the_page_reads_what_a_cache_has_saved(tmp_path: Path) -> None:
    path, names = saved(tmp_path / "file"), dict[str, Any]()
    (code,) = [each.code for each in snippets() if each.name == "session reader"]
    exec(code, names)
    values = values_of(KIND, TOKENS)
    for cut in (None, -1 - values[1].nbytes // 2, 100_000):
        path.write_bytes(path.read_bytes()[:cut])
        said, tokens, blocks = names["read_session"](path)
        kept = len(tokens) // 4
        with session_file.SessionFile(path) as file:
            assert kept == file.whole
        assert said["identity"] == '{"model":"m","revision":"1"}'
        assert (tokens == TOKENS[: 4 * kept]).all()
        assert all((found == right[:kept]).all() for found, right in zip(blocks, values, strict=True))
