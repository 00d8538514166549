"""Puts that a full store or disk declines, and those that a store refuses to take: DECLINED, and FAILED."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from disk_sets import FaultyFiles
from remote_sessions import RemoteSession
from tier_classes import SECONDS, DictTier, Rows, attached

from kvoffload.errors import LayoutError
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import DiskTier, MemoryTier, ObjectStoreTier, Origin, Outcome, Tier
from kvoffload.tiers.refusals import outcome_of

DONE, DECLINED, FAILED = Outcome.DONE, Outcome.DECLINED, Outcome.FAILED
FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]
REFUSED = [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO]


@pytest.mark.parametrize("number", [*FULL, *REFUSED], ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("several", [False, True])
def test_a_tier_of_yours_that_raises_for_want_of_room_declines(number: int, several: bool) -> None:
    class Full(DictTier):
        def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:  # noqa: ARG002
            raise OSError(number, "refused")

        def read_record(self, key: bytes, rows: Rows) -> Outcome:  # noqa: ARG002
            raise OSError(number, "refused")

    class FullForSeveral(Full):
        def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> Sequence[Outcome]:  # noqa: ARG002
            raise OSError(number, "refused")

    tier = FullForSeveral() if several else Full()
    with attached(tier):
        assert tier.put([b"a", b"b"], [0, 1]).wait(SECONDS) == [DECLINED if number in FULL else FAILED] * 2
        assert tier.get([b"a"], [2]).wait(SECONDS) == [FAILED], "a read needs no room"
        figures = tier.statistics()
        assert (figures.declined, figures.failed) == ((2, 1) if number in FULL else (0, 3))


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keys": None}, "^keys must be a list of bytes, got None"),
        ({"keys": 3}, "^keys must be a list of bytes, got 3"),
        ({"tenant": 3}, "^tenant must be a string, got 3"),
        ({"tenant": None}, "^tenant must be a string, got None"),
        ({"tenant": b"a"}, "^tenant must be a string, got b'a'"),
    ],
    ids=repr,
)
def test_keys_and_tenants_that_are_none_are_refused(
    tmp_path: Path, given: dict[str, Any], said: str, *, durable: bool
) -> None:
    tier: Tier = DiskTier(tmp_path / "kv", nbytes=1 << 17, identity="x") if durable else MemoryTier(1 << 17)
    right: dict[str, Any] = {"keys": [b"a"], "entries": [0]}
    with attached(tier):
        with pytest.raises(LayoutError, match=said):
            tier.put(**right | given)
        assert tier.statistics().failed == tier.statistics().records == 0
        assert tier.put(**right, tenant="a tenant\0step-1").wait(SECONDS) == [DONE], "of named weights"


@pytest.mark.parametrize("number", [*FULL, *REFUSED], ids=lambda number: errno.errorcode[number])
def test_a_disk_that_is_full_declines_and_one_that_is_read_only_fails(
    operations: FaultyFiles, tmp_path: Path, number: int
) -> None:
    tier = DiskTier(tmp_path / "kv", nbytes=1 << 17, identity="x", operations=operations)
    with attached(tier):
        assert tier.put([b"a"], [0]).wait(SECONDS) == [DONE]
        operations.failing["pwritev"] = number
        assert tier.put([b"b"], [1]).wait(SECONDS) == [DECLINED if number in FULL else FAILED]
        assert tier.get([b"a"], [2]).wait(SECONDS) == [DONE]
        operations.failing.clear()


class _S3(BaseHTTPRequestHandler):
    """No object is there, and every PUT is refused."""

    status, code = 507, ""

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = f"<Error><Code>{self.code}</Code></Error>".encode() if self.code else b""
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def refusing_s3(status: int, code: str) -> Iterator[str]:
    handler = type("Refusing", (_S3,), {"status": status, "code": code})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (507, "", DECLINED),
        (507, "XMinioStorageFull", DECLINED),
        (400, "XMinioAdminBucketQuotaExceeded", DECLINED),
        (403, "QuotaExceeded", DECLINED),
        (403, "AccessDenied", FAILED),
        (405, "MethodNotAllowed", FAILED),
        (500, "InternalError", FAILED),
    ],
)
def test_an_object_store_that_is_full_declines(status: int, code: str, outcome: Outcome) -> None:
    pytest.importorskip("obstore")
    with refusing_s3(status, code) as endpoint:
        config = {"endpoint": endpoint, "region": "x", "access_key_id": "507", "secret_access_key": "x"}
        options = {"allow_http": True}
        tier = ObjectStoreTier("s3://bucket/507", identity="x", config=config, client_options=options)
        with RemoteSession(tier) as session:
            assert session.put(b"k", 1) is outcome


def test_a_folder_on_a_full_disk_declines() -> None:
    """As obstore says it; a test cannot fill a disk."""
    obstore = pytest.importorskip("obstore")
    for number, outcome in ((28, DECLINED), (122, DECLINED), (30, FAILED), (5, FAILED)):
        text = f"Generic LocalFileSystem error: Unable to copy data to file: said (os error {number})"
        assert outcome_of(obstore.exceptions.GenericError(text)) is outcome
        assert outcome_of(RuntimeError(text)) is FAILED, "of another program's"


def test_valkey_declines_when_maxmemory_is_reached_and_fails_for_other_refusals() -> None:
    error = pytest.importorskip("glide_sync").RequestError
    for said in ("OOM: command", "OOM command"):
        assert outcome_of(error(f"{said} not allowed when used memory > 'maxmemory'.")) is DECLINED
    signalled = "An error was signalled by the server: - "
    for said in (
        "ReadOnly: You can't write against a read only replica.",
        "PermissionDenied: User OOM has no permissions to run the 'set' command",
        "MISCONF: Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    ):
        assert outcome_of(error(signalled + said)) is FAILED


# a file that is gone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_deleted_while_it_is_open_is_said_once_and_takes_no_puts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    memory = TierPools(8, 4096, 1, seed=1)
    tier = DiskTier([tmp_path / "a", tmp_path / "b"], nbytes=1 << 17, identity="x")
    tier.attach(memory.arrays, memory.layout)
    assert tier.put([b"a"], [0]).wait(SECONDS) == [DONE]
    assert tier.drain(SECONDS)
    if how == "deleted":
        (tmp_path / "b").unlink()
    else:
        (tmp_path / "new").touch(mode=0o600)
        (tmp_path / "new").rename(tmp_path / "b")
    assert caplog.messages == []
    for _ in range(3):
        assert not tier.drain(SECONDS)
    assert tier.put([b"b", b"c"], [1, 2]).wait(SECONDS) == [DECLINED] * 2
    assert tier.get([b"a"], [3]).wait(SECONDS) == [DONE]
    assert (memory.arrays[0][3] == memory.arrays[0][0]).all()
    assert tier.remove([b"a"]).wait(SECONDS) == [DONE]
    assert tier.close(SECONDS)
    (message,) = caplog.messages
    assert f"{tmp_path / 'b'} was deleted while it is open" in message
