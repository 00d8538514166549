"""`bench cache`: what it prints, and that the bookkeeping stays near what a dictionary would cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvoffload.commands import main


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        assert main(["bench", "cache", "--blocks", "60000", "--repeats", "60", "--json"]) == 0
    fields = json.loads(printed[0])
    assert (fields["blocks"], fields["keys"], fields["repeats"]) == (60_000, 512, 60)
    return {row["name"]: row for row in fields["rows"]}


def test_every_policy_is_compared_with_the_dictionary(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == ["OrderedDict", "arc", "lru", "prefix", "s3fifo"]
    for row in rows.values():
        for what in ("lookup_us", "reserve_commit_us", "touch_us"):
            assert 0 < row[f"{what}_best"] <= row[what]


@pytest.mark.parametrize("policy", ["arc", "lru", "prefix", "s3fifo"])
def test_a_block_takes_less_than_300_bytes(rows: dict[str, dict[str, Any]], policy: str) -> None:
    """Of 60,000 blocks, where dictionaries are emptier than with a million."""
    assert rows[policy]["bytes_per_block"] < 300


@pytest.mark.parametrize("policy", ["arc", "lru", "prefix", "s3fifo"])
def test_what_a_request_costs_compared_with_a_dictionary(rows: dict[str, dict[str, Any]], policy: str) -> None:
    """The best of many, generously: machines differ, and so do the CPU's caches."""
    reference = rows["OrderedDict"]
    assert rows[policy]["lookup_us_best"] < 3 * reference["lookup_us_best"]
    assert rows[policy]["reserve_commit_us_best"] < 30 * reference["reserve_commit_us_best"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--blocks", "2048", "--policy", "prefix", "--repeats", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2,048 blocks, requests of 512: microseconds" in printed
    assert "OrderedDict" in printed
    assert "(1.0x)" in printed
