"""Rules of the tests themselves: KVOFFLOAD_TEST_SEED reaches all that are random, and no clock judges speed.

Those under vLLM: tests/vllm/test_vllm_runs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from seeds import seeds

TESTS = Path(__file__).parent.parent
CLOCK = r"(?:perf_counter|monotonic|process_time|thread_time|time\.time)(?:_ns)?\(\)"
SPEED = re.compile(rf"timeit|assert .*{CLOCK} - \w+.* <|\btook\b.* < ")
FIXED = re.compile(r"""["']seeds?["'], (?:range\(|\[0, 1)|\bparams=range\(|SEEDS\b.* = range\(""")


def test_each_choice_has_seeds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVOFFLOAD_TEST_SEED", raising=False)
    unset = seeds(20)
    monkeypatch.setenv("KVOFFLOAD_TEST_SEED", "1")
    assert unset == range(20)
    assert len({*unset, *seeds(20)}) == 40


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(TESTS)}: {line.strip()}"
        for path in TESTS.rglob("*.py")
        for line in path.read_text().splitlines()
        if pattern.search(line) and path != Path(__file__)
    ]


def test_no_parameters_are_fixed_seeds() -> None:
    assert lines_with(FIXED) == [], "use `seeds(n)` instead"


def test_no_test_judges_speed_by_a_clock() -> None:
    """Waiting until something happens, with a limit against hanging, is fine; so is a least time."""
    assert lines_with(SPEED) == [], "count instead: calls, `counting.steps`, copies"
