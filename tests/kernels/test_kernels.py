"""Kernels: compiled without a GPU, kept in the cache folder, loaded and launched; and what is said where that fails."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from capture_probe import GLOBAL, pushed
from cuda.bindings import driver as bindings

import kvoffload
from kvoffload import CapabilityError, DriverError
from kvoffload.driver import Driver, functions, probe
from kvoffload.errors import KVOffloadWarning
from kvoffload.internal import cachefiles
from kvoffload.kernels import Compiled, KernelSpec, compile_kernel, load_kernel, loader, why_not
from kvoffload.testing import SimulatedDriver, check_clean_close

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
PARAMETERS = (("table", "i64"), ("result", "i64"), ("num_rows", "i32"))
COPY_ROWS = KernelSpec("kernel_for_tests", "copy_rows", PARAMETERS, (("WORDS", 512), ("ROWS", 8), ("ALIGNMENT", 16)), 8)
READ_WORD = KernelSpec("kernel_for_tests", "read_word", (("source", "i64"), ("target", "i64")), (), 4)

A = bindings.CUdevice_attribute
THREADS = int(A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
SHARED = int(A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
MAJOR = int(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)


class Loads:
    """A driver that takes every module; where no GPU is, it shows what would have been loaded."""

    simulated = False

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.launches: list[tuple[int, ...]] = []

    def create(self, name: str, holder: list[int], image: bytes) -> None:
        assert name == "cuModuleLoadData"
        self.images.append(image)
        holder.append(1)

    def destroy(self, name: str, handles: list[int]) -> None:
        assert (name, handles) == ("cuModuleUnload", [1])
        handles.clear()

    def module_function(self, _: int, name: str) -> int:
        assert name in ("read_word", "copy_rows")
        return 2

    def function_max_threads(self, _: int) -> int:
        return 1024

    def function_allow_shared(self, _: int, nbytes: int) -> None:
        assert nbytes > 48 << 10

    def launch(self, *arguments: int) -> None:
        self.launches.append(arguments)


@contextmanager
def device_with(attributes: dict[int, int]) -> Iterator[kvoffload.Device]:
    """A simulated device with other attributes."""
    simulator = SimulatedDriver()
    simulator.attributes |= attributes
    device = kvoffload.open_device(backend=simulator)
    yield device
    check_clean_close(device)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("KVOFFLOAD_CACHE", str(tmp_path))


@pytest.fixture
def capabilities() -> Any:
    with device_with({}) as device:
        return device.capabilities


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """What is compiled, by something quicker than Triton."""
    seen: list[KernelSpec] = []

    def pretend(spec: KernelSpec, _: tuple[int, int], *, cuda: int) -> Compiled:
        assert cuda == 13, "the simulated driver's, and the default"
        seen.append(spec)
        return Compiled(b"\x7fELF" + bytes(range(256)), "// ptx", spec.function, 65_536, 5, spec.threads)

    monkeypatch.setattr(loader, "compile_kernel", pretend)
    return seen


# compiling


@pytest.mark.parametrize("compute_capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_kernels_are_compiled_without_a_gpu(compute_capability: tuple[int, int]) -> None:
    made = compile_kernel(COPY_ROWS, compute_capability)
    assert made.cubin.startswith(b"\x7fELF")
    assert f".target sm_{compute_capability[0]}{compute_capability[1]}" in made.ptx
    assert f".entry {made.name}(" in made.ptx
    assert made.name == "copy_rows"
    assert made.threads == 256
    assert made.shared_bytes >= 2 * 8 * 512 * 8, "a ring of three stages, of which one is being filled"
    assert made.parameter_count >= 3
    assert f"{made.name}_param_{made.parameter_count - 1}" in made.ptx
    assert f"{made.name}_param_{made.parameter_count}" not in made.ptx
    assert "cp.async.cg.shared.global" in made.ptx
    assert "st.global.v2.b64" in made.ptx or "st.global.v4.b32" in made.ptx
    assert "torch" not in sys.modules


def test_what_cannot_be_compiled_is_named_and_the_line_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    broken = KernelSpec("kernel_for_tests", "broken", (("target", "i64"),), (), 4)
    with pytest.raises(
        CapabilityError,
        match=r"cannot compile kernel_for_tests\.broken\(\) for compute capability 9\.0: .*there_is_no_such_function",
    ):
        compile_kernel(broken, (9, 0))
    with pytest.raises(CapabilityError, match=r"read_word\(\) for compute capability 99\.0: ptxas.* fatal .*sm_99"):
        compile_kernel(READ_WORD, (99, 0))
    assert capsys.readouterr().out == "", "standard output belongs to the program"


def test_a_result_that_cannot_be_used_is_a_lack_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(asm={}, metadata=None)

    monkeypatch.setattr("triton.compile", odd)
    with pytest.raises(CapabilityError, match=r"cannot compile kernel_for_tests\.read_word\(\) .* 9\.0: 'ptx'$"):
        compile_kernel(READ_WORD, (9, 0))


def test_a_triton_that_breaks_while_it_is_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("print('hello')\nraise RuntimeError('many\\nlines, and no such symbol')")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from kvoffload import CapabilityError; from kvoffload.kernels import KernelSpec, compile_kernel\n"
        "try: compile_kernel(KernelSpec('kernel_for_tests', 'read_word', (), (), 4), (9, 0))\n"
        "except CapabilityError as error: print(error)"
    )
    assert run(program) == (
        "kernels need Triton, which cannot be imported (lines, and no such symbol); "
        "install it: pip install 'triton>=3.3'"
    )


def test_triton_needs_no_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert compile_kernel(READ_WORD, (9, 0)).cubin
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "file" / "below")


def test_a_users_choice_to_store_binaries_alone_takes_no_kernel_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert ".entry read_word(" in compile_kernel(READ_WORD, (9, 0)).ptx
    assert os.environ["TRITON_STORE_BINARY_ONLY"] == "1"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "Triton's folder may hold this kernel by another ptxas"


@pytest.mark.parametrize("compute_capability", [(9, 0), (10, 0)])
def test_a_driver_of_cuda_12_gets_machine_code_of_cuda_12(
    compute_capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)
    made = compile_kernel(READ_WORD, compute_capability, cuda=12)
    assert re.search(r"^\.version 8\.", made.ptx, re.MULTILINE), "9 begins with CUDA 13"
    assert "TRITON_PTXAS_BLACKWELL_PATH" not in os.environ


def test_a_ptxas_that_the_user_names_assembles_for_every_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some releases read one of the variables, some the other."""
    if metadata.version("triton").startswith("3.3."):
        pytest.skip("Triton 3.3 looks for ptxas once in a process")
    ptxas = tmp_path / "ptxas"
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9'\n[ $# = 1 ] || exit 77\n")
    ptxas.chmod(0o700)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(name, str(ptxas))
    for cuda in (12, 13):
        with pytest.raises(CapabilityError, match="77"):
            compile_kernel(READ_WORD, (9, 0), cuda=cuda)


