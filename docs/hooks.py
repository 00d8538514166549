"""For `mkdocs build`: the documents outside docs/ become pages, and links between all documents work.

The documents stay where GitHub shows them; README.md is the site's first page. A link is written as GitHub resolves it,
relative to the file it stands in, and is rewritten here where the page lies elsewhere in the site.

The search finds a page by its title and text, and by the words of `SEARCH`: what users call it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {  # file outside docs/: page of the site
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "GLOSSARY.md": "glossary.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/chat_server/README.md": "guides/chat-server.md",
}
SEARCH = {  # page of the site: words for which it should be the first result, as tags, which weigh most
    "faq.md": ["FAQ", "questions"],
    "benchmarks/time-to-first-token.md": ["TTFT", "latency", "speedup"],
    "contributing.md": ["contribute", "development", "CI"],
    "cache.md": ["eviction", "LRU", "prefix caching"],
    "command-line.md": ["CLI", "commands"],
    "guides/add-a-disk.md": ["disk", "SSD", "NVMe", "restart", "warm start", "upgrade", "persistent"],
    "guides/a-third-more-memory.md": ["codec", "compression", "lossless"],
    "guides/asyncio.md": ["asyncio", "await", "async", "cancel"],
    "guides/inside-a-server.md": ["hybrid", "sliding window", "local attention", "Gemma", "Mamba"],
    "guides/keep-a-conversation.md": ["conversation", "file", "save", "restore", "resume", "export", "portable"],
    "guides/metrics.md": ["monitor", "monitoring", "Prometheus", "Grafana", "alerts", "dashboard"],
    "guides/ranks-in-processes.md": ["multiprocess", "ranks"],
    "guides/several-engines.md": ["shared pool", "share", "share a cache", "replicas", "daemon"],
    "guides/one-call.md": ["getting started", "quickstart", "tutorial", "open_cache"],
    "guides/quantized-caches.md": ["quantized", "quantization", "fp8", "int8", "scales"],
    "guides/share-a-store.md": ["S3", "Redis", "Valkey", "distributed", "cluster", "TTL"],
    "guides/size-a-pool.md": [
        "RAM",
        "how many bytes",
        "host memory",
        "sizing",
        "OOM",
        "out of memory",
        "CapacityError",
        "memlock",
        "cgroup",
        "ulimit",
        "pinned memory",
        "shm",
    ],
    "guides/tenants-and-quotas.md": ["isolation", "multi-tenant", "quota"],
    "guides/test-without-a-gpu.md": ["pytest", "mock", "simulated", "laptop"],
    "guides/tracing.md": ["OpenTelemetry", "logging", "NVTX", "debug"],
    "guides/tune-a-machine.md": ["slow", "tune", "performance"],
    "guides/vllm.md": ["vLLM"],
    "guides/weights-that-change.md": ["RL", "RLHF", "rollouts", "training", "LoRA", "adapter", "reload", "revision"],
    "guides/what-would-it-save.md": ["replay", "trace", "ShareGPT", "Azure"],
    "guides/what-a-disk-brings.md": ["wear", "endurance", "TBW"],
    "how/interrupts.md": ["Ctrl-C", "KeyboardInterrupt", "SIGINT", "SIGTERM", "signal", "exceptions", "TransferError"],
    "how/ordering.md": ["ordering", "streams", "synchronize", "events"],
    "limits.md": ["Windows", "macOS", "AMD", "TPU", "CUDA graphs", "MIG", "driver version", "requirements"],
    "security.md": ["security", "encryption", "GDPR", "delete"],
    "session-format.md": ["safetensors"],
    "start/cupy.md": ["CuPy"],
    "start/jax.md": ["JAX"],
    "start/several-gpus.md": ["multi-GPU", "tensor parallel"],
}
_FILES = {page: file for file, page in PAGES.items()}
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the documents outside docs/."""
    from mkdocs.structure.files import File

    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - names that mkdocs gives
    """Rewrite the links of one page, and give it its words for the search."""
    page.meta["tags"] = SEARCH.get(page.file.src_uri, [])
    page.meta["hide"] = ["navigation"] if page.file.src_uri in ("index.md", "faq.md") else []  # alone in its tab
    return for_site(markdown, page.file.src_uri)


def for_site(markdown: str, page: str) -> str:
    """The text with links that are right in the site; `page` is the page's path there. Code is left as it is."""
    text, end = [], 0
    for code in _FENCED.finditer(markdown):
        text += [_relinked(markdown[end : code.start()], page), code.group(0)]
        end = code.end()
    return "".join([*text, _relinked(markdown[end:], page)])


def _relinked(text: str, page: str) -> str:
    return _LINK.sub(lambda link: f"]({_in_site(link[1], page)}{link[2] or ''})", text)


def _in_site(target: str, page: str) -> str:
    """Where a link leads in the site, relative to `page`; what is no page keeps its link, which mkdocs reports."""
    source = _FILES.get(page, f"docs/{page}")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    place = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
    return target if place is None else posixpath.relpath(place, posixpath.dirname(page) or ".")
