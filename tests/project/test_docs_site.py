"""The site: links rewritten for it, what becomes of docstrings, what its search finds; it needs no other host."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT


def loaded(name: str) -> ModuleType:
    """A file of docs/, which is no package."""
    found = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/limits.md#slow-cases)", "[a](limits.md#slow-cases)"),
        ("index.md", "![a](docs/field.png)", "![a](field.png)"),
        ("index.md", "[a](ARCHITECTURE.md)", "[a](architecture.md)"),
        ("architecture.md", "[a](docs/jax.md) [b](GLOSSARY.md)", "[a](jax.md) [b](glossary.md)"),
        ("guides/x.md", "[a](../../README.md#install)", "[a](../index.md#install)"),
        ("guides/x.md", "[a](../cache.md) [b](y.md)", "[a](../cache.md) [b](y.md)"),
        ("limits.md", "[a](../ARCHITECTURE.md#order)", "[a](architecture.md#order)"),
        ("limits.md", "[a](#slow-cases) [b](https://x/y.md)", "[a](#slow-cases) [b](https://x/y.md)"),
        ("limits.md", "```\n[a](../README.md)\n```\n", "```\n[a](../README.md)\n```\n"),
        ("limits.md", "[a](../examples/x.py)", "[a](../examples/x.py)"),
    ],
)
def test_links_are_right_in_the_site(page: str, text: str, expected: str) -> None:
    assert loaded("hooks").for_site(text, page) == expected


def test_entries_of_several_names_are_divided() -> None:
    pytest.importorskip("griffe")
    parsable = loaded("griffe_customs").parsable
    text = "Do.\n\nArgs:\n    a, b: both,\n        so.\n    c: one: more.\n\nReturns it.\n"
    assert parsable(text) == (
        "Do.\n\nArgs:\n    a: both,\n        so.\n    b: both,\n        so.\n    c: one: more.\n\nReturns it.\n"
    )


def test_sentences_of_raises_are_kept() -> None:
    pytest.importorskip("griffe")
    split = loaded("griffe_customs").parsable
    text = "Do.\n\nRaises:\n    ValueError: bad,\n        so.\n    Nothing has\n        changed in any case.\n"
    assert split(text) == "Do.\n\nRaises:\n    ValueError: bad,\n        so.\n\nNothing has changed in any case.\n"
    assert split("Raises:\n    ValueError: bad.\n") == "Raises:\n    ValueError: bad.\n"
    assert split("Raises:\n    As `store`.\n") == "Raises: As `store`.\n"


# the built site -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_needs_no_other_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*src=\"?(https?:[^\" >]+)", text)
        fetched += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|preconnect|preload)[^>]*href=\"?(https?:[^\" >]+)", text)
        assert not fetched, page
    assert not [path for path in site.rglob("*.css") if re.search(r"(?:@import|url\()[^;]{0,8}http", path.read_text())]


def test_the_reference_shows_what_users_may_call_once(site: Path) -> None:
    engine = (site / "reference" / "engine.html").read_text()
    assert 'id="kvoffload.OffloadEngine.store"' in engine
    assert 'id="kvoffload.OffloadEngine.check_room"' not in engine, "`dir()` does not show it"
    jax = (site / "reference" / "jax.html").read_text()
    assert 'id="kvoffload.jax.OwnedCache.unordered"' in jax, "its docstring is that of the base class"
    tiers = (site / "reference" / "tiers.html").read_text()
    assert 'id="kvoffload.tiers.ThreadedTier.attach"' in tiers
    assert 'id="kvoffload.tiers.DiskTier.attach"' not in tiers, "it is inherited, and named with a link"
    named = re.search(r'id="kvoffload.tiers.DiskTier".*?The same as in.*?</p>', tiers, re.DOTALL)
    assert named is not None
    assert 'href="#kvoffload.tiers.ThreadedTier"' in named[0]
    assert "<code>attach</code>" in named[0]


def test_signatures_of_the_reference_are_broken_into_lines(site: Path) -> None:
    text = re.sub(r"<[^>]*>", "", (site / "reference" / "engine.html").read_text())
    signature = text[text.index("OffloadEngine(\n") :].partition(")\n")[0]
    assert "\n    device: Device,\n    num_slots: int | None = None,\n" in signature


CUT = """<script>addEventListener("load", () => {
    const cut = [...document.querySelectorAll("pre > code")].filter(each => each.scrollWidth > each.clientWidth + 1)
    document.title = "cut: " + JSON.stringify(cut.map(each => each.textContent.split("\\n")[0]))
})</script></body>"""


@pytest.mark.parametrize("width", [1280, 1366])
def test_code_of_guides_is_not_cut(site: Path, width: int) -> None:
    """Measured by a browser: the code of all pages in one, beside both columns."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to measure with")
    pages = sorted(path for folder in ("guides", "start") for path in (site / folder).glob("*.html"))
    found = [block for page in pages for block in re.findall(r"<pre.*?</pre>", page.read_text(), re.DOTALL)]
    assert len(found) > 50
    first, end, rest = (site / "guides" / "one-call.html").read_text().partition("</article>")
    (site / "guides" / "all.html").write_text(first + "".join(found) + end + rest.replace("</body>", CUT))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--window-size={width},900"]
    command = [browser, *flags, f"file://{site}/guides/all.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (site / "guides" / "all.html").unlink()
    assert re.search(r"<title>cut: (.*?)</title>", done.stdout)[1] == "[]"  # type: ignore[index]


# the search -----------------------------------------------------------------------------------------------------------

FOUND = {  # what somebody types: the page that comes first, and the heading of an answer where it is one of many
    "FAQ": "faq",
    "RAM": "guides/size-a-pool",
    "asyncio": "guides/asyncio",
    "await": "guides/asyncio",
    "cgroup": "guides/size-a-pool",
    "conversation": "guides/keep-a-conversation",
    "container": "faq#how-do-i-run-it-in-a-container-docker-kubernetes",
    "Ctrl-C": "how/interrupts",
    "CUDA graphs": "limits",
    "corruption": "faq#can-a-hit-return-wrong-kv-data-or-bytes-how-do-i-notice-corruption",
    "crash": "faq#what-happens-to-stored-blocks-if-the-process-crashes-or-is-killed-kill--9",
    "CuPy": "start/cupy",
    "LMCache": "faq#how-does-it-compare-with-lmcache-hicache-or-mooncake",
    "ShareGPT": "guides/what-would-it-save",
    "TransferError": "how/interrupts",
    "cancel": "guides/asyncio",
    "codec": "guides/a-third-more-memory",
    "can I share a cache with my other engine": "guides/several-engines",
    "compression": "guides/a-third-more-memory",
    "How many bytes": "guides/size-a-pool",
    "how many bytes": "guides/size-a-pool",
    "how do I add a disk": "guides/add-a-disk",
    "share a cache": "guides/several-engines",
    "share a cache between processes": "guides/several-engines",
    "tenants": "guides/tenants-and-quotas",
    "delete": "security",
    "disk": "guides/add-a-disk",
    "docker": "faq#how-do-i-run-it-in-a-container-docker-kubernetes",
    "encryption": "security",
    "eviction": "cache",
    "exceptions": "how/interrupts",
    "export": "guides/keep-a-conversation",
    "fork": "faq#can-i-fork-or-use-multiprocessing",
    "fp8": "guides/quantized-caches",
    "grafana": "guides/metrics",
    "gemma": "guides/inside-a-server",
    "install": "faq#how-do-i-install-it-why-is-there-no-pip-install-kvoffload",
    "int8": "guides/quantized-caches",
    "JAX": "start/jax",
    "kubernetes": "faq#how-do-i-run-it-in-a-container-docker-kubernetes",
    "lmcache": "faq#how-does-it-compare-with-lmcache-hicache-or-mooncake",
    "latency": "benchmarks/time-to-first-token",
    "lora": "guides/weights-that-change",
    "macos": "limits",
    "minio": "guides/share-a-store#which-store",
    "memlock": "guides/size-a-pool",
    "monitor": "guides/metrics",
    "multi-gpu": "start/several-gpus",
    "OOM": "guides/size-a-pool",
    "opentelemetry": "guides/tracing",
    "out of memory": "guides/size-a-pool",
    "prometheus": "guides/metrics",
    "process crash": "faq#what-happens-to-stored-blocks-if-the-process-crashes-or-is-killed-kill--9",
    "pytorch": "faq#can-i-use-it-with-pytorch-does-it-need-torch-or-work-with-its-tensors",
    "quantized": "guides/quantized-caches",
    "quickstart": "guides/one-call",
    "redis": "guides/share-a-store",
    "replicas": "guides/several-engines",
    "restart": "guides/add-a-disk",
    "s3": "guides/share-a-store",
    "safetensors": "session-format",
    "save a conversation": "guides/keep-a-conversation",
    "scales": "guides/quantized-caches",
    "sglang": "faq#does-it-work-with-vllm-sglang-or-tensorrt-llm",
    "sliding window": "guides/inside-a-server",
    "shared pool": "guides/several-engines",
    "slow": "guides/tune-a-machine",
    "synchronize": "how/ordering",
    "ttl": "guides/share-a-store",
    "tensor parallel": "start/several-gpus",
    "threads": "how/locks",
    "timeout": "guides/asyncio#timeouts-and-cancelling",
    "triton": "faq#do-i-need-triton",
    "TTFT": "benchmarks/time-to-first-token",
    "upgrade": "guides/add-a-disk",
    "vllm": "guides/vllm",
    "wear": "guides/what-a-disk-brings",
    "wrong data": "faq#can-a-hit-return-wrong-kv-data-or-bytes-how-do-i-notice-corruption",
}


class Search:
    """The search of mkdocs-material over a built site: its fields and weights, every word as the beginning of one, no
    stemming; pages count more than their sections, and so do results with all words.
    """

    def __init__(self, site: Path) -> None:
        builder_module = pytest.importorskip("lunr.builder")
        stop_words = pytest.importorskip("lunr.stop_word_filter")
        index = json.loads((site / "search" / "search_index.json").read_text())
        assert index["config"]["pipeline"] == ["stopWordFilter"]
        self._separator = re.compile(index["config"]["separator"])
        builder = builder_module.Builder()
        builder.b(0)
        builder.pipeline.add(stop_words.stop_word_filter)
        builder.ref("location")
        for name, field in index["config"]["fields"].items():
            builder.field(name, boost=field["boost"])
        for each in index["docs"]:
            texts = {name: re.sub("<[^>]*>", " ", each[name]) for name in ("title", "text")}
            texts["tags"] = " ".join(each.get("tags", []))
            words = {name: [word for word in self._separator.split(text) if word] for name, text in texts.items()}
            builder.add({"location": each["location"], **words})
        self._index: Any = builder.build()

    def first(self, query: str) -> str:
        words = [word for word in self._separator.split(query.lower()) if word]
        scores = []
        for found in self._index.search(" ".join(f"{word}*" for word in words)):
            terms, place = found["match_data"].metadata, found["ref"]
            matched = sum(any(term.startswith(word) for term in terms) for word in words)
            scores.append((found["score"] * (1 + (("#" not in place) + matched / len(words)) ** 2), place))
        return max(scores)[1] if scores else ""


@pytest.fixture(scope="module")
def search(site: Path) -> Search:
    return Search(site)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("query", FOUND)
def test_the_search_finds_the_page_that_answers(search: Search, query: str) -> None:
    page, _, heading = FOUND[query].partition("#")
    assert search.first(query) == f"{page}.html" + (f"#{heading}" if heading else "")


def test_words_for_the_search_are_of_pages_that_there_are() -> None:
    pages, of_the_root = loaded("hooks").SEARCH, loaded("hooks").PAGES.values()
    assert [page for page in pages if page not in of_the_root and not (ROOT / "docs" / page).exists()] == []
    words = [word.lower() for each in pages.values() for word in each]
    assert sorted(words) == sorted(set(words)), "a word leads to one page"


def test_questions_have_short_answers_with_links() -> None:
    answers = re.split(r"^### ", (ROOT / "docs" / "faq.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(answers) >= 20
    for answer in answers:
        question, _, text = re.sub(r"\n## .*", "", answer, flags=re.DOTALL).partition("\n")
        lines = text.strip().splitlines()
        assert 1 <= len(lines) <= 5, question
        assert "](" in text, f"no link: {question}"
