"""Conversations that are downloaded from one chat server, and go on in another."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chatting import BLOCK_BYTES, engine_of

pytest.importorskip("jax")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from chat_server import server
from chat_server.server import ChatServer, Handed
from starlette.testclient import TestClient

PATH = "/conversations"
FIRST = [{"role": "user", "content": "Tell me of the sea, of ships, and of what lies on the ground below them. " * 2}]
OTHER = [{"role": "user", "content": "Something else. " * 10}]
HTTP = {"type": "http", "asgi": {"spec_version": "2.4"}}  # of this version on, `send` raises
NEXT = {"role": "user", "content": "And of the sky?"}


class Letters:
    """A tokenizer: a token is a character, so texts are equal if their tokens are."""

    longest, stop = 1, frozenset[int]()

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return list("".join(f"{each['role']}: {each['content']}\n" for each in messages).encode("latin-1"))

    def bytes_of(self, token: int) -> bytes:
        return chr(token).encode()


@contextmanager
def serving(**options: Any) -> Iterator[TestClient]:
    tokenizer: Any = Letters()
    engine = engine_of(**options)
    with TestClient(ChatServer(engine, tokenizer, "tiny", lambda _: engine._weights).app) as there:
        yield there


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers have their temporary files; in the end there are none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("chat-")] == []


def say(to: TestClient, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """The answer, and how many tokens the prompt has, and how many of them were there."""
    told = to.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 24}).json()
    usage = told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return told["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def metric(there: TestClient, name: str) -> float:
    return float(there.get("/metrics").text.partition(f"\n{name} ")[2].partition("\n")[0])


def download(there: TestClient, messages: list[dict[str, str]]) -> bytes:
    answer = there.post(PATH, json={"messages": messages})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream"), answer.text
    return bytes(answer.content)


def refused(answer: Any, status: int, said: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"], error
    assert {*error} == {"message", "type", "code", "param"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of FIRST."""
    with pytest.MonkeyPatch.context() as patch, serving(device_blocks=30) as there:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("first")))
        say(there, FIRST)
        return download(there, FIRST)


@pytest.mark.parametrize(
    ("dtype", "codec", "other_codec"),
    [("float32", "raw", "raw"), ("bfloat16", "raw", "bf16-12"), ("bfloat16", "bf16-12", "raw")],
)
def test_it_goes_on_in_a_server_with_another_layout(dtype: str, codec: str, other_codec: str, tmp_path: Path) -> None:
    """There it is answered as by a server that has computed all of it, and computes only what the file has not."""
    with serving(dtype=dtype, device_blocks=400, offload=False) as alone:
        answer, length, _ = say(alone, FIRST)
        history = [*FIRST, {"role": "assistant", "content": answer}, NEXT]
        expected, whole, _ = say(alone, history)
    below = {
        "disk": tmp_path / "kv",
        "disk_bytes": 4 << 20,
        "pool_bytes": (12 if dtype == "float32" else 6) * BLOCK_BYTES,
    }
    with serving(dtype=dtype, codec=codec, device_blocks=18, **below) as there:
        assert say(there, FIRST)[0] == answer
        say(there, OTHER)
        saved = download(there, history)
        assert metric(there, 'kvoffload_tier_bytes_read_total{tier="disk"}') > 0
        assert saved == download(there, history)
    with serving(dtype=dtype, codec=other_codec, device_blocks=60, batch=2) as other:
        blocks = length // 16 * 16
        assert blocks > 128
        for _ in range(2):
            assert other.put(PATH, content=saved).json() == {"tokens": blocks, "of": blocks, "reason": ""}
        assert say(other, history) == (expected, whole, blocks)
        again = download(other, history)
    with serving(dtype=dtype, device_blocks=60) as third:
        assert third.put(PATH, content=again).json()["tokens"] == (whole // 16) * 16
        assert say(third, history) == (expected, whole, (whole - 1) // 16 * 16)


def test_a_damaged_file_is_used_as_far_as_it_is_whole(file: bytes) -> None:
    last = bytearray(file)
    last[-BLOCK_BYTES] ^= 1
    header = file.replace(b"kvoffload session", b"kvoffload Session", 1)
    with serving() as there:
        for wrong, said in (
            (b"", "shorter than a header"),
            (b"x" * 9999, "no length of a header"),
            (header, "Session"),
        ):
            refused(there.put(PATH, content=wrong), 400, "the file is no session file that this release reads: ")
            refused(there.put(PATH, content=wrong), 400, said)
        assert say(there, FIRST)[2] == 0
    with serving() as there, serving(device_blocks=400, offload=False) as alone:
        found = there.put(PATH, content=bytes(last)).json()
        assert (found["of"] - found["tokens"], found["reason"][-10:]) == (16, "is damaged")
        assert there.put(PATH, content=file[: -BLOCK_BYTES - 32]).json()["tokens"] == found["tokens"]
        text, length, _ = say(alone, FIRST)
        assert say(there, FIRST) == (text, length, found["tokens"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"identity": "other"},
            "the file was saved with identity['model']='test', here it is 'other': nothing was loaded",
        ),
        ({"chunk_tokens": 16}, "identity['chunk_tokens']='32', here it is '16'"),
        ({"share_generated": True}, "identity['generated']='False', here it is '4'"),
        ({"dtype": "bfloat16"}, "the file was saved with dtype='float32', here it is 'uint16'"),
    ],
)
def test_a_file_of_another_model_is_refused(file: bytes, options: dict[str, Any], said: str) -> None:
    with serving(**options) as there:
        refused(there.put(PATH, content=file), 400, said)
        assert say(there, FIRST)[2] == 0


