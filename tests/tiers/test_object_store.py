"""ObjectStoreTier over SeaweedFS's S3, a folder, and a store that the caller has opened."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from remote_sessions import RemoteSession
from seeds import rest_long
from servers import Process, need_module, s3_options, seaweed

from kvoffload.testing import check_tier, fuzz_tier
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import ObjectStoreTier, Outcome

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED


@pytest.fixture(autouse=True)
def obstore() -> Any:
    return need_module("obstore")


@pytest.fixture
def session(s3_server: Process, request: pytest.FixtureRequest) -> Iterator[RemoteSession]:
    with RemoteSession(tier_over(s3_server.port, identity=request.node.nodeid)) as session:
        yield session


def tier_over(port: int, **given: Any) -> ObjectStoreTier:
    return ObjectStoreTier(**(s3_options(port) | {"identity": "x"} | given))


@pytest.mark.servers
@pytest.mark.parametrize("pools", [1, 2])
def test_s3_conforms(s3_server: Process, pools: int, seed: int) -> None:
    check_tier(lambda: tier_over(s3_server.port, identity=f"conforms {pools}"), pools=pools, seed=seed, entries=8)


@pytest.mark.parametrize("pools", rest_long([1, 2], 1))
def test_a_folder_conforms(tmp_path: Path, pools: int, seed: int) -> None:
    url = f"file://{tmp_path}"
    check_tier(lambda: ObjectStoreTier(url, identity="x"), pools=pools, seed=seed)
    fuzz_tier(ObjectStoreTier(url, identity="y"), operations=500, lossless=True, seed=seed)


@pytest.mark.long
def test_a_store_of_the_callers_conforms(obstore: Any, seed: int) -> None:
    store = obstore.store.MemoryStore()
    check_tier(lambda: ObjectStoreTier(store, identity="x"), seed=seed)


def test_objects_of_others_under_a_records_name_are_misses_that_are_deleted(obstore: Any) -> None:
    store = obstore.store.MemoryStore()
    with RemoteSession(ObjectStoreTier(store, identity="x")) as session:
        name = session.tier.format.name(b"k")
        right = 192 + 2 * 4096
        for content in (b"", b"short", bytes(192), bytes(right - 1), bytes(right), bytes(right + 1), bytes(4 << 20)):
            obstore.put(store, name, content)
            assert session.get(b"k") is MISSING
            assert not session.exists(b"k")
        assert session.tier.statistics().corrupt == 7
        assert session.put(b"k", 3) is DONE
        assert session.get(b"k") == 3


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_what_a_killed_put_leaves_in_a_folder_is_removed_with_its_record(tmp_path: Path, call: str) -> None:
    """A file NAME#N with the first bytes of the record."""
    (tmp_path / "other folder#1").mkdir()
    (tmp_path / "other folder#1" / "file#1").touch()
    with RemoteSession(ObjectStoreTier(f"file://{tmp_path}", identity="x")) as session:
        for key in (b"k", b"never there", b"other"):
            assert session.put(key, 1) is DONE
            (record,) = tmp_path.rglob(key.hex())
            for number in (1, 3):
                record.with_name(f"{key.hex()}#{number}").write_bytes(record.read_bytes()[:5000])
            if key == b"never there":
                record.unlink()
        assert session.get(b"k") == 1
        if call == "remove":
            assert session.remove(b"k") is DONE
            assert session.remove(b"never there") is MISSING
            other = b"other".hex()
            assert left(tmp_path) == sorted([other, f"{other}#1", f"{other}#3", "file#1"])
        else:
            assert session.tier.clear().wait(30) == [DONE]
            assert left(tmp_path) == ["file#1"]


@pytest.mark.long
def test_a_killed_put_leaves_no_bytes_behind_a_clear(tmp_path: Path) -> None:
    program = f"""
        import os
        from kvoffload.testing.tier_pools import TierPools
        from kvoffload.tiers import ObjectStoreTier
        memory = TierPools(4, 8 << 20, 1, seed=1)
        tier = ObjectStoreTier("file://{tmp_path}", identity="x")
        tier.attach(memory.arrays, memory.layout)
        job = tier.put([b"a", b"b", b"c", b"d"], range(4))
        folder = {str(tmp_path)!r}
        while not (job.done or any("#" in name for _, _, names in os.walk(folder) for name in names)):
            pass
        os.kill(os.getpid(), 9)
    """
    for _ in range(20):
        run_program(program, exit_code=-9)
        if any("#" in name for name in left(tmp_path)):
            break
    else:
        pytest.fail("no put was killed in the middle")
    memory = TierPools(4, 8 << 20, 1, seed=1)
    tier = ObjectStoreTier(f"file://{tmp_path}", identity="x")
    tier.attach(memory.arrays, memory.layout)
    assert tier.clear().wait(30) == [DONE]
    assert left(tmp_path) == []
    assert tier.close(30)


