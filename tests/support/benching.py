"""Running the command line in this process, for its `--json`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvoffload.commands import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command prints as JSON; it ends with `code`."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    fields = json.loads(capsys.readouterr().out)
    assert isinstance(fields, dict)
    return fields
