"""What the program that measures late writes of a GPU sees: here those of a grandchild, and no others, since the
simulated device ends with its process.
"""

from __future__ import annotations

import json
from pathlib import Path

import late_writes
import pytest

pytestmark = pytest.mark.timeout(120)


@pytest.mark.long
def test_late_writes_are_seen_where_there_are_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    names = ("quick", "fork", "fork, writing")
    options = [option for name in names for option in ("--only", name)]
    status = late_writes.main(["--simulated", "--rounds", "1", *options])
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "late_writes.json").read_text())
    quick, fork, writing = ({each["variant"]: each for each in result["summaries"]}[name] for name in names)
    assert [each["kills"] for each in (quick, fork, writing)] == [1, 1, 1], out
    assert status == 0, out
    for each in (quick, fork):
        assert not late_writes.is_late(each), out
    assert writing["changed_after_all"] == 1
    assert writing["differ_at_the_end"] == 1
    order = sorted(fork["most_ms_to"], key=fork["most_ms_to"].__getitem__)
    assert order[0] == "pidfd", "the grandchild has the socket and the lock"
    assert out.count(" 0 wrong") == 2
