"""Search for mistakes that no test notices.

    python tests/support/mutation_search.py --folder FOLDER                     200 mistakes, drawn by a seed
    python tests/support/mutation_search.py --folder FOLDER --only-survivors    those again that lived
    python tests/support/mutation_search.py --folder FOLDER --again FILE        those of an earlier search, in this code

Each mistake (see `mutation_sites`) is made in a copy of the checkout. Then those tests run there that run its lines:
quick ones before slow ones, `--budget` seconds of them. A mistake is killed by a test that fails twice, or by one that
does not end. Which test runs which lines is recorded first (with Python 3.12; older ones run the tests of the area).
FOLDER keeps what was recorded and found: the same command continues a search, and tries no mistake again that has a
result. FILE is the `results.tsv` of such a folder, or `mutants_20261128.tsv` here. Each of its lines is a mistake, by
file, function, operator and number. If a mistake may live, its line says why.

Tests with the markers `gpu` and `servers` are left out, and pytest needs no plug-in but pytest-timeout.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mutation_sites import AREAS, Mistake, draw, everything

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "kvoffload"
SEED = 20261128
HEAD = "result\tfile\tfunction\toperator\tnumber\twhy it may live, or what kills it"
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
        options = ["-q", "-o", "addopts=--import-mode=importlib --strict-markers", "-m", "not gpu and not servers"]
        options += ["-p", "no:benchmark", "-p", "no:valkey", "-p", "no:cacheprovider", "-p", "mutation_plugin"]
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
    folder: what is found is kept here: `tests.json`, what was recorded; `results.tsv`, a verdict for each mistake.
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
        """By test: whether it passes, its seconds, the files that it runs, and which of the mistakes' lines.

        What was recorded of a file of tests is kept, also if there was no time for all.
        """
        folders = dict.fromkeys(folder for each in drawn for folder in _folders(each.file))
        paths = [path for folder in folders for path in sorted((ROOT / "tests" / folder).glob("**/test_*.py"))]
        files = [str(path.relative_to(ROOT)) for path in paths if str(path.relative_to(ROOT)) not in NOT_TESTED_BY]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))
        digest.update(" ".join(each.name for each in drawn).encode())
        kept = self.folder / "tests.json"
        known = json.loads(kept.read_text()) if kept.exists() else {}
        known = known if known.get("digest") == digest.hexdigest() else {"digest": digest.hexdigest(), "files": {}}
        by_file: dict[str, dict[str, Any]] = known["files"]
        wanted: dict[str, set[int]] = {}
        for mistake in drawn:
            wanted.setdefault(mistake.file, set()).update(range(mistake.first, mistake.last + 1))

        def of_file(checkout: Checkout, file: str) -> None:
            ran = checkout.run([file], None, self._until - time.monotonic())
            if ran.code is None:  # no time
                return
            if ran.code not in (0, 1, 5):  # passed, failed, nothing chosen
                print(f"pytest exits with {ran.code} for {file}: {checkout.said()}", flush=True)
            for each in ran.report.values():
                of_interest = wanted.keys() & each["lines"].keys()
                each["lines"] = {name: sorted(wanted[name].intersection(each["lines"][name])) for name in of_interest}
            by_file[file] = {"text": _digest(file), "tests": ran.report}

        changed = [file for file in (*files, *ALSO) if by_file.get(file, {}).get("text") != _digest(file)]
        self._each(of_file, sorted(changed, key=lambda file: -(ROOT / file).stat().st_size))
        kept.write_text(json.dumps(known))
        missing = {*files, *ALSO} - by_file.keys()
        if missing:
            print(f"{len(missing)} files of tests are not recorded yet: no mistake is tried", flush=True)
        return {} if missing else {test: each for file in by_file.values() for test, each in file["tests"].items()}

    def run(self, found: Sequence[Mistake], tests: dict[str, Any], budget: float, known: Known) -> None:
        """Try each mistake, and put what came of it into `known`."""
        failing = [test for test, each in tests.items() if not each["passed"]]
        print(f"{len(tests)} tests recorded; {len(failing)} fail or skip without a mistake", *failing[:9], sep="\n  ")

        def of_mistake(checkout: Checkout, mistake: Mistake) -> None:
            result = checkout.tried(mistake, chosen(mistake, tests, budget), self._until - time.monotonic())
            if result["result"] != "not tried":
                known[mistake.name] = Verdict(result["result"], result.get("by", ""))
                print(f"{result['result']:8}{mistake}", flush=True)
                _write(self.folder, known)

        self._each(of_mistake, found)


class Verdict(NamedTuple):
    """Attributes:
    result: killed (by a test), lives, not run (no test runs its lines), not tried (there was no time), or gone: the
        code has no such place any more.
    why: it may live, or the test that kills it.
    """

    result: str
    why: str = ""

    @property
    def argued(self) -> bool:
        return self.result in ("killed", "gone") or bool(self.why)


Known = dict[str, Verdict]


def _digest(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


def _read(path: Path) -> Known:
    """By the names of mistakes what a file of results says."""
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]] if path.exists() else []
    return {"\t".join(row[1:5]): Verdict(row[0], row[5]) for row in rows}


def _write(folder: Path, known: Known) -> None:
    rows = [f"{verdict.result}\t{name}\t{verdict.why}" for name, verdict in dict(known).items()]
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"results.{threading.get_ident()}"
    written.write_text("\n".join([HEAD, *sorted(rows, key=lambda row: row.split("\t")[1:])]) + "\n")
    written.replace(folder / "results.tsv")


def _folders(file: str) -> tuple[str, ...]:
    """The folders of tests that look at a file of the package."""
    return next(area.tests for area in AREAS.values() if any(Path(file).match(pattern) for pattern in area.files))


def chosen(mistake: Mistake, tests: Mapping[str, Mapping[str, Any]], budget: float) -> dict[str, float]:
    """The tests for a mistake, quick ones first, with their seconds. If none runs its lines (those of a class run when
    it is imported), tests that run its file. Kernels are interpreted, and no line is seen: the tests of their area.
    """
    folders, lines = _folders(mistake.file), set(range(mistake.first, mistake.last + 1))
    quick = {test: each for test, each in tests.items() if each["passed"] and each["seconds"] < _TEST_SECONDS / 5}
    candidates = [test for test in quick if test.split("/")[1] in folders]
    if any(each["lines"] for each in quick.values()) and not mistake.file.startswith("kernels/"):
        of_file = [test for test, each in quick.items() if mistake.file in each["lines"]]
        candidates = [test for test in of_file if lines.intersection(quick[test]["lines"][mistake.file])] or of_file
    found: dict[str, float] = {}
    for test in sorted(candidates, key=lambda test: float(quick[test]["seconds"])):
        budget -= quick[test]["seconds"]
        if budget < 0:
            break
        found[test] = quick[test]["seconds"]
    return found


def difference(mistake: Mistake) -> str:
    """What a mistake changes, as a diff without its head."""
    text = (PACKAGE / mistake.file).read_bytes()
    before, after = (each.decode().splitlines() for each in (text, mistake.applied(text)))
    return "\n".join(list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:])


def summary(found: Sequence[Mistake], known: Known) -> str:
    """Those that live without a reason, and counts."""
    counts = Counter(verdict.result for verdict in known.values())
    living = [each for each in found if known[each.name].result in ("lives", "not run") and not known[each.name].why]
    rows = [f"{known[each.name].result}: {each.name}\n{difference(each)}" for each in living]
    counted = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
    return "\n".join([*rows, f"{counted}; {len(living)} live without a reason"])


def main() -> int:
    """Exits with 0 if each mistake is killed, or has a reason to live."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to keep what is found")
    parser.add_argument("--number", type=int, default=200, help="of mistakes (default: 200)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--area", action="append", choices=AREAS, help="may be repeated; all by default")
    parser.add_argument("--again", type=Path, help="try those of this file of results, instead of drawing")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long; the same command continues")
    parser.add_argument("--budget", type=float, default=30, help="seconds of tests for a mistake (default: 30)")
    parser.add_argument("--only-survivors", action="store_true", help="also try those again that lived before")
    parser.add_argument("--list", action="store_true", help="only print the mistakes and what is known")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds - 5  # to end in
    every = everything(PACKAGE, given.area or AREAS)
    known = _read(given.folder / "results.tsv")
    if given.again is None:
        drawn = draw(every, given.number, given.seed)
    else:
        by_name, before = {each.name: each for area in every.values() for each in area}, _read(given.again)
        drawn = [by_name[name] for name in before if name in by_name]
        known |= {name: Verdict("gone") for name in before if name not in by_name}
    known = {each.name: Verdict("not tried") for each in drawn} | known
    if given.list:
        print(*(f"{known[each.name].result:10}{each}" for each in drawn), sep="\n")
    settled = {
        name
        for name, verdict in known.items()
        if verdict.argued or (verdict.result != "not tried" and not given.only_survivors)
    }
    missing = [each for each in drawn if each.name not in settled]
    if missing and not given.list:
        with TemporaryDirectory(prefix="mutants-") as copies:
            search = Search(given.folder, Path(copies), given.workers, until)
            if tests := search.record(drawn):
                search.run(missing, tests, given.budget, known)
    if given.again is not None:  # a reason is the author's, and holds as long as it lives
        known |= {
            name: Verdict(each.result, before[name].why)
            for name, each in known.items()
            if name in before and each.result in ("lives", "not run") and before[name].result == each.result
        }
    _write(given.folder, known)
    print(summary(drawn, known))
    return int(not all(known[each.name].argued for each in drawn))


if __name__ == "__main__":
    sys.exit(main())
