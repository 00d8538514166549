"""Members look for an owner more often than in production, and owners wait less long for them."""

from __future__ import annotations

import pytest

from kvoffload.pool import owner, watching


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(owner, "GRACE_SECONDS", 1.0)
