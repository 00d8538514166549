"""What programs that search for long share: their processes, what they measure of a process, and what they print."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from haunting import summary

Result = tuple[Counter[str], list[str]]
HANGS = re.compile(r"^\S.*\b(hangs?|does not (end|close))\b", re.MULTILINE)  # a traceback's lines begin with spaces
OPERATIONS = ("operations", "calls", "steps", "put")  # as the programs call them
HERE = Path(__file__).resolve().parent
HELPERS = (HERE.parents[2], HERE, HERE.parents[1] / "pool", HERE.parents[1] / "support")
FIRST_WORD_SECONDS = 60.0


def started(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start Python in a session of its own, with one thread, so that it may fork. `options`: as of `Popen`."""
    paths = [*map(str, HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
        **options,
    )


def answer(process: subprocess.Popen[str], seconds: float | None = None) -> dict[str, Any]:
    """Wait for the process and return the last line that it prints, which is JSON.

    Raises:
        ChildProcessError: it does not end in time, or ends with another status than 0.
    """
    try:
        printed, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ChildProcessError("does not end") from None
        raise
    if process.returncode:
        raise ChildProcessError(f"has ended with status {process.returncode}")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def killed(run: Callable[[int], object], wait: float) -> tuple[list[list[Any]], int]:
    """Fork a process that calls `run(pipe)`, and kill it `wait` seconds after its first word.

    Returns:
        The lines of JSON that it wrote to the pipe, and its status: -9, unless it ended by itself.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            run(write)
        finally:
            os._exit(1)
    os.close(write)
    text, end = b"", time.monotonic() + FIRST_WORD_SECONDS
    while select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (chunk := os.read(read, 1 << 16)):
            break  # it has ended by itself
        end = end if text else time.monotonic() + wait
        text += chunk
    os.kill(child, signal.SIGKILL)
    while chunk := os.read(read, 1 << 16):
        text += chunk
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [json.loads(line) for line in text.decode().rpartition("\n")[0].splitlines()], status


@contextmanager
def counting_what_is_left(counts: Counter[str]) -> Iterator[None]:
    """Count the descriptors, and our files in shared memory, that are there after the block and were not before."""
    before, shm = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    yield
    counts["descriptors left"] = len(set(os.listdir("/proc/self/fd")) - before)
    counts["files in /dev/shm"] = len([each for each in set(os.listdir("/dev/shm")) - shm if "kvoffload" in each])


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


def go_on_for(minutes: float, name: str, runs: Sequence[Callable[[int], Result]], seed: int | None) -> int:
    """Make these runs in turn, each with another seed; print what they have found, and a summary. Returns whether
    anything was wrong. Without a seed it is another one each time.
    """
    first = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    counts, wrong, end = Counter[str](), list[str](), time.monotonic() + 60.0 * minutes
    for number, run in zip(itertools.count(first), itertools.cycle(runs), strict=False):
        if time.monotonic() > end or len(wrong) >= 5:
            break
        found, new = run(number)
        counts.update(found)
        wrong += new
    report(name, counts, wrong)
    hangs = sum(HANGS.search(each) is not None for each in wrong)
    counts["operations"] = sum(counts[each] for each in OPERATIONS)
    print(summary(name, first, counts, wrong=len(wrong) - hangs, hangs=hangs), flush=True)
    return int(bool(wrong))
