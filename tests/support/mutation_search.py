"""Search for mistakes that no test notices.

    python tests/support/mutation_search.py --folder FOLDER                      200 mistakes, drawn by seed 0
    python tests/support/mutation_search.py --folder FOLDER --only-survivors     those again that lived

Each mistake (see `mutation_sites`) is made in a copy of the checkout. Then those tests run there that run its lines:
tests of the same floor first, quick ones before slow ones, `--budget` seconds of them. A mistake is killed by a test
that fails twice, or by one that does not end. Which test runs which lines is recorded first (with Python 3.12; older
ones run the tests of the floor). FOLDER keeps what was recorded and found: the same command continues a search, and
tries no mistake again that has a result.

Tests with the markers `gpu` and `servers` are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mutation_sites import FLOORS, Mistake, draw

ROOT = Path(__file__).resolve().parent.parent.parent
TESTED_BY = (*FLOORS, "layout", "device", "driver", "observability", "replay", "sharded", "tiering", "chaos")
ALSO = ("tests/interrupts/test_interrupts_everywhere.py",)
NOT_TESTED_BY = ("tests/engine/test_mutation.py",)  # it makes mistakes of its own
_COPIED = ("kvoffload", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "*.md")
_PATHS = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
_TEST_SECONDS = 30  # a test that takes as long does not end; those that take a fifth of it are not chosen


class Ran(NamedTuple):
    """What came of running pytest.

    Attributes:
        code: pytest's exit code; None: it did not end.
        report: what the plug-in wrote.
    """

    code: int | None
    report: dict[str, Any]


class Checkout:
    """A copy of the checkout, in which one mistake at a time is made."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree"
        self._folder = folder
        self._tree.mkdir(parents=True)
        for path in (path for pattern in _COPIED for path in ROOT.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, self._tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, self._tree)
        # Bytecode that is valid for the very text: a mistake is as long and as old as what it replaces.
        compiled = ["compileall", "-q", "--invalidation-mode", "checked-hash", "kvoffload", "tests"]
        subprocess.run([sys.executable, "-m", *compiled], cwd=self._tree, check=False)

    def run(self, files: Iterable[str], tests: Sequence[str] | None, seconds: float) -> Ran:
        """Run these tests, or record all of the files."""
        output, orders, temporary = (self._folder / name for name in ("output.json", "orders.json", "tmp"))
        output.unlink(missing_ok=True)
        package = f"{self._tree}/kvoffload/"
        orders.write_text(json.dumps({"output": str(output), "package": package, "tests": tests}))
        temporary.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
        environment |= {"MUTATION_SEARCH": str(orders), "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(temporary)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
        paths = [str(self._tree), *(f"{self._tree}/tests/{folder}" for folder in ("support", "interrupts")), *_PATHS]
        environment |= {"PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "mutation_plugin", "-m", "not gpu and not servers"]
        options += [f"--basetemp={temporary / 'pytest'}", "--tb=line", f"--timeout={_TEST_SECONDS}"]
        options += ["--assert=plain"] if tests is None else ["--assert=plain", "-x"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        with open(self._folder / "log", "wb") as log:
            code = _ended(command, seconds, cwd=self._tree, env=environment, stdout=log, stderr=subprocess.STDOUT)
        shutil.rmtree(temporary, ignore_errors=True)
        return Ran(code, json.loads(output.read_text()) if output.exists() and output.stat().st_size else {})

    def said(self) -> str:
        """The end of what pytest last printed."""
        return (self._folder / "log").read_text(errors="replace")[-2000:]

    def tried(self, mistake: Mistake, tests: Mapping[str, float], seconds: float) -> dict[str, Any]:
        """What the tests say of a mistake: its result, see `Search`."""
        path = self._tree / "kvoffload" / mistake.file
        text = path.read_bytes()
        path.write_bytes(mistake.applied(text))
        left = list(tests)
        try:
            while left:
                expected = 3 * sum(tests[test] for test in left) + 2 * _TEST_SECONDS
                ran = self.run(_files(left), left, min(expected, seconds))
                test = ran.report.get("test", "the import")
                if ran.code == 0:
                    break
                if ran.code is None and expected > seconds:
                    return {"result": "not tried"}
                if ran.code is None or test not in left:
                    return {"result": "killed", "by": f"{test}, which does not end" if ran.code is None else test}
                again = self.run(_files([test]), [test], 2 * _TEST_SECONDS)
                if again.code != 0:
                    return {"result": "killed", "by": test, "says": ran.report.get("says", "")}
                left = left[left.index(test) + 1 :]
        finally:
            path.write_bytes(text)
        return {"result": "lives" if tests else "not run", "tests": len(tests), "seconds": sum(tests.values())}


def _ended(command: Sequence[str], seconds: float, **options: Any) -> int | None:
    """The exit code of a command; None: it was killed, with all that it had started."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of it is left
        process.wait()


def _files(tests: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


class Search:
    """Attributes:
    folder: what is found is kept here: `tests.json`, what was recorded; `results.json`, by the mistakes' names. A
        result is killed (by a test), lives, not run (no test runs its lines), not tried (there was no time).
    """

    def __init__(self, folder: Path, copies: Path, workers: int, until: float) -> None:
        self.folder = folder
        self._until = until
        self._checkouts: SimpleQueue[Checkout] = SimpleQueue()
        self._pool = ThreadPoolExecutor(workers)
        folder.mkdir(parents=True, exist_ok=True)
        for checkout in self._pool.map(Checkout, [copies / str(number) for number in range(workers)]):
            self._checkouts.put(checkout)

    def _each(self, work: Callable[[Checkout, Any], None], items: Iterable[Any]) -> None:
        def in_a_checkout(item: Any) -> None:
            checkout = self._checkouts.get()
            try:
                if time.monotonic() < self._until:
                    work(checkout, item)
            finally:
                self._checkouts.put(checkout)

        list(self._pool.map(in_a_checkout, items))

    def record(self, drawn: Sequence[Mistake]) -> dict[str, Any]:
        """By test: whether it passes, its seconds, the files that it runs, and which of the mistakes' lines."""
        paths = [path for floor in TESTED_BY for path in sorted((ROOT / "tests" / floor).glob("**/test_*.py"))]
        files = [str(path.relative_to(ROOT)) for path in paths if str(path.relative_to(ROOT)) not in NOT_TESTED_BY]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(ROOT.glob("kvoffload/**/*.py"))))
        digest.update(b"".join((ROOT / file).read_bytes() for file in files))
        digest.update(" ".join(each.name for each in drawn).encode())
        kept = self.folder / "tests.json"
        known = json.loads(kept.read_text()) if kept.exists() else {}
        if known.get("digest") == digest.hexdigest():
            return dict(known["tests"])
        wanted: dict[str, set[int]] = {}
        for mistake in drawn:
            wanted.setdefault(mistake.file, set()).update(range(mistake.first, mistake.last + 1))
        tests: dict[str, Any] = {}

        def of_file(checkout: Checkout, file: str) -> None:
            ran = checkout.run([file], None, self._until - time.monotonic())
            if ran.code not in (0, 1, 5, None):  # passed, failed, nothing chosen, no time
                print(f"pytest exits with {ran.code} for {file}: {checkout.said()}", flush=True)
            for test, each in ran.report.items():
                of_interest = wanted.keys() & each["lines"].keys()
                lines = {name: sorted(wanted[name].intersection(each["lines"][name])) for name in of_interest}
                tests[test] = each | {"lines": lines}

        self._each(of_file, sorted([*files, *ALSO], key=lambda file: -(ROOT / file).stat().st_size))
        if not tests:
            raise RuntimeError("no test was recorded, see above")
        if time.monotonic() < self._until:
            kept.write_text(json.dumps({"digest": digest.hexdigest(), "tests": tests}))
        return tests

    def run(self, found: Sequence[Mistake], tests: dict[str, Any], budget: float, known: dict[str, Any]) -> None:
        """Try each mistake, and put what came of it into `known`."""
        failing = [test for test, each in tests.items() if not each["passed"]]
        print(f"{len(tests)} tests recorded; {len(failing)} fail or skip without a mistake", *failing[:20], sep="\n  ")

        def of_mistake(checkout: Checkout, mistake: Mistake) -> None:
            result = checkout.tried(mistake, chosen(mistake, tests, budget), self._until - time.monotonic())
            if result["result"] != "not tried":
                known[mistake.name] = result | {"mistake": str(mistake)}
                print(f"{result['result']:8}{mistake}", flush=True)
                written = self.folder / "results.new"
                written.write_text(json.dumps(dict(known), indent=1))
                written.replace(self.folder / "results.json")

        self._each(of_mistake, found)


def chosen(mistake: Mistake, tests: Mapping[str, Mapping[str, Any]], budget: float) -> dict[str, float]:
    """The tests for a mistake, in order, with their seconds. If none runs its lines (those of a class run when it is
    imported), tests that run its file."""
    own = f"tests/{mistake.file.partition('/')[0]}/"
    lines = set(range(mistake.first, mistake.last + 1))
    quick = {test: each for test, each in tests.items() if each["passed"] and each["seconds"] < _TEST_SECONDS / 5}
    of_file = [test for test, each in quick.items() if mistake.file in each["lines"]]
    of_lines = [test for test in of_file if lines.intersection(quick[test]["lines"][mistake.file])]
    recorded = any(each["lines"] for each in quick.values())
    candidates = of_lines or (of_file if recorded else [test for test in quick if test.startswith(own)])
    found: dict[str, float] = {}
    for test in sorted(candidates, key=lambda test: (not test.startswith(own), quick[test]["seconds"])):
        budget -= quick[test]["seconds"]
        if budget < 0:
            break
        found[test] = quick[test]["seconds"]
    return found


def table(found: Sequence[Mistake], known: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each mistake, and a last one that counts them."""
    rows, counts = [], Counter[str]()
    for number, mistake in enumerate(found, 1):
        result = known.get(mistake.name, {"result": "not tried"})
        counts[result["result"]] += 1
        rows.append(f"{number:4} {mistake.name} {result['result']:9} {mistake}")
        rows += [f"          by {result['by']}"] if "by" in result else []
    return "\n".join([*rows, ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))])


def main() -> int:
    """Exits with 0 if each mistake is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to keep what is found")
    parser.add_argument("--number", type=int, default=200, help="of mistakes (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="1/1", help="I/N: each Nth mistake, from the Ith")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long; the same command continues")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests for a mistake (default: 60)")
    parser.add_argument("--only-survivors", action="store_true", help="also try those again that lived before")
    parser.add_argument("--list", action="store_true", help="only print the mistakes and what is known")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    shard, shards = map(int, given.shard.split("/"))
    every = draw(ROOT / "kvoffload", given.number, given.seed)
    drawn = every[shard - 1 :: shards]
    results = given.folder / "results.json"
    known: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results.exists() else {}
    settled = {name for name, result in known.items() if result["result"] == "killed" or not given.only_survivors}
    missing = [each for each in drawn if each.name not in settled]
    if missing and not given.list:
        with TemporaryDirectory(prefix="mutants-") as copies:
            search = Search(given.folder, Path(copies), given.workers, until)
            search.run(missing, search.record(every), given.budget, known)
    text = table(drawn, known)
    if not given.list:
        (given.folder / "results.txt").write_text(text + "\n")
    print(text)
    return int(any(known.get(each.name, {}).get("result") != "killed" for each in drawn))


if __name__ == "__main__":
    sys.exit(main())
