"""The README's snippets are run, and its claims about files checked; links of all documents lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def snippet(name: str, text: str = README) -> str:
    found = re.search(rf"<!-- run: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None, f"there is no snippet named {name}"
    return found.group(1)


def run(name: str, text: str = README) -> None:
    exec(compile(snippet(name, text), name, "exec"), {"__name__": "__readme__"})


def test_the_cache_snippet_runs_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    run("cache")
    assert capsys.readouterr().out.startswith("3 CacheStatistics(capacity=16, resident=3")


def test_the_runtimes_snippet_runs_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    run("runtime")
    printed = capsys.readouterr().out
    assert printed.count("TransferResult(") == 2
    assert printed.endswith("[]\n")


def test_the_servers_request_runs_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    run("server", (ROOT / "docs" / "cache.md").read_text())
    assert capsys.readouterr().out.startswith("6 BlockCache(6 of 16 keys")


def test_both_commands_are_there() -> None:
    for name in ("demo", "tests"):
        assert re.search(rf"<!-- command: {name} -->\n```\n.+\n```", README)


def test_every_example_is_named() -> None:
    for example in (ROOT / "examples").iterdir():
        if example.suffix in (".py", ".ipynb"):
            assert example.name in README


@pytest.mark.parametrize("document", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        name, _, heading = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), target
        titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if heading else []
        anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in anchors, target


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "expected"), [("cupy", "TransferResult"), ("jax", "True TransferResult")])
@pytest.mark.usefixtures("only_gpu")
def test_snippets_on_a_gpu(name: str, expected: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet(name)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
