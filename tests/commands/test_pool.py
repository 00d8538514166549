"""`kvoffload pool serve`: what it serves and prints, how it ends, what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benching import refused
from helpers import simulated
from tiering import until

import kvoffload
from kvoffload import NO_WAIT
from kvoffload.commands import main
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool import owner as owners
from kvoffload.terminal.options import size

AXES = ("planes", "blocks", "tokens", "head")
BLOCKS = [0, 1, 2]
BESIDE_A_THREAD = """
import sys, threading

threading.Thread(target=threading.Event().wait, daemon=True).start()  # as numpy's BLAS has them, which block no signal
from kvoffload.commands import main

sys.exit(main())
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members wait for answers: on a busy machine a late one would be a miss."""
    monkeypatch.setattr(SharedPool, "attach", partial(SharedPool.attach, answer_seconds=10.0))


@contextmanager
def serving(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that serves folder/pool, and has said so."""
    command = [sys.executable, "-W", "error", "-c", BESIDE_A_THREAD, "pool", "serve", str(folder / "pool"), *more]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            until(lambda: (folder / "pool").exists() or process.poll() is not None, "the socket")
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], by: signal.Signals) -> tuple[int, str, str]:
    process.send_signal(by)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


@contextmanager
def member(folder: Path) -> Iterator[Any]:
    """A cache over it, which has stored three keys."""
    with simulated() as device:
        array = device.empty((2, 16, 4, 8), "uint8")
        with kvoffload.open_cache(array, axes=AXES, pool=folder / "pool", identity="model@1") as cache:
            keys = cache.keys(range(12), salt="")
            cache.keep(keys, BLOCKS, after=NO_WAIT).wait()
            assert cache.lookup(keys) == 3, "the owner has executed what came before"
            yield cache


def test_it_serves_members_and_says_its_statistics_at_a_signal_and_at_the_end(tmp_path: Path) -> None:
    """A process takes a second to start, so that this one also has tenants."""
    options = ("--policy", "lru", "--tenant", "chat=2", "--tenant", "batch", "--busy-poll", "0.01")
    with serving(tmp_path, "--bytes", "1MiB", *options) as process:
        assert process.stdout is not None
        first = process.stdout.readline() + process.stdout.readline()
        assert first == f"pool: process {process.pid} serves 1.00 MiB until Ctrl-C, at\n{tmp_path}/pool\n"
        with member(tmp_path) as cache:
            process.send_signal(signal.SIGUSR1)
            lines = [process.stdout.readline() for _ in range(6)]
            assert lines[0].startswith("pool: 1 member in 1 region, ")
            assert " ".join(lines[3].split()) == "region bytes members keys at most pending pinned evicted"
            name, _, unit, members, keys, capacity, *others = lines[5].split()
            assert len(bytes.fromhex(name)) == 8
            assert (unit, members, keys, int(capacity), others) == ("MiB", "1", "3", cache.capacity, ["0", "0", "0"])
        assert [stored_by(tmp_path, tenant) for tenant in ("chat", "batch")] == [2, 3], "quotas"
        code, out, errors = ended(process, signal.SIGTERM)
    assert (code, errors) == (0, "")
    assert out.startswith("pool: 0 members in 1 region, ")
    assert not (tmp_path / "pool").exists()


def stored_by(folder: Path, tenant: str) -> int:
    """How many of three keys a tenant may store."""
    with simulated() as device:
        layout = kvoffload.KVLayout.from_tree(device.empty((2, 16, 4, 8), "uint8"), axes=AXES)
        pool = SharedPool.attach(folder / "pool", layout, identity="model@1", tenant=tenant)
        with pool, kvoffload.open_cache(layout, device=device, pool=pool) as cache:
            keys = cache.keys(range(12), salt=tenant)
            cache.keep(keys, BLOCKS, after=NO_WAIT).wait()
            return cache.lookup(keys)


def test_each_region_has_a_file_in_the_folder_and_the_next_owner_reads_it(tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path), "--disk-bytes", "1MiB", "--json")
    with serving(tmp_path, "--bytes", "1MiB", *disk) as process:
        with member(tmp_path) as cache:
            keys = cache.keys(range(12), salt="")
            for _ in range(3):  # asked for again: worth a write
                cache.lookup(keys)
                cache.touch(keys)
        code, out, errors = ended(process, signal.SIGTERM)
    assert (code, errors) == (0, "")
    [region] = json.loads(out)["regions"]
    assert (region["members"], region["resident"]) == (0, 3)
    [file] = tmp_path.glob("*.kv")
    assert file.stem == region["name"]
    assert file.stat().st_size >= 1 << 20
    with serving(tmp_path, "--bytes", "1MiB", *disk) as process:
        with member(tmp_path):
            assert list(tmp_path.glob("*.kv")) == [file], "the same layout and identity have the same name"
        code, out, errors = ended(process, signal.SIGINT)
    assert (code, errors) == (130, "kvoffload: interrupted\n"), "as every command"
    assert (json.loads(out)["pool"], json.loads(out)["nbytes"]) == (f"{tmp_path}/pool", 1 << 20)


