"""The pages of first steps, how it works and guides, and those of cache and JAX, are short and have a heading."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
FOLDERS = ("start", "how", "guides")
PAGES = sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))
PAGES += [DOCS / "cache.md", DOCS / "jax.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_pages_are_short_and_have_a_heading(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert 40 <= len(lines) <= (125 if page.parent.name in FOLDERS else 160)
    prose = [line for line in lines if not line.startswith("|")]
    assert max(map(len, prose)) <= 140 or page.name in ("cache.md", "jax.md")
