"""Fixtures: simulated devices that check themselves when a test is over, and the GPU where there is one."""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_levels import LEVELS
from hypothesis import settings
from mooncake_servers import MooncakeServers
from seeds import chosen
from servers import Process, ValkeyCluster, seaweed, valkey
from versions import note

import kvoffload
from kvoffload import kernels
from kvoffload.internal import cachefiles
from kvoffload.testing import SimulatedDriver, check_clean_close

# In every process that xdist or a test starts. Else numpy starts a thread for each core there, and all of them spin for
# a tenth of a second: a third of the time that importing the package takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Read when JAX is imported, as some files do when they are collected. Tests of one device use the first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

settings.register_profile("kvoffload", deadline=None, print_blob=True)
settings.load_profile("kvoffload")


RAN = os.environ.pop("KVOFFLOAD_RAN", None)  # not for calls of pytest within tests

_tests = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nearly all that is made meanwhile stays: looking for garbage took a fifth of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every second worker of xdist begins at the last file: in a new clone each compiles half of the tests, and finds
    the others' bytecode; alike, all would compile the same file at the same time, which takes each of them 9 seconds.
    """
    report = yield
    if isinstance(collector, pytest.Directory | pytest.Session) and worker_number(collector.config) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In all workers the same order, as xdist needs it. Without Triton, an extra, what needs kernels is skipped."""
    if kernels.compiler.triton_version() is None:
        for item in items:
            named = item.path.parent.name != "project" and re.search("pack|kernel|every_copier|triton", item.nodeid)
            if named or item.get_closest_marker("kernels"):
                item.add_marker(pytest.mark.skip("needs Triton: pip install '.[kernels]'"))
    if worker_number(config) >= 0:
        items.sort(key=lambda item: item.path.parts)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Why tests were skipped, a line for each reason, where pytest has one for each place (`-rs`, if you want those).
    And the table of versions in docs/limits.md.
    """
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(re.split("[:;] ", report.longrepr[2].removeprefix("Skipped: "))[0] for report in reports)
    if reasons:
        terminalreporter.write_sep("=", f"{reasons.total()} skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} {reason}")
    if RAN is not None and exitstatus == pytest.ExitCode.OK:
        note(Path(RAN), passed=len(terminalreporter.stats["passed"]))


def worker_number(config: pytest.Config) -> int:
    """That of a worker of xdist; -1 in other processes."""
    return int(getattr(config, "workerinput", {"workerid": "gw-1"})["workerid"].removeprefix("gw"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have garbage collections of a test look at what it made, and not at all that pytest and other tests hold: some
    tests collect hundreds of times, which took them 30 times as long. And each test is warned anew.
    """
    gc.freeze()
    cachefiles.warned.clear()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    gc.unfreeze()
    if next(_tests) % 500 == 0:
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the session's own: what was measured on this machine before decides no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVOFFLOAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _bytecode_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """Python processes that tests start share their bytecode: compiling the package takes each of them 2 seconds.

    Where Python writes bytecode beside the sources, it lies there: theirs of this process, and that of other packages.
    """
    own = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        if not sys.dont_write_bytecode:
            yield
            return
        patch.setenv("PYTHONPYCACHEPREFIX", str((own if worker_id == "master" else own.parent) / "bytecode"))
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _jax_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What JAX compiles in the processes of a session is compiled once: a step of a model takes it a second or two.

    A worker has a folder of its own, since JAX does not write its files in one step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "jax"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number of this test's own. KVOFFLOAD_TEST_SEED chooses others; it is printed when the test fails."""
    value = zlib.crc32(f"{chosen()} {request.node.nodeid}".encode())
    print(f"seed={value} (KVOFFLOAD_TEST_SEED={chosen()})")
    return value


@pytest.fixture
def device(seed: int) -> Iterator[kvoffload.Device]:
    """A simulated device of the newest driver and bindings; the test fails if it leaves anything undone on it."""
    opened = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    yield opened
    check_clean_close(opened)


@pytest.fixture(params=LEVELS)
def any_device(request: pytest.FixtureRequest, seed: int) -> Iterator[kvoffload.Device]:
    """The same at every capability level."""
    driver_version, bindings_version = LEVELS[request.param]
    opened = kvoffload.open_device(
        backend=SimulatedDriver(seed=seed, driver_version=driver_version, bindings_version=bindings_version)
    )
    yield opened
    check_clean_close(opened)


@pytest.fixture
def gpu_device() -> Iterator[kvoffload.Device]:
    """The GPU with the number KVOFFLOAD_TEST_DEVICE, 0 by default. Tests that use it are marked `gpu`, and skipped
    without one.
    """
    index = int(os.environ.get("KVOFFLOAD_TEST_DEVICE", "0"))
    try:
        opened = kvoffload.open_device(index, backend="cuda")
    except kvoffload.KVOffloadError as error:
        pytest.skip(f"needs a GPU: {str(error).split(';')[0]}")
    with opened:
        yield opened


@pytest.fixture(params=["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def each_device(request: pytest.FixtureRequest) -> kvoffload.Device:
    """The simulated device, and the GPU under test in a second test, which is marked `gpu`."""
    opened = request.getfixturevalue("device" if request.param == "simulated" else "gpu_device")
    assert isinstance(opened, kvoffload.Device)
    return opened


@pytest.fixture
def on_gpu(gpu_device: kvoffload.Device) -> tuple[str, ...]:
    """The options with which a command uses the GPU under test."""
    return ("--backend", "cuda", "--device", str(gpu_device.index))


@pytest.fixture
def only_gpu(gpu_device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes see the GPU under test alone, as number 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(gpu_device.index + 1)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names[gpu_device.index])


@pytest.fixture
def cupy(gpu_device: kvoffload.Device) -> Iterator[Any]:
    """CuPy, whose current device is the GPU under test."""
    module = pytest.importorskip("cupy")
    with module.cuda.Device(gpu_device.index):
        yield module


@pytest.fixture
def jax(device: kvoffload.Device) -> Iterator[Any]:
    """JAX, which computes on the CPU, as simulated devices do; skips without JAX."""
    from random_programs import jax_on

    with jax_on(device) as module:
        yield module


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns two hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 200)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A Valkey server; each test uses identities of its own."""
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """Three Valkey servers that are a cluster."""
    with ValkeyCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """SeaweedFS with its S3 gateway; each test uses identities of its own."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServers]:
    """A Mooncake master and one store process, which no test kills; each test uses identities of its own."""
    with MooncakeServers(tmp_path_factory.mktemp("mooncake")) as servers:
        yield servers
