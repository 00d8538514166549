"""What a model would write into a KV cache, so that every byte that it reads can be compared; under vLLM's scheduler.

The bytes of a token depend on all tokens up to it, on the layer, and on the worker. A sampled token depends on all
tokens before it, so a request that is computed again samples the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Prefixes = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_VOCABULARY = 900


def _mixed(value: Any) -> Any:
    """A hash of numbers of 64 bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Sequence:
    """The tokens of a request, and as many sampled ones as are asked for.

    Attributes:
        prompt: its tokens.
    """

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self._tokens = list(prompt)
        self._prefixes: list[int] = []

    def token(self, position: int) -> int:
        """The token at a position; one behind the prompt is sampled, from what is before it."""
        while len(self._tokens) <= position:
            self._tokens.append(5 + int(self.prefixes(len(self._tokens))[-1]) % (_VOCABULARY - 5))
        return self._tokens[position]

    def prefixes(self, end: int) -> Prefixes:
        """uint64, (end,): a hash of the tokens up to each, itself included."""
        if end:
            self.token(end - 1)
        with np.errstate(over="ignore"):
            while len(self._prefixes) < end:
                before = np.uint64(self._prefixes[-1] if self._prefixes else 0)
                token = np.uint64(self._tokens[len(self._prefixes)])
                self._prefixes.append(int(_mixed(before * np.uint64(31) + token + _STEP)))
        return np.array(self._prefixes[:end], dtype=np.uint64)


def content(prefixes: Prefixes, layers: int, token_bytes: int, salt: int) -> Bytes:
    """uint8, (tokens, layers, token_bytes): what the model writes for tokens with these prefixes."""
    with np.errstate(over="ignore"):
        places = np.arange(layers * token_bytes // 8, dtype=np.uint64) * _STEP + np.uint64(salt)
        words: Prefixes = _mixed(prefixes[:, np.newaxis] + places[np.newaxis, :])
    return words.view(np.uint8).reshape(len(prefixes), layers, token_bytes)
