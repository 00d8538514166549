"""What importing costs, and what is public. The rules of the source: `test_floors.py`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import pytest
import typing_calls
from house import folder_of, sources

import kvoffload
from kvoffload import testing

ROOT = Path(kvoffload.__file__).parent

# what importing costs

HEAVY = (
    "torch", "triton", "jax", "cupy", "numba", "matplotlib", "rich", "nvtx", "platformdirs",
    "prometheus_client", "ctypes.wintypes", "tempfile", "concurrent.futures",
)  # fmt: skip


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_few_modules_beyond_numpy() -> None:
    program = "import sys, numpy; before = set(sys.modules); import kvoffload; print(*(set(sys.modules) - before))"
    loaded = run(program).split()
    own = [name for name in loaded if name.startswith("kvoffload")]
    assert len(own) <= 150
    assert len(loaded) - len(own) <= 50, sorted(set(loaded) - set(own))


def test_pitfall_21_importing_loads_no_cuda_and_nothing_heavy() -> None:
    program = "import sys, numpy; before = set(sys.modules); import kvoffload; print(*(set(sys.modules) - before))"
    loaded = set(run(program).split())
    assert not {name for name in loaded if name.split(".")[0] == "cuda"}
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.startswith(("kvoffload.simulator", "kvoffload.commands"))}
    assert "kvoffload.engine.engine" in loaded


def test_pitfall_21_importing_makes_no_driver_call() -> None:
    """Not even by the modules that know the bindings: cuInit is patched to fail the test."""
    program = (
        "import cuda.bindings.driver as d\n"
        "def fail(*_): raise SystemExit('a driver call at import')\n"
        "for name in dir(d):\n"
        "    if name.startswith('cu') and callable(getattr(d, name)) and not isinstance(getattr(d, name), type):\n"
        "        setattr(d, name, fail)\n"
        "import kvoffload, kvoffload.testing, kvoffload.driver.cuda\n"
        "kvoffload.open_device(backend='simulated').close()"
    )
    assert run(program) == ""


# public names

CONTRACT = {
    "BlockCache", "CapabilityError", "CapacityError", "ClosedError", "DriverError", "KVLayout", "KVOffloadError",
    "LayoutError", "NO_WAIT", "OffloadEngine", "Plane", "TransferError", "open_device",
}  # fmt: skip


def test_every_public_name_is_exported_once() -> None:
    for module in (kvoffload, testing):
        names = module.__all__
        assert len(names) == len(set(names))
        assert all(hasattr(module, name) for name in names)
    assert set(kvoffload.__all__) >= CONTRACT
    modules = {folder_of(path) for path in sources()} | {"annotations"}
    public = {name for name in vars(kvoffload) if not name.startswith("_")} - modules
    assert public == set(kvoffload.__all__)
    defined = [getattr(kvoffload, name) for name in kvoffload.__all__]
    assert len({id(each) for each in defined}) == len(defined)


def test_public_names_are_documented() -> None:
    bare = [name for name in kvoffload.__all__ if name != "NO_WAIT" and not getattr(kvoffload, name).__doc__]
    assert bare == []


@pytest.mark.parametrize("error", [name for name in kvoffload.__all__ if name.endswith("Error")])
def test_the_error_tree(error: str) -> None:
    assert issubclass(getattr(kvoffload, error), kvoffload.KVOffloadError)
    assert issubclass(kvoffload.LayoutError, ValueError)


def test_the_package_is_typed() -> None:
    assert (ROOT / "py.typed").exists()


def test_the_version_is_in_one_place_and_is_that_of_the_changelog() -> None:
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"]["path"] == "kvoffload/__init__.py"
    newest = re.search(
        r"^## (\d+\.\d+\.\d+)( \(unreleased\))?", (ROOT.parent / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest is not None
    assert kvoffload.__version__ == newest[1] + (".dev0" if newest[2] else "")
    benchmarks = (ROOT.parent / "benchmarks" / "kvoffload_bench" / "__init__.py").read_text()
    assert f'__version__ = "{kvoffload.__version__}"' in benchmarks, "the benchmarks have the package's version"


def test_typical_calls_do_what_their_types_say() -> None:
    typing_calls.main()


# what is installed


def test_direct_dependencies_are_those_that_are_imported() -> None:
    """`cuda-python` is a meta package; the library imports `cuda.bindings` and, for arrays of others, `cuda.core`."""
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=;\[ ]", each, maxsplit=1)[0] for each in settings["dependencies"]}
    assert needed == {"numpy", "cuda-bindings", "cuda-core", "platformdirs", "xxhash"}
    extras = settings["optional-dependencies"]
    assert set(extras) >= {"cli", "kernels", "plot", "notebook", "cupy", "cupy12", "jax", "jax12", "nvtx", "prometheus"}
    assert extras["cupy12"][0].startswith("cupy-cuda12x")
    assert extras["jax12"][0].startswith("jax[cuda12]")
    assert extras["kernels"][0].startswith("triton")
    assert "kernels" in extras["test"][0], "else tests of kernels are skipped"


@pytest.mark.parametrize(
    ("extra", "taken", "left_out"),
    [
        ("jax", "jax[cuda13]", ["0.7.2", "0.11.2"]),  # a warning at every cache; no donation after np.asarray
        ("jax12", "jax[cuda12]", ["0.7.2", "0.11.2"]),
        ("kernels", "triton", ["3.2.0"]),  # its interpreter is wrong
        (None, "xxhash", ["3.4.0"]),  # was withdrawn
    ],
)
def test_releases_that_do_not_work_are_left_out(extra: str | None, taken: str, left_out: list[str]) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    named = settings["dependencies"] if extra is None else settings["optional-dependencies"][extra]
    (found,) = [requirements.Requirement(each) for each in named if each.startswith(taken)]
    lowest = next(each.version for each in found.specifier if each.operator == ">=")
    assert found.specifier.contains(lowest)
    assert [each for each in left_out if found.specifier.contains(each)] == []


MOST_WHEEL_BYTES = (
    778_000  # pools have 54,000, door and trees 21,000, codec and growth 9,000 each, borders 14,000, weights 9,000,
    # session files 35,000
)
BYTES_A_FILE = 190  # of a wheel beyond its content: two headers of the archive with its name, and its line of RECORD


def test_the_wheel_stays_small() -> None:
    """Computed: building one needs hatchling, from the network. What `pip wheel` builds is within 1% of it."""
    packed = [path for path in ROOT.rglob("*") if path.is_file() and path.suffix in (".py", ".json", ".typed")]
    documents = [ROOT.parent / name for name in ("README.md", "LICENSE")]  # in the wheel's METADATA, and as a file
    content = sum(len(zlib.compress(path.read_bytes(), 6)) for path in [*packed, *documents])
    estimate = content + BYTES_A_FILE * len(packed)
    print(f"about {estimate:,} bytes in {len(packed)} files")
    assert 200_000 < estimate < MOST_WHEEL_BYTES
    unpacked = [path for path in ROOT.rglob("*") if path.is_file() and path not in packed and path.suffix != ".pyc"]
    assert unpacked == [], "files of the package of a kind that is not counted"
