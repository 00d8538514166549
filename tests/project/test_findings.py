"""The programs in findings/: each is in the table, and installs pinned packages in a folder that it deletes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FINDINGS = sorted((ROOT / "findings").glob("*.sh"))


def test_the_table_names_every_finding_and_no_other() -> None:
    table = (ROOT / "findings" / "README.md").read_text()
    assert FINDINGS
    assert sorted(re.findall(r"`bash findings/(\S+)`", table)) == [path.name for path in FINDINGS]


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: str(path.name))
def test_a_finding_says_what_was_seen_and_leaves_nothing_behind(path: Path) -> None:
    text = path.read_text()
    header = text[: text.index("\nset -euo pipefail\n")]
    assert all(line.startswith("#") for line in header.splitlines())
    assert re.search(r"^# Seen with |^# Seen on ", header, re.MULTILINE)
    assert "Exit status: 0 if it is still so, 1 if not" in header
    assert "trap 'rm -rf \"$folder\"' EXIT" in text
    assert re.search(r"pip[\" ].*install .*==", text), "pinned"
    assert "kvoffload" not in text
    assert "://" not in text, "packages by their names"
    subprocess.run(["bash", "-n", path], check=True)


def test_no_session_runs_them() -> None:
    for path in (ROOT / "noxfile.py", ROOT / ".ci" / "run"):
        assert not path.exists() or "findings" not in path.read_text()