def test_a_file_is_of_the_weights_that_computed_it(file: bytes) -> None:
    with serving() as there:
        assert there.post("/weights", json={"name": "other"}).status_code == 200
        refused(there.put(PATH, content=file), 400, "the file was saved with weights='', here it is 'other'")


def test_a_file_that_is_too_large_is_refused(file: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as there:
        for content in (file, iter([file[:5000], file[5000:]])):  # the latter does not say how long it is
            monkeypatch.setattr(server, "MOST_FILE_BYTES", len(file) - 1)
            refused(there.put(PATH, content=content), 413, f"the body has more than {len(file) - 1} bytes")
        monkeypatch.setattr(server, "MOST_FILE_BYTES", len(file))
        assert there.put(PATH, content=iter([file[:5000], file[5000:]])).json()["reason"] == ""


def test_the_file_of_a_client_that_leaves_is_removed(folder: Path) -> None:
    async def left(*_: object) -> None:
        raise OSError("the client has left")

    sent = tempfile.TemporaryDirectory(prefix="chat-")
    Path(sent.name, Handed.FILE).touch()
    with pytest.raises(OSError, match="the client has left"):
        asyncio.run(Handed(sent)({**HTTP, "method": "POST", "headers": []}, left, left))
    assert not [*folder.iterdir()]


def test_what_is_not_there(file: bytes) -> None:
    with serving() as there:
        refused(there.post(PATH, json={"messages": FIRST}), 404, "no block of this conversation is below the device")
        refused(there.post(PATH, json={"messages": FIRST, "model": "gpt-2"}), 404, "there is no model 'gpt-2' here")
        refused(there.post(PATH, json={"messages": []}), 400, "messages must be a list of at least one message")
    with serving(offload=False) as there:
        for answer in (there.post(PATH, json={"messages": FIRST}), there.put(PATH, content=file)):
            refused(answer, 404, "this server has nothing below the device")


def test_a_closed_engine_and_a_full_disk_are_503(file: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = Letters()
    engine = engine_of()
    with TestClient(ChatServer(engine, tokenizer, "tiny").app) as there:
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", "/proc/none")
            for answer in (there.post(PATH, json={"messages": FIRST}), there.put(PATH, content=file)):
                refused(answer, 503, "No such file or directory")
        engine.close()
        for answer in (there.post(PATH, json={"messages": FIRST}), there.put(PATH, content=file)):
            refused(answer, 503, "the engine is closed")
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.save([1] * 32, "none")
