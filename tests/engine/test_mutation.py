"""Every wait matters: each call that makes a stream wait is removed in turn, and the ordering tests must then fail. So
do the mistakes of `mutations.py`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mutants import PACKAGE, Run, Site, mutated, run_mutant, wait_sites
from mutations import MUTATIONS, Mutation

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ORDERING_TESTS = [  # those first that are short and notice much
    *(
        str(HERE / name)
        for name in (
            "test_order.py",
            "ordering/test_ordering_segments.py",
            "ordering/test_ordering_parts.py",
            "ordering/test_ordering.py",
            "ordering/test_wait_streams.py",
            "test_mutation_targets.py",
        )
    ),
    str(HERE.parent / "sharded" / "test_sharded_ordering.py"),
]
SITES = wait_sites()
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; 2 to 5 would mean that no test was asked


class Mutants:
    """Runs tests under mutants of the package, which write what they print into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ordering_tests(self, module: str, line: int, column: int, *, stop_early: bool, seeds: int = 2) -> Run:
        return self.pytest(
            [module, str(line), str(column)], _likeliest_first(module), stop_early=stop_early, seeds=seeds
        )

    def pytest(self, mutant: list[str], tests: list[str], *, stop_early: bool = True, seeds: int = 2) -> Run:
        options = ["-n", "0", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=line", "-W", "error", "--timeout=40"]
        options += ["--assert=plain", *(["-x"] if stop_early else [])]  # rewriting the tests' asserts would take time
        environment = {"KVOFFLOAD_ORDERING_SEEDS": str(seeds)}
        with TemporaryDirectory() as own:  # in the folder that pytests share, each also removes the folders of others
            options.append(f"--basetemp={own}/t")
            return run_mutant([*mutant, *options, *tests], environment, self._folder / "output")


@pytest.fixture
def mutants(tmp_path: Path) -> Mutants:
    return Mutants(tmp_path)


def _likeliest_first(module: str) -> list[str]:
    """The ordering tests; those of a module's own before the others."""
    own = f"test_{module.rpartition('.')[2]}.py"
    return sorted(ORDERING_TESTS, key=lambda path: Path(path).name != own)


def test_the_sites_are_found() -> None:
    """For the caller's streams and arrays, the direction, conflicts; between segments; of a piece; of and for a later
    share; by a caller's stream; for what a failure left."""
    names = [site.name for site in SITES]
    assert names.count("stream_wait_event") >= 6
    assert names.count("wait_for_transfer") >= 3
    assert {site.module for site in SITES} >= {
        f"kvoffload.engine.{name}" for name in ("launcher", "shard", "wait_streams")
    }


def test_the_ordering_tests_pass_with_every_wait_in_place(mutants: Mutants) -> None:
    """Of one seed; those of the others pass where they are run without the hook, as tests of their own."""
    run = mutants.ordering_tests("-", 0, 0, stop_early=False, seeds=1)
    assert run.returncode == TESTS_PASSED, run.output


@pytest.mark.parametrize("site", SITES, ids=str)
def test_removing_a_wait_is_noticed(mutants: Mutants, site: Site) -> None:
    run = mutants.ordering_tests(site.module, site.line, site.column, stop_early=True)
    assert run.returncode == TESTS_FAILED, (
        f"{site.module.replace('.', '/')}.py:{site.line}: no test fails without this call of {site.name}\n"
        + run.output[-4000:]
    )
    assert " failed" in run.output, run.output


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_place_of_a_mutation_is_there(mutation: Mutation) -> None:
    assert mutated(mutation, (PACKAGE / mutation.file).read_text()) != (PACKAGE / mutation.file).read_text()


def test_the_named_tests_pass_without_a_mutation(mutants: Mutants) -> None:
    """But for ordering tests, which have passed under the same hook."""
    named = {test for mutation in MUTATIONS for test in mutation.tests if "::" in test}
    tests = sorted(test for test in named if str(ROOT / test.partition("::")[0]) not in ORDERING_TESTS)
    assert 0 < len(tests) < len(named)
    run = mutants.pytest(["-", "0", "0"], tests, stop_early=False)
    assert run.returncode == TESTS_PASSED, run.output


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_noticed(mutants: Mutants, mutation: Mutation) -> None:
    run = mutants.pytest(["--mutation", mutation.name], list(mutation.tests))
    assert run.returncode == TESTS_FAILED, f"{mutation.tests} pass\n{run.output[-4000:]}"
    assert " failed" in run.output, run.output
