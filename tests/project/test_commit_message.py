"""The hook for commit messages, run as git runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

SCRIPT = ROOT / "tests" / "support" / "commit_message.py"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("A" * 72 + "\n\n" + "The reason, in lines of any length. " * 4, ""),
        ("# git's own line\n\nA subject\n# another\n", ""),
        ("fixup! " + "A" * 72, ""),
        ("A" * 73 + "\n", "the subject has 73 characters, at most 72"),
        ("A subject\nand more of it\n", "leave a line empty"),
    ],
)
def test_long_subjects_are_refused(tmp_path: Path, message: str, complaint: str) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message)
    done = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True, check=False)
    assert done.returncode == bool(complaint)
    assert complaint in done.stderr
    assert bool(done.stderr) == bool(complaint)


def test_pre_commit_runs_it() -> None:
    path = ROOT / ".pre-commit-config.yaml"
    if not path.exists():
        pytest.skip(".pre-commit-config.yaml is not in the source distribution")
    hook = re.search(r"- id: commit-message\n(?: {8}.*\n)+", path.read_text())
    assert hook is not None
    assert f"entry: {SCRIPT.relative_to(ROOT)}" in hook[0]
    assert "stages: [commit-msg]" in hook[0]
