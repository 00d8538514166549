"""Byte-level BPE as GPT-2 has it, with SmolLM2's rule that each digit is a word, and its chat template."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # if the messages begin with none

# GPT-2's rule, over ASCII characters (see `_stand_in`). A space goes to the word after it, but never to a digit.
_WORD = re.compile(r"[0-9]|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+", re.ASCII)
_MOST_REMEMBERED = 64  # characters of a word whose tokens are remembered: some clients send words of 100 KB


@lru_cache(4096)
def _stand_in(character: str) -> str:
    """An ASCII character of the same class: a letter, a digit, whitespace, or anything else."""
    if character.isascii():
        return character
    if character.isspace():
        return "\t"
    return {"L": "A", "N": "0"}.get(unicodedata.category(character)[0], "!")


def words(text: str) -> list[str]:
    """The pieces of a text that are tokenized on their own."""
    shape = "".join(map(_stand_in, text))
    return [text[match.start() : match.end()] for match in _WORD.finditer(shape)]


def _letters() -> dict[int, str]:
    """The character that stands for each byte in the vocabulary: itself if it can be seen, else one from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (byte for byte in range(256) if byte not in seen)
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


_LETTERS = _letters()


class Tokenizer:
    """Text to token ids and back.

    Args:
        metadata: of a GGUF file: `tokenizer.ggml.*`.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        bytes_of = {letter: byte for byte, letter in _LETTERS.items()}
        special = [kind == 3 for kind in metadata["tokenizer.ggml.token_type"]]  # <|im_start|> and so on
        self._bytes = [
            b"" if hidden else bytes(bytes_of[letter] for letter in token)
            for token, hidden in zip(tokens, special, strict=True)
        ]
        self.longest = max(map(len, self._bytes))  # bytes of a token
        self._start, self._end = self._ids["<|im_start|>"], self._ids["<|im_end|>"]
        self.stop = frozenset({self._end, self._ids["<|endoftext|>"]})
        self._remembered = lru_cache(1 << 13)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Names of special tokens in it are text like any other: no user can end a message. Bytes that
        the vocabulary lacks, of characters that are hardly used, are left out.
        """
        found: list[int] = []
        for word in words(text):
            found += self._remembered(word) if len(word) <= _MOST_REMEMBERED else self._merge(word)
        return found

    def _merge(self, word: str) -> tuple[int, ...]:
        """Ids of a word: of all neighbours, those whose merge was learned first become one piece, again and again."""
        pieces = [_LETTERS[byte] for byte in word.encode(errors="replace")]
        before, after = list(range(-1, len(pieces) - 1)), list(range(1, len(pieces) + 1))  # each one's neighbours
        queue: list[tuple[int, int, tuple[str, str]]] = []

        def offer(left: int) -> None:
            right = after[left] if left >= 0 else len(pieces)
            if right < len(pieces) and (pair := (pieces[left], pieces[right])) in self._ranks:
                heappush(queue, (self._ranks[pair], left, pair))

        for place in range(len(pieces)):
            offer(place)
        while queue:
            _, left, pair = heappop(queue)
            right = after[left]
            if right == len(pieces) or (pieces[left], pieces[right]) != pair:
                continue  # one of them has been merged since
            pieces[left], pieces[right] = "".join(pair), ""
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            offer(left)
            offer(before[left])
        return tuple(self._ids[piece] for piece in pieces if piece in self._ids)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt for the assistant's next message. Each message has a role and a content."""
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        prompt: list[int] = []
        for message in messages:
            prompt += [self._start, *self.encode(f"{message['role']}\n{message['content']}"), self._end]
            prompt += self.encode("\n")
        return [*prompt, self._start, *self.encode("assistant\n")]

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.bytes_of, tokens)).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """b"" for special tokens, and those that other geometries have beyond the vocabulary."""
        return self._bytes[token] if token < len(self._bytes) else b""


class Stream:
    """Decodes token by token. A character whose bytes are split between tokens comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, token: int | None) -> str:
        """The text that this token completes; None: the rest, at the end."""
        return self._decoder.decode(b"" if token is None else self._bytes_of(token), final=token is None)
