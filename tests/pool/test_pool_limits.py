"""What a shared pool refuses, drops or says once: messages that are too large, members, removals, bad arguments."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pooling import SECONDS, SOURCES, Made, Rows, Standing, eventually, keys_of, member, region_bytes, serve

from kvoffload import NO_WAIT, CapabilityError, CapacityError, LayoutError, Status, Tenant
from kvoffload.pool import PoolOwner, SharedPool, messages, shared_pool, watching
from kvoffload.pool.messages import MOST_KEY_BYTES, MOST_MESSAGE

# messages that are too large ------------------------------------------------------------------------------------------


def test_a_call_with_too_many_keys_finds_none_and_stays_connected(tmp_path: Path, caplog: Any) -> None:
    keys = [*keys_of([1]), *(b"%064d" % number for number in range(MOST_MESSAGE // MOST_KEY_BYTES))]
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1)
        for _ in range(2):
            assert one.cache.lookup(keys) == 0
            assert one.cache.status(keys) == [Status.MISS] * len(keys)
            assert one.cache.remove(keys) == 0
            assert one.cache.reserve(keys).keys == ()
            one.cache.touch(keys)
            assert one.pool.connected
            one.check_load(1)
        assert len(caplog.messages) == 1
        assert f"has keys of more than {messages.MOST_MESSAGE} bytes" in caplog.text
        one.store(2)
        one.check_load(1, 2)
        assert one.pool.generation == 0


# members that the next owner refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, CapabilityError, LayoutError, RuntimeError])
def test_a_member_says_each_reason_once_for_which_the_next_owner_refuses_it_and_asks_on(
    error: type[Exception], tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.02)
    reasons, asked = ["the owner speaks version 2"], list[str]()

    def tiers(*_: str) -> list[Any]:
        asked.append("")
        if reasons:
            raise error(reasons[0])
        return []

    def said() -> list[str]:
        return [each for each in caplog.messages if "does not take this engine's memory" in each]

    with serve(tmp_path, 8) as first, member(first.path) as one:
        one.store(1)
        first.close()
        with serve(tmp_path, 8, tiers=tiers):
            eventually(lambda: len(asked) >= 4, "it asks again")
            reasons[0], before = "no disk", len(asked)
            eventually(lambda: len(asked) >= before + 4, "it asks on")
            texts = [f"({error.__name__}: {reason})" for reason in ("the owner speaks version 2", "no disk")]
            assert [text in each for text, each in zip(texts, said(), strict=True)] == [True, True]
            assert one.hits(1) == 0
            reasons.clear()
            eventually(lambda: one.hits(1), "it is taken")
            one.check_load(1)


# where it is served ---------------------------------------------------------------------------------------------------


def test_a_relative_path_stays_what_it_was_when_the_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.02)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    first = PoolOwner("pool", nbytes=region_bytes(8))
    assert first.path == str(tmp_path / "pool")
    with member("pool") as one:
        one.store(1)
        monkeypatch.chdir(other)
        first.close()
        with serve(tmp_path, 8):
            eventually(lambda: one.hits(1), "it finds the next owner")
            one.check_load(1)
    monkeypatch.chdir(tmp_path)
    second = PoolOwner(Path("other/pool"), nbytes=region_bytes(8))
    monkeypatch.chdir("/")
    second.close()
    assert os.listdir(other) == []


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("", ValueError, "path must name a socket, got ''"),
        ("a\0b", ValueError, r"path must name a socket, got 'a\\x00b'"),
        ("\0abstract", ValueError, "path must name a socket"),
        (3, TypeError, "path must be a string or a Path, got 3"),
        (b"pool", TypeError, "path must be a string or a Path, got b'pool'"),
        ("/" + "x" * 107, ValueError, "path must have at most 107 bytes, as every socket's, got 108: '/xxx"),
    ],
)
def test_a_path_that_no_socket_can_have_is_refused_at_once(path: Any, error: type[Exception], text: str) -> None:
    """No owner is waited for."""
    with pytest.raises(error, match=text):
        PoolOwner(path, nbytes=1 << 20)
    with pytest.raises(error, match=text):
        SharedPool.attach(path, Rows(), identity="m")
    with pytest.raises(error, match=text):
        SharedPool.beside(path, "engine", 1)


# arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"identity": "\U0001f600" * 4096},
            ValueError,
            "identity has 4096 characters, and may have 4096, or 1024 ",
        ),
        ({"identity": "i" * 60_000}, ValueError, "identity has 60000 characters"),
        ({"tenant": "t" * 60_000}, ValueError, "tenant has 60000 characters"),
        ({"engine": ("e" * 60_000, 0)}, ValueError, "engine has 60000 characters"),
        ({"engine": (3, 0)}, TypeError, "engine must be a string, got 3"),
        ({"engine": 5}, ValueError, "engine must be a name and a part, 0 to 1, got 5"),
        ({"engine": ()}, ValueError, r"engine must be a name and a part, 0 to 1, got \(\)"),
        ({"engine": ("", 0)}, ValueError, "engine must be a name and a part"),
        ({"engine": ("e", -1)}, ValueError, r"a name and a part, 0 to 1, got \('e', -1\)"),
        ({"engine": ("e", "0")}, ValueError, r"a name and a part, 0 to 1, got \('e', '0'\)"),
        ({"engine": ("e", 2)}, ValueError, r"a name and a part, 0 to 1, got \('e', 2\)"),
        ({"timeout": float("inf")}, ValueError, "timeout must be a number of seconds"),
        ({"identity": 3}, TypeError, "identity must be a string, got 3"),
        ({"tenant": b"x"}, TypeError, "tenant must be a string, got b'x'"),
    ],
)
def test_what_no_owner_could_take_is_refused_by_name_and_nothing_has_happened(
    changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with serve(tmp_path) as owner:
        with pytest.raises(error, match=text):
            SharedPool.attach(owner.path, Rows(num_groups=2), **{"identity": "m", **changes})
        assert owner.statistics() == []


@pytest.mark.parametrize(
    ("engine", "processes", "error", "text"),
    [
        ("e", 0, ValueError, "processes must be an integer of at least 1, got 0"),
        ("", 1, ValueError, "engine must be the name that its processes give to attach, got ''"),
        (3, 1, TypeError, "engine must be a string, got 3"),
        ("e" * 60_000, 1, ValueError, "engine has 60000 characters"),
    ],
)
def test_a_scheduler_of_no_process_is_refused_by_name(
    engine: Any, processes: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    with serve(tmp_path) as owner, pytest.raises(error, match=text):
        SharedPool.beside(owner.path, engine, processes)


@pytest.mark.parametrize("wide", ["i" * 12_000, "\U0001f600" * 1024, "\ud800" * 1024], ids=["ASCII", "wide", "no text"])
def test_the_longest_texts_fit_into_one_message(wide: str, tmp_path: Path) -> None:
    """All three at once, also in the answer."""
    identity, name = wide[: messages.MOST_TEXT], wide[:4000]
    with serve(tmp_path, tenants={name: Tenant()}) as owner:
        options: dict[str, Any] = {"identity": identity, "tenant": name, "engine": (name, 0)}
        with SharedPool.attach(owner.path, Rows(), **options) as pool:
            assert pool.connected


@pytest.mark.parametrize("seconds", [1e7, 1e308])
def test_seconds_that_no_system_call_takes_are_as_many_as_one_takes(seconds: float, tmp_path: Path) -> None:
    with serve(tmp_path) as owner, member(owner.path, timeout=seconds, answer_seconds=seconds) as one:
        one.store(1)
        one.check_load(1)


def test_a_process_that_has_a_descriptor_too_few_is_told_so(tmp_path: Path) -> None:
    """Whichever it lacks: of the socket, of the memory, of the lock, of the thread."""
    refused, before, path = list[str](), resource.getrlimit(resource.RLIMIT_NOFILE), str(tmp_path / "pool")
    with subprocess.Popen([sys.executable, "-m", "kvoffload", "pool", "serve", path, "--bytes", "65536"]) as owner:
        SharedPool.attach(path, Rows(), identity="a", timeout=60.0).close()
        there = len(os.listdir("/proc/self/fd"))
        os.close(free := os.dup(0))
        for limit in range(free, free + 100):  # numbers above may be in use
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
            try:
                SharedPool.attach(path, Rows(), identity="a", timeout=SECONDS).close()
                break
            except (OSError, CapacityError) as error:
                refused.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
        owner.terminate()
        assert len(os.listdir("/proc/self/fd")) == there
    assert any("no file descriptor left" in text for text in refused)
    assert not any("owner answers" in text or "does not answer" in text for text in refused)
    assert len(refused) < 100


def test_calls_of_a_process_without_descriptors_find_nothing_while_there_is_no_owner(tmp_path: Path) -> None:
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1)
        owner.close()
        eventually(lambda: not one.pool.connected, "it knows that the owner has ended")
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            one.pool._next_try = 0.0
            assert one.hits(1) == 0
            one.pool._next_try = 0.0
            assert one.store(2, wait=False).keys == ()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in taken:
                os.close(number)
        with PoolOwner(owner.path, nbytes=region_bytes(8)):
            eventually(lambda: one.hits(1) == 1, "the next owner has the key")


def test_calls_while_the_owner_stands_still_keep_it_from_hearing_of_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had not asked for ended, too: so many ends that those of leases that ended later were dropped."""
    monkeypatch.setattr(shared_pool, "MOST_UNSENT", 50)
    policies = Made(Standing)
    with serve(tmp_path, 8, policy=policies) as owner, member(owner.path, answer_seconds=0.2) as one:
        eventually(lambda: one.store(1, 2) and one.hits(1, 2) == 2, "the keys are stored")
        lease = one.cache.acquire(keys_of([1]))
        one.cache.touch(keys_of([1]))
        assert one.cache.fetch(keys_of([1]), [SOURCES], after=NO_WAIT).wait(SECONDS) == 0
        for _ in range(100):
            assert one.store(3, wait=False).keys == ()
        lease.release()
        Standing.let_go(policies)
        eventually(lambda: one.hits(1) == 1, "the owner goes on")
        eventually(lambda: owner.statistics()[0]["pinned"] == 0, "nothing is held")