# what it refuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "the following arguments are required: --bytes"),
        (("--bytes", "8G"), "argument --bytes: must be bytes, such as 64GiB, 64GB (10**9 each) or 65536, got '8G'"),
        (("--bytes", "0"), "argument --bytes: must be 1 byte to 2**60, got '0'"),
        (("--bytes", "1"), "--bytes and --region-bytes must be at least 12288"),
        (("--bytes", "1MiB", "--region-bytes", "1"), "--bytes and --region-bytes must be at least 12288"),
        (("--bytes", "1MiB", "--tenant", "a=no"), "argument --tenant: must be an integer, got 'no'"),
        (("--bytes", "1MiB", "--tenant", "a=0"), "argument --tenant: must be at least 1, got 0"),
        (("--bytes", "1MiB", "--tenant", "=5"), "argument --tenant: '=5' names no tenant: NAME or NAME=KEYS"),
        (("--bytes", "1MiB", "--tenant", "a=5", "--tenant", "a"), "--tenant names a tenant twice"),
        (("--bytes", "1MiB", "--policy", "best"), "argument --policy: invalid choice: 'best'"),
        (("--bytes", "1MiB", "--busy-poll", "-1"), "busy_poll must be a number of seconds, 0.0 or more, got -1.0"),
        (("--bytes", "1MiB", "--disk", "."), "--disk FOLDER and --disk-bytes SIZE go together"),
        (("--bytes", "1MiB", "--disk-bytes", "1MiB"), "--disk FOLDER and --disk-bytes SIZE go together"),
        (("--bytes", "1MiB", "--disk", "/none", "--disk-bytes", "1MiB"), "--disk /none cannot be used: "),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_options_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, "pool", "serve", str(tmp_path / "pool"), *options)
    assert not (tmp_path / "pool").exists()


def test_a_path_that_cannot_be_served_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    handlers = list(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)))
    said = refused(capsys, "pool", "serve", str(tmp_path / "none" / "pool"), "--bytes", "1MiB")
    assert said == f"kvoffload: error: {tmp_path}/none: there is no such folder: mkdir -p -m 700 {tmp_path}/none\n"
    (tmp_path / "file").touch()
    said = refused(capsys, "pool", "serve", str(tmp_path / "file" / "pool"), "--bytes", "1MiB")
    assert said == f"kvoffload: error: {tmp_path}/file: Not a directory\n"
    assert (tmp_path / "file").read_bytes() == b""
    with PoolOwner(tmp_path / "pool", nbytes=1 << 20):
        said = refused(capsys, "pool", "serve", str(tmp_path / "pool"), "--bytes", "1MiB")
        assert "another owner serves" in said
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    said = refused(capsys, "pool", "serve", str(tmp_path / "open" / "pool"), "--bytes", "1MiB")
    assert "others may write to" in said
    assert list(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))) == handlers


def test_more_bytes_than_there_are_are_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.internal.hostinfo.available_bytes", lambda: 1 << 20)
    said = refused(capsys, "pool", "serve", str(tmp_path / "none" / "pool"), "--bytes", "2MiB")
    assert said.startswith("kvoffload: --bytes is 2.00 MiB, and 1.00 MiB are available now\n")


def test_pool_alone_shows_its_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool"]) == 0
    assert "serve " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096B", 4096),
        ("1.5 MiB", 3 << 19),
        ("2TiB", 2 << 40),
        ("64GB", 64 * 10**9),
        ("1152921504606846976", 1 << 60),
    ],
)
def test_sizes_in_units(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


# how it ends by itself, and how not -----------------------------------------------------------------------------------


def test_a_signal_for_statistics_that_nobody_reads_does_not_end_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--bytes", "1MiB") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.stdout.close()
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            with member(tmp_path) as cache:
                assert cache.lookup(cache.keys(range(12), salt="")) == 3
        assert process.poll() is None


def test_it_goes_on_after_it_was_stopped(tmp_path: Path) -> None:
    with serving(tmp_path, "--bytes", "1MiB") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(0.7)  # longer than it waits for anything
        process.send_signal(signal.SIGCONT)
        for _ in range(2):
            with member(tmp_path) as cache:
                assert cache.lookup(cache.keys(range(12), salt="")) == 3
        assert process.poll() is None


def test_it_says_on_stderr_whom_it_cuts_off(tmp_path: Path) -> None:
    with serving(tmp_path, "--bytes", "1MiB") as process:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            until(lambda: connection.connect_ex(str(tmp_path / "pool")) == 0, "it listens")
            connection.send(b"garbage")
            assert connection.recv(1) == b""
        code, _, errors = ended(process, signal.SIGTERM)
    assert code == 0
    assert errors.startswith(f"a member of {tmp_path}/pool is cut off: MessageError: a datagram of 7 bytes")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_ends_with_its_owner(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error there, so that a service manager starts another one."""
    monkeypatch.setattr(owners, "QUARANTINE_SECONDS", "soon")

    def ask() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            until(lambda: connection.connect_ex(str(tmp_path / "pool")) == 0, "it listens")
            connection.recv(1)  # until the owner has ended

    thread = threading.Thread(target=ask)
    thread.start()
    code = main(["pool", "serve", str(tmp_path / "pool"), "--bytes", "1MiB"])
    thread.join()
    assert code == 2
    assert f"the owner of {tmp_path}/pool has ended: TypeError" in capsys.readouterr().err
