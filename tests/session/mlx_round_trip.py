"""A prompt cache of mlx-lm through a session file and back, in mlx-lm itself: bytes, and logits of the next tokens.

It needs mlx and mlx-lm (0.32 or newer), but neither a GPU nor model weights. Where they are installed:

    pip install 'mlx[cpu]' mlx-lm numpy xxhash cuda-bindings platformdirs
    PYTHONPATH=. python tests/session/mlx_round_trip.py
"""
# mypy: disable-error-code="import-not-found, no-any-unimported"

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

import kvoffload
from kvoffload.commands import main
from kvoffload.session.mlx_cache import PLANES

LAYERS, HEADS, DIM, VOCABULARY = 3, 2, 32, 500
GIVEN: dict[str, Any] = {"salt": "anna", "identity": {"model": "random llama", **PLANES}}


def logits(model: Model, cache: list[Any], steps: int = 8) -> bytes:
    """The bytes of the logits of a prompt of three tokens, and of the likeliest tokens after it."""
    found, token = [], [5, 6, 7]
    for _ in range(steps):
        out = model(mx.array([token]), cache=cache)[0, -1]
        found.append(np.array(out.astype(mx.float32)).tobytes())
        token = [int(mx.argmax(out))]
    return b"".join(found)


def round_trip(folder: Path, dtype: mx.Dtype, length: int, trimmed: int) -> None:
    mx.random.seed(length)
    arguments = ModelArgs(
        model_type="llama", hidden_size=128, num_hidden_layers=LAYERS, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=HEADS, rms_norm_eps=1e-5, vocab_size=VOCABULARY,
    )  # fmt: skip
    model = Model(arguments)
    model.set_dtype(dtype)
    tokens = np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=cache))
    trim_prompt_cache(cache, trimmed)
    tokens = tokens[: length - trimmed]
    full = len(tokens) // 16 * 16
    source, file, back, ids = (folder / name for name in ("a.safetensors", "chat.kv", "b.safetensors", "tokens.json"))
    save_prompt_cache(str(source), cache, {"mine": "kept out"})
    ids.write_text(json.dumps(tokens))
    words = ["--tokens", str(ids), "--identity", "model=random llama", "--salt", "anna"]
    assert main(["session", "convert", str(source), str(file), *words]) == 0
    assert main(["session", "verify", str(file)]) == 0
    assert main(["session", "convert", str(file), str(back)]) == 0
    loaded, metadata = load_prompt_cache(str(back), return_metadata=True)
    assert metadata == GIVEN["identity"], metadata
    assert [each.offset for each in loaded] == [full] * LAYERS

    expected = [[np.array(each[0, :, :full].view(mx.uint8)) for each in (one.keys, one.values)] for one in cache]
    got = [[np.array(each[0, :, :full].view(mx.uint8)) for each in (one.keys, one.values)] for one in loaded]
    assert np.array_equal(expected, got)
    restored(file, tokens, str(dtype).rpartition(".")[2], expected)

    trim_prompt_cache(cache, len(tokens) - full)
    same = logits(model, cache) == logits(model, loaded)
    print(f"{dtype}, {len(tokens)} tokens, {full} in full blocks: bytes equal, logits {'equal' if same else 'DIFFER'}")
    assert same
    different = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens[:full][::-1]]), cache=different))
    assert logits(model, different) != logits(model, load_prompt_cache(str(back))), "the comparison sees nothing"


def restored(file: Path, tokens: list[int], dtype: str, expected: list[list[np.ndarray]]) -> None:
    """Restore the session file into a cache with an array of keys and values for each layer, and compare."""
    count = len(tokens) // 16
    with kvoffload.open_device(backend="simulated") as device:
        arrays = [device.empty((2, count, 16, HEADS, DIM), dtype) for _ in range(LAYERS)]
        axes = ("planes", "blocks", "tokens", "heads", "dim")
        with kvoffload.open_cache(arrays, axes=axes, pool_bytes="16MiB") as cache:
            assert cache.restore(file, **GIVEN) == (count * 16, count * 16, "")
            job = cache.fetch(cache.keys(tokens, salt="anna"), list(range(count)))
            job.wait()
            assert job.hits == count
            for array, layer in zip(arrays, expected, strict=True):
                blocks = array.buffer.to_numpy().reshape(2, count * 16, HEADS, -1)
                assert all(
                    np.array_equal(plane.swapaxes(0, 1), part) for plane, part in zip(blocks, layer, strict=True)
                )


if __name__ == "__main__":
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        for length, trimmed in ((53, 0), (256, 0), (700, 0), (700, 399)):
            with tempfile.TemporaryDirectory() as folder:
                round_trip(Path(folder), dtype, length, trimmed)
