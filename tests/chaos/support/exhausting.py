"""What programs that search for long measure of their process, and print."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path


def held() -> Counter[str]:
    """What this process has: threads of Python's, descriptors, bytes of resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Counter(
        threads=threading.active_count(),
        descriptors=len(os.listdir("/proc/self/fd")),
        resident=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def too_many(counts: Mapping[str, int], limits: Mapping[str, int], what: str) -> list[str]:
    """What is wrong: counts named "`limit` `what`" that are above their limit."""
    found = {f"{name} {what}": most for name, most in limits.items()}
    return [f"{counts[name]} {name}" for name, most in found.items() if counts[name] > most]


def report(heading: str, counts: Mapping[str, int], wrong: list[str]) -> bool:
    """Print both; whether anything was wrong."""
    print(f"{heading}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())), flush=True)
    print(f"  {len(wrong)} wrong" + "".join(f"\n    {each}" for each in wrong[:10]), flush=True)
    return bool(wrong)
