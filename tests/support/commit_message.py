#!/usr/bin/env python3
"""For `pre-commit` at its stage commit-msg, or as .git/hooks/commit-msg: refuse a subject of more than 72 characters.

python tests/support/commit_message.py FILE        what git gives the hook: the file with the message
"""

from __future__ import annotations

import sys
from pathlib import Path

MOST = 72  # what `git log --oneline` and a list of commits show without cutting it
PASSING = ("fixup! ", "squash! ", "amend! ")  # subjects that a rebase takes away


def problem(message: str) -> str | None:
    """Say what is wrong with a message, or return None. Lines that begin with # are git's own."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    subject, *rest = "\n".join(lines).strip().split("\n")
    if not subject.startswith(PASSING) and len(subject) > MOST:
        return f"the subject has {len(subject)} characters, at most {MOST}; the reason goes below: {subject!r}"
    if rest and rest[0]:
        return f"leave a line empty between the subject and what follows: {rest[0]!r}"
    return None


if __name__ == "__main__":
    wrong = problem(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit(wrong and f"commit message: {wrong}")
