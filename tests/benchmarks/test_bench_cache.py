"""`bench cache`: what it prints, and the memory that the bookkeeping takes."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from kvoffload.commands import main


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["bench", "cache", "--blocks", "60000", "--repeats", "60", "--json"]) == 0
    fields = json.loads(printed.getvalue())
    assert (fields["blocks"], fields["keys"], fields["repeats"]) == (60_000, 512, 60)
    return {record["name"]: record for record in fields["records"]}


def test_every_policy_is_measured_and_the_dictionary(records: dict[str, dict[str, Any]]) -> None:
    assert list(records) == ["OrderedDict", "arc", "lru", "prefix", "s3fifo"]
    for record in records.values():
        for what in ("lookup_us", "reserve_commit_us", "touch_us"):
            assert record[what] > 0


@pytest.mark.parametrize("policy", ["arc", "lru", "prefix", "s3fifo"])
def test_a_block_takes_less_than_300_bytes(records: dict[str, dict[str, Any]], policy: str) -> None:
    """Of 60,000 blocks, where dictionaries are emptier than with a million."""
    assert records[policy]["bytes_per_block"] < 300


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--blocks", "2048", "--policy", "prefix", "--repeats", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2,048 blocks, requests of 512 keys: median microseconds of a request" in printed
    assert "OrderedDict" in printed
    assert "(1.0x)" in printed