@pytest.mark.servers
def test_a_record_that_is_there_is_left_as_it_is(session: RemoteSession, s3_server: Process) -> None:
    identity = session.tier.identity
    assert session.put(b"k", 1) is DONE
    other = tier_over(s3_server.port, identity=identity)
    other.have_names = lambda names: [False] * len(names)  # type: ignore[method-assign]  # both have asked before
    with RemoteSession(other) as second:
        assert second.put(b"k", 2) is DONE
        assert second.get(b"k") == 1


@pytest.mark.servers
def test_clearing_deletes_this_tiers_objects_alone(session: RemoteSession, s3_server: Process, obstore: Any) -> None:
    options = s3_options(s3_server.port)
    config, client_options = options["config"], options["client_options"]
    store = obstore.store.from_url(options["store"], config=config, client_options=client_options)
    name = session.tier.format.name(b"k")
    folder = session.tier.format.folder
    for other in (name.replace("kvoffload", "another"), folder.rstrip("/") + "0/ab"):
        obstore.put(store, other, b"other")
    for number in range(30):
        assert session.put(b"%d" % number, number) is DONE
    assert session.tier.clear().wait(60) == [DONE]
    assert not any(session.exists(b"%d" % number) for number in range(30))
    for other in (name.replace("kvoffload", "another"), folder.rstrip("/") + "0/ab"):
        assert bytes(obstore.get(store, other).bytes()) == b"other"
        obstore.delete(store, other)


@pytest.mark.parametrize("url", ["foo://AK:hunter2@bucket", "az://AK:hunter2@x", "https:/AK:hunter2@bucket"])
def test_a_refused_url_shows_no_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"\*\*\*@") as found:
        ObjectStoreTier(url, identity="x")
    assert "hunter2" not in "".join(traceback.format_exception(found.value))


def test_the_log_shows_no_password_of_an_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "endpoint": "http://AK:hunter2@127.0.0.1:1",
        "region": "x",
        "access_key_id": "a",
        "secret_access_key": "b",
    }
    tier = ObjectStoreTier("s3://bucket", identity="x", config=config, client_options={"allow_http": True}, timeout=5.0)
    with RemoteSession(tier) as session:
        assert session.get(b"k") is FAILED
    assert "***@127.0.0.1:1" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.servers
def test_a_wrong_secret_fails(s3_server: Process) -> None:
    options = s3_options(s3_server.port)
    options["config"]["secret_access_key"] = "another"
    with RemoteSession(ObjectStoreTier(**options, identity="x")) as session:
        assert session.put(b"k", 1) is FAILED
        assert session.get(b"k") is FAILED


@pytest.mark.servers
def test_a_server_that_is_gone_fails_and_is_noticed_when_it_is_back(tmp_path: Path) -> None:
    server = seaweed(tmp_path)
    with RemoteSession(tier_over(server.port, timeout=0.3)) as session:
        assert session.put(b"k", 1) is FAILED  # it never was there
        assert session.get(b"k") is FAILED
        with server:
            tries = range(300)
            assert any(session.put(b"k", 1) is DONE for _ in tries)
            assert any(session.get(b"k") == 1 for _ in tries)
            server.pause()
            assert session.get(b"k") is FAILED
            assert session.remove(b"k") is FAILED
            assert session.tier.clear().wait(30) == [FAILED]
            server.resume()
            assert any(session.get(b"k") == 1 for _ in tries)
        assert session.get(b"k") is FAILED


@pytest.mark.parametrize("url", ["", "bucket/folder", "s3:/bucket"])
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="store must be a URL"):
        ObjectStoreTier(url, identity="x")


@pytest.mark.parametrize("store", [None, 5, ["s3://bucket"]])
def test_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(TypeError, match="store must be a URL, or a store made by obstore"):
        ObjectStoreTier(store, identity="x")


def test_the_config_of_a_store_of_the_callers_is_refused(obstore: Any) -> None:
    with pytest.raises(TypeError, match="config is for a URL"):
        ObjectStoreTier(obstore.store.MemoryStore(), config={"region": "x"}, identity="x")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "2"])
def test_timeouts_that_are_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be"):
        ObjectStoreTier("s3://bucket", identity="x", timeout=timeout)
