"""KVOFFLOAD_TEST_SEED reaches every test that is meant to be random. Those under vLLM: tests/vllm/test_vllm_runs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from seeds import seeds

TESTS = Path(__file__).parent.parent
FIXED = re.compile(r"""["']seeds?["'], (?:range\(|\[0, 1)|\bparams=range\(|SEEDS\b.* = range\(""")


def test_each_choice_has_seeds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVOFFLOAD_TEST_SEED", raising=False)
    unset = seeds(20)
    monkeypatch.setenv("KVOFFLOAD_TEST_SEED", "1")
    assert unset == range(20)
    assert len({*unset, *seeds(20)}) == 40


def test_no_parameters_are_fixed_seeds() -> None:
    found = [
        f"{path.relative_to(TESTS)}: {line.strip()}"
        for path in TESTS.rglob("*.py")
        for line in path.read_text().splitlines()
        if FIXED.search(line) and path != Path(__file__)
    ]
    assert found == [], "use `seeds(n)` instead"