def run(program: str, **environment: str) -> str:
    """The output of a program that finds the package and the kernels of the tests."""
    paths = os.pathsep.join(map(str, (ROOT, TESTS / "support", TESTS / "kernels", os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_a_program_that_has_set_tritons_interpreter_can_compile_too() -> None:
    program = "from test_kernels import *; print(compile_kernel(READ_WORD, (9, 0)).name)"
    assert run(program, TRITON_INTERPRET="1") == "read_word"


# no Triton


NO_TRITON = "import sys; sys.modules['triton'] = None; from test_kernels import *\n"


def test_without_triton_there_is_a_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    remedy = r"kernels need Triton, which cannot be imported \(.*\); install it: pip install 'triton>=3\.3'"
    with pytest.raises(CapabilityError, match=remedy):
        compile_kernel(READ_WORD, (9, 0))
    with device_with({}) as device, device.current():
        with pytest.raises(CapabilityError, match=remedy):
            load_kernel(device.driver, device.capabilities, READ_WORD)
        assert device.simulator.leaks()["modules"] == 0


def test_a_triton_whose_interpreter_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.2 reports chunks that do not fit as fit. A GPU gets no kernels by it either, so that both take the same."""
    monkeypatch.setattr("triton.__version__", "3.2.0")
    refused = r"kernels need Triton 3\.3 or newer, and 3\.2\.0 is installed; install it: pip install 'triton>=3\.3'"
    with pytest.raises(CapabilityError, match=refused):
        compile_kernel(READ_WORD, (9, 0))
    with device_with({}) as device, device.current(), pytest.raises(CapabilityError, match=refused):
        load_kernel(device.driver, device.capabilities, READ_WORD)
    monkeypatch.setattr("triton.__version__", "3.10.0+git1")
    assert compile_kernel(READ_WORD, (9, 0)).name == "read_word"


def test_a_triton_that_is_not_installed_is_seen_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: Any
) -> None:
    assert why_not(capabilities) is None

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    reason = "kernels need Triton, which is not installed; install it: pip install 'triton>=3.3'"
    assert why_not(capabilities) == reason
    with pytest.raises(CapabilityError) as caught:
        loader.compiled_kernel(READ_WORD, (9, 0))
    assert str(caught.value) == reason


def test_importing_the_loader_imports_nothing_heavy() -> None:
    program = "import sys, kvoffload.kernels; print(*sys.modules)"
    loaded = set(run(program).split())
    # The package `cuda` itself may be loaded when Python starts: bindings 12.9 make it so.
    assert not {name for name in loaded if name.startswith(("triton", "cuda.", "torch"))}
    assert "kvoffload.kernels.pack" not in loaded


# the cache


def test_a_kernel_from_the_cache_is_loaded_without_triton(tmp_path: Path, capabilities: Any) -> None:
    driver: Any = Loads()
    load_kernel(driver, capabilities, READ_WORD)
    program = (
        f"{NO_TRITON}import types, pickle\n"
        "capabilities = types.SimpleNamespace(kernels=True, compute_capability=(9, 0), driver_version=(13, 0))\n"
        "capabilities.max_shared_bytes = 232448\n"
        "driver = Loads()\n"
        "kernel = load_kernel(driver, capabilities, READ_WORD)\n"
        "kernel.launch(1, 4, (2, 3))\n"
        "print(driver.images[0].hex(), [name for name in sys.modules if name.startswith('triton.')])"
    )
    image, imported = run(program, KVOFFLOAD_CACHE=str(tmp_path)).split(" ", 1)
    assert bytes.fromhex(image) == driver.images[0]
    assert imported == "[]"


def test_a_kernel_is_compiled_once(tmp_path: Path, compilations: list[KernelSpec]) -> None:
    first = loader.compiled_kernel(READ_WORD, (9, 0))
    assert loader.compiled_kernel(READ_WORD, (9, 0)) == first
    assert compilations == [READ_WORD]
    (file,) = (tmp_path / "kernels").iterdir()
    assert file == loader.kernel_path(READ_WORD, (9, 0))


def test_every_input_of_the_compilation_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel_in_a_folder.py").write_text("A = 1")
    monkeypatch.syspath_prepend(tmp_path)
    spec = READ_WORD._replace(module="kernel_in_a_folder")
    paths = [loader.kernel_path(each, (9, 0)) for each in (spec, READ_WORD, spec._replace(warps=8))]
    paths.append(loader.kernel_path(spec._replace(constants=(("WORDS", 8),)), (9, 0)))
    paths.append(loader.kernel_path(spec, (8, 0)))
    monkeypatch.setattr(metadata, "version", lambda _: "3.99")
    paths.append(loader.kernel_path(spec, (9, 0)))
    (tmp_path / "kernel_in_a_folder.py").write_text("A = 2")
    paths.append(loader.kernel_path(spec, (9, 0)))
    monkeypatch.setattr(loader, "OPTIONS", {})
    paths.append(loader.kernel_path(spec, (9, 0)))
    assert len(set(paths)) == len(paths) == 8
    assert "kernel_in_a_folder" not in sys.modules


def test_another_ptxas_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: Any
) -> None:
    """It is named by variables, or chosen by the version of the driver."""
    ptxas = tmp_path / "ptxas"
    ptxas.touch()
    paths = [loader.kernel_path(READ_WORD, (9, 0), cuda=cuda) for cuda in (12, 13)]
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "PTXAS_OPTIONS", "DISABLE_LLVM_OPT"):
        monkeypatch.setenv(name, str(ptxas))
        paths.append(loader.kernel_path(READ_WORD, (9, 0)))
    os.utime(ptxas, (1, 1))  # another ptxas takes its place
    paths.append(loader.kernel_path(READ_WORD, (9, 0)))
    assert len(set(paths)) == len(paths) == 7
    asked: list[int] = []

    def pretend(spec: KernelSpec, _: tuple[int, int], *, cuda: int) -> Compiled:
        asked.append(cuda)
        return Compiled(b"", "", spec.function, 0, 5, spec.threads)

    monkeypatch.setattr(loader, "compile_kernel", pretend)
    older = capabilities.__class__(**{**_fields(capabilities), "driver_version": (12, 9)})
    driver: Any = Loads()
    for can in (capabilities, older, capabilities, older):
        load_kernel(driver, can, READ_WORD)
    assert asked == [13, 12]


def test_a_kernel_that_a_driver_refuses_is_named_with_a_remedy(capabilities: Any) -> None:
    class Refuses(Loads):
        def create(self, name: str, _: list[int], image: bytes) -> None:
            raise DriverError(name, "CUDA_ERROR_INVALID_IMAGE", 200, f"{len(image)} bytes")

        def destroy(self, _: str, handles: list[int]) -> None:
            assert handles == []

    driver: Any = Refuses()
    older = capabilities.__class__(**{**_fields(capabilities), "driver_version": (12, 9)})
    remedy = r"INVALID_IMAGE.* this driver of CUDA 12\.9, update it, or let TRITON_PTXAS_PATH .* CUDA 12\.9 or older"
    with pytest.raises(CapabilityError, match=remedy):
        load_kernel(driver, older, READ_WORD)


def test_a_kernel_without_source_is_refused() -> None:
    with pytest.raises(CapabilityError, match="the source of no_such_module is needed"):
        loader.kernel_path(READ_WORD._replace(module="no_such_module"), (9, 0))


def _flipped(content: bytes) -> bytes:
    """With one character of the machine code changed."""
    at = content.index(b'"cubin": "') + 30
    return content[:at] + (b"A" if content[at : at + 1] != b"A" else b"B") + content[at + 1 :]


def _renamed(content: bytes) -> bytes:
    """Whole, with its checksum, but of another version of this library."""
    fields = json.loads(content)["kernel"]
    fields["title"] = fields.pop("name")
    return json.dumps({"sha256": loader._digest(fields), "kernel": fields}).encode()


def _with(**changes: Any) -> Callable[[bytes], bytes]:
    """Whole, with its checksum, but with other fields."""

    def change(content: bytes) -> bytes:
        fields = json.loads(content)["kernel"] | changes
        return json.dumps({"sha256": loader._digest(fields), "kernel": fields}).encode()

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"[" * 200_000,
        _with(made_for="0" * 64),
        _with(cubin=[1]),
        _with(cubin="~~~~"),
        _with(ptx=None),
        _with(name=5),
        _with(shared_bytes=-1),
        _with(shared_bytes="65536"),
        _with(parameter_count=1),
        _with(parameter_count=10**12),
        _with(parameter_count=5.0),
        _with(threads=256),
        _with(threads=True),
        lambda _: b"",
        lambda content: content[: len(content) // 2],
        _flipped,
        _renamed,
        lambda _: b"[]",
        lambda _: b'{"kernel": {}, "sha256": "0"}',
        lambda _: bytes(range(256)),
    ],
)
def test_a_damaged_file_is_ignored_and_made_again(
    compilations: list[KernelSpec], damage: Callable[[bytes], bytes]
) -> None:
    whole = loader.compiled_kernel(READ_WORD, (9, 0))
    path = loader.kernel_path(READ_WORD, (9, 0))
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert loader.compiled_kernel(READ_WORD, (9, 0)) == whole
    assert len(compilations) == 2
    assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_file_of_another_kernel_is_ignored(compilations: list[KernelSpec]) -> None:
    wider = READ_WORD._replace(constants=(("WORDS", 8),))
    one, other = (loader.kernel_path(spec, (9, 0)) for spec in (READ_WORD, wider))
    for spec in (READ_WORD, wider):
        loader.compiled_kernel(spec, (9, 0))
    content = other.read_bytes()
    other.write_bytes(one.read_bytes())
    loader.compiled_kernel(wider, (9, 0))
    assert compilations == [READ_WORD, wider, wider]
    assert other.read_bytes() == content


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_ignored_and_made_again(compilations: list[KernelSpec], mode: int) -> None:
    loader.compiled_kernel(READ_WORD, (9, 0))
    path = loader.kernel_path(READ_WORD, (9, 0))
    path.chmod(mode)
    loader.compiled_kernel(READ_WORD, (9, 0))
    assert len(compilations) == 2
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    loader.compiled_kernel(READ_WORD, (9, 0))
    assert len(compilations) == 2, "others may read it"


@pytest.mark.parametrize(("owner", "count"), [(0, 1), (12345, 1), (54321, 2)])
def test_a_file_of_another_user_is_ignored(
    compilations: list[KernelSpec], monkeypatch: pytest.MonkeyPatch, owner: int, count: int
) -> None:
    loader.compiled_kernel(READ_WORD, (9, 0))
    real = os.fstat

    def owned(handle: int) -> os.stat_result:
        fields = list(real(handle))
        fields[4] = owner
        return os.stat_result(fields)

    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        patch.setattr(os, "fstat", owned)
        loader.compiled_kernel(READ_WORD, (9, 0))
    assert len(compilations) == count


def test_folders_for_cached_files_are_made_for_one_user(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "kernels" / "file"
    assert cachefiles.write(path, b"content")
    assert {folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent)} == {0o700}
    path.parent.parent.chmod(0o755)
    assert cachefiles.write(path, b"more")
    assert path.parent.parent.stat().st_mode & 0o777 == 0o755, "a folder that is there stays as it is"


def test_where_nothing_can_be_written_kernels_work_and_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[KernelSpec], capabilities: Any
) -> None:
    (tmp_path / "file").touch()
    driver: Any = Loads()
    monkeypatch.setenv("KVOFFLOAD_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(
        KVOffloadWarning, match=r"below/kernels cannot be written \(Not a directory\): .* KVOFFLOAD_CACHE"
    ):
        load_kernel(driver, capabilities, READ_WORD)
    load_kernel(driver, capabilities, COPY_ROWS)  # a second warning would be an error
    assert len(compilations) == len(driver.images) == 2
    assert not isinstance(KVOffloadWarning("..."), kvoffload.KVOffloadError)


def test_a_file_that_cannot_be_read_is_as_good_as_none(compilations: list[KernelSpec]) -> None:
    loader.kernel_path(READ_WORD, (9, 0)).mkdir(parents=True)
    with pytest.warns(KVOffloadWarning, match="cannot be written"):
        assert loader.compiled_kernel(READ_WORD, (9, 0)).threads == 128
    assert compilations == [READ_WORD]


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVOFFLOAD_CACHE", str(tmp_path / "chosen"))
    assert cachefiles.cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("KVOFFLOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cachefiles.cache_folder() == tmp_path / "kvoffload"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "file"
    assert cachefiles.write(path, b"before")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    if isinstance(error, OSError):
        with pytest.warns(KVOffloadWarning, match="No space left on device"):
            assert not cachefiles.write(path, b"after")
    else:
        with pytest.raises(KeyboardInterrupt):
            cachefiles.write(path, b"after")
    assert cachefiles.read(path) == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_without_a_text_of_its_own_is_told_and_a_lost_file_is_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(name: str, _: Path) -> None:
        os.unlink(name)
        raise OSError("folder was deleted")

    monkeypatch.setattr(os, "replace", lose)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(KVOffloadWarning, match=r"cannot be written \(folder was deleted\)"):
        assert not cachefiles.write(tmp_path / "file", b"content")
    assert len(os.listdir("/proc/self/fd")) == before

    def refuse(**_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert cachefiles.why_not_writable() == "no room"


def test_processes_that_write_the_same_file_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    program = (
        "import sys; from pathlib import Path; from kvoffload.internal import cachefiles\n"
        "for _ in range(300): assert cachefiles.write(Path(sys.argv[1]), sys.argv[2].encode() * 100_000)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), letter], env=environment) for letter in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        content = cachefiles.read(path)
        if content is not None:
            assert len(content) == 100_000
            assert len(set(content)) == 1
            seen.add(content[:1])
    assert [writer.wait(30) for writer in writers] == [0, 0]
    assert seen == {b"a", b"b"}
    assert list(path.parent.iterdir()) == [path]


# what the GPU can do


def test_pitfall_34_a_gpu_with_less_shared_memory_is_refused_when_the_kernel_is_loaded() -> None:
    with device_with({SHARED: 48 << 10}) as device, device.current():
        assert device.capabilities.max_shared_bytes == 49_152
        with pytest.raises(
            CapabilityError, match="needs 65536 bytes of shared memory in a block, and this GPU has 49152"
        ):
            load_kernel(device.driver, device.capabilities, COPY_ROWS)
        assert device.simulator.faults.call_count["cuModuleLoadData"] == 0


def test_pitfall_34_the_shared_memory_asked_for_is_what_was_compiled(capabilities: Any) -> None:
    driver: Any = Loads()
    kernel = load_kernel(driver, capabilities, COPY_ROWS)
    assert kernel.shared_bytes == compile_kernel(COPY_ROWS, (9, 0)).shared_bytes
    less = capabilities.__class__(**{**_fields(capabilities), "max_shared_bytes": kernel.shared_bytes - 1})
    with pytest.raises(CapabilityError, match=f"needs {kernel.shared_bytes} bytes of shared memory"):
        load_kernel(driver, less, COPY_ROWS)


def _fields(capabilities: Any) -> dict[str, Any]:
    return {name: getattr(capabilities, name) for name in capabilities.__dataclass_fields__}


def test_bindings_without_kernel_calls_are_no_error_until_a_kernel_is_loaded() -> None:
    class Without:
        """A simulator whose bindings lack two calls."""

        def __init__(self, simulator: SimulatedDriver) -> None:
            self._simulator = simulator

        def __getattr__(self, name: str) -> Any:
            if name in ("cuModuleLoadData", "cuLaunchKernel"):
                raise AttributeError(name)
            return getattr(self._simulator, name)

    with device_with({}) as device, device.current():
        poor = Driver(Without(device.simulator), raw=None, bindings_version=(13, 3), simulated=True)
        found = probe(poor, 0)
        assert not found.kernels
        assert why_not(found) == "these bindings (13.3) have no cuModuleLoadData, cuLaunchKernel"
        with pytest.raises(CapabilityError, match="have no cuModuleLoadData"):
            load_kernel(poor, found, READ_WORD)


# loading and launching


def copy_some_rows(device: kvoffload.Device, count: int, grid: int) -> None:
    """Copy rows from device memory to registered host memory, and compare."""
    nbytes, driver = 4096, device.driver
    chance = np.random.default_rng(count)
    content = chance.integers(0, 256, count * nbytes, dtype=np.uint8)
    buffer = device.allocate(content.size)
    host = _pages(content.size + 8192)
    with device.current():
        driver.copy_to_device(buffer.address, _address(content), content.size)
        driver.host_register(_address(host), host.size)
        base = driver.host_device_address(_address(host))
        order = chance.permutation(count)
        table = host[content.size :].view(np.int64)
        table[:count] = buffer.address + nbytes * order
        table[count : 2 * count] = base + nbytes * np.arange(count)
        kernel = load_kernel(driver, device.capabilities, COPY_ROWS)
        stream = driver.stream_create(0)
        kernel.launch(stream, grid, (base + content.size, base + host.size - 8, count))
        driver.stream_synchronize(stream)
        kernel.close()
        kernel.close()
        driver.stream_destroy(stream)
        driver.host_unregister(_address(host))
    buffer.close()
    assert (host[: content.size].reshape(count, nbytes) == content.reshape(count, nbytes)[order]).all()
    assert host[-8:].view(np.int32)[0] == count
    assert repr(kernel).endswith("shared bytes, closed)")


def _pages(nbytes: int) -> Any:
    """Zeros, in pages of their own."""
    raw = np.zeros(nbytes + 8192, np.uint8)
    start = -_address(raw) % 4096
    return raw[start : start + nbytes]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(("count", "grid"), [(1, 1), (13, 3), (64, 4)])
def test_a_kernel_copies_rows_on_the_simulated_device(device: kvoffload.Device, count: int, grid: int) -> None:
    copy_some_rows(device, count, grid)


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "grid"), [(1, 1), (13, 3), (500, 4)])
def test_a_kernel_copies_rows_on_the_gpu(gpu_device: kvoffload.Device, count: int, grid: int) -> None:
    for _ in range(2):  # compiled, then from the cache
        copy_some_rows(gpu_device, count, grid)


@pytest.mark.gpu
def test_a_kernel_that_the_older_ptxas_assembled_is_loaded_by_the_gpu(gpu_device: kvoffload.Device) -> None:
    """As a driver of CUDA 12 gets it; drivers of CUDA 13 load both."""
    older = gpu_device.capabilities.__class__(**{**_fields(gpu_device.capabilities), "driver_version": (12, 9)})
    for can in (older, gpu_device.capabilities):
        with gpu_device.current():
            load_kernel(gpu_device.driver, can, COPY_ROWS).close()


def test_a_launch_is_one_driver_call_with_its_arguments_in_place(capabilities: Any) -> None:
    driver: Any = Loads()
    kernel = load_kernel(driver, capabilities, COPY_ROWS)
    for arguments in ((1 << 40, 7, -3), (0, 0, 2**31 - 1)):
        kernel.launch(5, 4, arguments)
        function, grid, threads, shared_bytes, stream, pointers = driver.launches[-1]
        assert (function, grid, threads, shared_bytes, stream) == (2, 4, 256, kernel.shared_bytes, 5)
        count = compile_kernel(COPY_ROWS, (9, 0)).parameter_count
        addresses = struct.unpack(f"<{count}Q", _memory(pointers, 8 * count))
        values = [_memory(address, 8) for address in addresses]
        assert struct.unpack("<q", values[0]) + struct.unpack("<q", values[1]) == arguments[:2]
        assert struct.unpack("<i", values[2][:4]) == arguments[2:]
        assert values[3:] == [bytes(8)] * (count - 3), "Triton's own, at the end"
    assert len(driver.launches) == 2
    assert driver.launches[0][-1] == driver.launches[1][-1], "nothing is allocated for a launch"
    for wrong in ((1, 2), (1, 2, 3, 4), (1, 2, 2**31), (1, 1 << 63, 2), (1, 2, 0.5)):
        with pytest.raises(struct.error):
            kernel.launch(5, 4, wrong)  # type: ignore[arg-type]
    assert len(driver.launches) == 2


def _memory(address: int, nbytes: int) -> bytes:
    from kvoffload.simulator import space

    return space.view(address, nbytes).tobytes()


LOADING = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute"]


@pytest.mark.parametrize("call", LOADING)
@pytest.mark.parametrize("error", ["NO_BINARY_FOR_GPU", "INVALID_IMAGE", "UNSUPPORTED_PTX_VERSION", "UNKNOWN"])
def test_a_kernel_that_cuda_refuses_is_a_lack_of_this_gpu_and_leaves_nothing_behind(
    device: kvoffload.Device, call: str, error: str
) -> None:
    refusal = getattr(bindings.CUresult, f"CUDA_ERROR_{error}")
    with device.current():
        device.simulator.faults.fail_call(call, error=refusal)
        with pytest.raises(CapabilityError, match=rf"copy_rows\(.*\) cannot .*{call} returned CUDA_ERROR_{error} \("):
            load_kernel(device.driver, device.capabilities, COPY_ROWS)
        assert device.simulator.leaks()["modules"] == 0
        load_kernel(device.driver, device.capabilities, COPY_ROWS).close()


@pytest.mark.parametrize("call", LOADING)
@pytest.mark.parametrize("error", ["OUT_OF_MEMORY", "ILLEGAL_ADDRESS"])
def test_a_lost_context_or_no_memory_while_a_kernel_is_loaded_is_a_driver_error(
    device: kvoffload.Device, call: str, error: str
) -> None:
    with device.current():
        device.simulator.faults.fail_call(call, error=getattr(bindings.CUresult, f"CUDA_ERROR_{error}"))
        with pytest.raises(DriverError, match=f"{call} returned CUDA_ERROR_{error}"):
            load_kernel(device.driver, device.capabilities, COPY_ROWS)
        assert device.simulator.leaks()["modules"] == 0
        kernel = load_kernel(device.driver, device.capabilities, COPY_ROWS)
        kernel.close()


def test_an_error_of_a_launch_is_a_driver_error(device: kvoffload.Device) -> None:
    with device.current():
        kernel = load_kernel(device.driver, device.capabilities, READ_WORD)
        with pytest.raises(DriverError, match="cuLaunchKernel returned CUDA_ERROR_INVALID_VALUE"):
            kernel.launch(1, 0, (0, 0))
        kernel.close()


def test_a_kernel_can_be_loaded_while_a_stream_is_captured(device: kvoffload.Device) -> None:
    capture_table = _capture_verdicts(device, READ_WORD, relaxed=True)
    assert set(capture_table.values()) == {"CUDA_SUCCESS"}


MODULE_CALLS = {  # while another stream is captured, in the mode GLOBAL
    "cuModuleLoadData": "CUDA_SUCCESS",
    "cuModuleUnload": "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    "cuModuleGetFunction": "CUDA_SUCCESS",
    "cuFuncGetAttribute": "CUDA_SUCCESS",
    "cuFuncSetAttribute": "CUDA_SUCCESS",
    "cuLaunchKernel": "CUDA_SUCCESS",
}


def test_the_simulator_forbids_what_cuda_forbids_during_a_capture(device: kvoffload.Device) -> None:
    assert _capture_verdicts(device, READ_WORD) == MODULE_CALLS


@pytest.mark.gpu
def test_cuda_forbids_what_the_simulator_forbids_during_a_capture(gpu_device: kvoffload.Device) -> None:
    assert _capture_verdicts(gpu_device, READ_WORD) == MODULE_CALLS
    capture_table = _capture_verdicts(gpu_device, READ_WORD, relaxed=True)
    assert set(capture_table.values()) == {"CUDA_SUCCESS"}


def _capture_verdicts(device: kvoffload.Device, spec: KernelSpec, *, relaxed: bool = False) -> dict[str, str]:
    """What each call answers while another stream is captured, and in the library's capture mode if `relaxed`."""
    api, driver = device.driver.api, device.driver
    made = loader.machine_code(driver, device.capabilities, spec)
    arguments = np.zeros(made.parameter_count, np.uint64)
    memory = device.allocate(8)
    arguments[:2] = memory.address
    pointers = _address(arguments) + 8 * np.arange(made.parameter_count, dtype=np.uint64)
    attribute = bindings.CUfunction_attribute
    with device.current():
        captured, stream = driver.stream_create(0), driver.stream_create(0)
        module, spare = (int(driver.call("cuModuleLoadData", made.cubin)) for _ in range(2))
        function = driver.module_function(module, made.name)
        kernel = (function, 1, 1, 1, made.threads, 1, 1, made.shared_bytes, stream, _address(pointers), 0)
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.function_allow_shared(function, 65_536)
    calls: dict[str, Callable[[], Any]] = {
        "cuModuleLoadData": lambda: api.cuModuleLoadData(made.cubin),
        "cuModuleUnload": lambda: api.cuModuleUnload(spare),
        "cuModuleGetFunction": lambda: api.cuModuleGetFunction(module, made.name.encode()),
        "cuFuncGetAttribute": lambda: api.cuFuncGetAttribute(
            attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function
        ),
        "cuFuncSetAttribute": lambda: api.cuFuncSetAttribute(function, most, 65_536),
        "cuLaunchKernel": lambda: api.cuLaunchKernel(*kernel),
    }
    answers = {}
    for name, call in calls.items():
        with pushed(device):
            assert int(api.cuStreamBeginCapture(captured, GLOBAL)[0]) == 0
            before = driver.relax_capture_mode() if relaxed else None
            status, *values = call()
            if relaxed:
                driver.restore_capture_mode(before)
            answers[name] = status.name
            ended = api.cuStreamEndCapture(captured)[0].name
            assert (ended == "CUDA_SUCCESS") == (answers[name] == "CUDA_SUCCESS")
            if name == "cuModuleLoadData" and status.name == "CUDA_SUCCESS":
                driver.call("cuModuleUnload", values[0])
    with device.current():
        driver.stream_synchronize(stream)
        for each in (module, *([spare] if answers["cuModuleUnload"] != "CUDA_SUCCESS" else [])):
            driver.call("cuModuleUnload", each)
        driver.stream_destroy(captured)
        driver.stream_destroy(stream)
    memory.close()
    return answers


def test_the_seams_kernel_calls_are_listed_once() -> None:
    assert set(functions.KERNELS) < set(functions.OPTIONAL)
    assert len(set(functions.OPTIONAL)) == len(functions.OPTIONAL)
