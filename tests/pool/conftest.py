"""Members look for an owner more often than in production, and owners wait less long for them."""

from __future__ import annotations

import pytest
from pooling import Member

from kvoffload.pool import owner, watching


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(owner, "GRACE_SECONDS", 1.0)


@pytest.fixture(params=["raw", pytest.param("bf16-12", marks=pytest.mark.long)])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all members."""
    monkeypatch.setattr(Member, "codec", request.param)


@pytest.fixture
def quick(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Members look for the next owner all the time."""
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.02)
