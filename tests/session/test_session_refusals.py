"""What save and restore refuse, and what they leave where something fails."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conversations import SECONDS, SMALL, Kind, World, talk, world
from disk_sets import FaultyFiles
from helpers import held_stream
from tier_classes import DictTier
from tiering import until

from kvoffload import CacheEvent, LayoutError, MissingKeyError, SessionFileError, Tenant
from kvoffload.session import read_tokens, session_file
from kvoffload.session.session_file import Contents, Plan, SessionFile
from kvoffload.session.whole_blocks import BlockForm, GroupForm
from kvoffload.tiers.files import OpenFile

TOKENS = talk(0)
ALL = (32, 32, "")


@pytest.fixture
def small(seed: int) -> Iterator[World]:
    """A cache that has a conversation of eight blocks."""
    with world(seed=seed, kind=SMALL) as each:
        each.store(TOKENS)
        yield each


@pytest.fixture
def path(small: World, tmp_path: Path) -> Path:
    assert small.save(tmp_path / "file", TOKENS) == 32
    return tmp_path / "file"


def identity(**more: str) -> dict[str, Any]:
    return {"identity": {"model": "m", "revision": "1", **more}}


FORMS = {
    "dtype": (SMALL._replace(dtype="int8"), "dtype='uint8', here it is 'int8'"),
    "axes": (SMALL._replace(axes=("tokens", "heads")), "axes=.*'dim'.*, here it is"),
    "shape": (SMALL._replace(dim=8), r"4, 2, 4.*, here it is .*4, 2, 8"),
    "heads": (SMALL._replace(heads=(1, 2)), r"4, 2, 4.*, here it is .*4, 3, 4"),
    "groups": (SMALL._replace(groups=2), "groups=.*here it is"),
    "tokens per block": (SMALL._replace(tokens=8), "tokens_per_block=4, here it is 8"),
}
TERMS_OF: dict[str, tuple[dict[str, Any], str]] = {
    "model": (identity(model="n"), r"identity\['model'\]='m', here it is 'n'"),
    "revision": (identity(revision="2"), "'1', here it is '2'"),
    "a name more": (identity(rope="yarn"), "=not there, here it is 'yarn'"),
    "a name less": ({"identity": {"model": "m"}}, "'1', here it is not there"),
    "salt": ({"salt": "other"}, "another salt"),
    "no salt": ({"salt": ""}, "another salt"),
    "extra": ({"extra": b"lora"}, "another salt or extra"),
}


def refused(target: World, path: Path, error: type[Exception], match: str, **options: Any) -> None:
    events: list[CacheEvent] = []
    target.cache._state.recorder._on_event = events.append
    before, slots = target.cache.statistics(), [each.copy() for each in target.slots]
    with pytest.raises(error, match=match) as caught:
        target.restore(path, **options)
    if error is not SessionFileError and not isinstance(caught.value, SessionFileError):
        assert "nothing was loaded" in str(caught.value)
    assert str(path) in str(caught.value)
    assert not target.resident()
    assert not events
    assert target.cache.statistics() == before
    assert all((now == then).all() for now, then in zip(target.slots, slots, strict=True))
    target.cache.check()


@pytest.mark.parametrize("what", FORMS)
def test_blocks_of_another_form_are_refused(what: str, path: Path) -> None:
    kind, match = FORMS[what]
    with world(kind) as target:
        refused(target, path, LayoutError, match)


@pytest.mark.parametrize("what", TERMS_OF)
def test_other_terms_are_refused(what: str, path: Path) -> None:
    options, match = TERMS_OF[what]
    with world(SMALL) as target:
        refused(target, path, SessionFileError, match, **options)


def test_other_weights_are_refused(small: World, path: Path, tmp_path: Path) -> None:
    small.cache.use_weights("step 2")
    small.store(TOKENS, weights="step 2")
    small.save(tmp_path / "second", TOKENS)
    with world(SMALL) as target:
        refused(target, tmp_path / "second", ValueError, "weights='step 2', here it is ''")
        target.cache.use_weights("step 2")
        refused(target, path, ValueError, "weights='', here it is 'step 2'")
        assert target.restore(tmp_path / "second") == ALL
        target.check_load(TOKENS, range(8), "step 2")


def test_a_newer_version_and_another_format_are_refused(
    small: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("VERSION", "2"), ("FORMAT", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(session_file, name, value)
            small.save(tmp_path / "file", TOKENS)
        with world(SMALL) as target:
            refused(target, tmp_path / "file", SessionFileError, f"it is .*{value}")


def test_weights_that_come_into_use_meanwhile_get_no_blocks_of_others(small: World, path: Path) -> None:
    class Late:
        """A path that is asked for once the call has begun."""

        def __fspath__(self) -> str:
            target.cache.use_weights("later")
            return str(path)

    with world(SMALL) as target:
        with pytest.raises(ValueError, match="weights='', here it is 'later'"):
            target.restore(Late())
        assert not target.resident()
        target.cache.use_weights("")
        found = target.restore(path, progress=lambda *_: target.cache.use_weights("last"))
        assert found.reason
        assert target.cache.lookup(target.keys(TOKENS)) == 0
    with pytest.raises(MissingKeyError):
        small.save(path, TOKENS, progress=lambda *_: small.cache.use_weights("next"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"identity": {}}, ValueError), ({"identity": {"revision": "1"}}, ValueError), ({"identity": "m"}, ValueError),
        ({"identity": {"model": 3}}, ValueError), ({"identity": {"model": "m" * 5000}}, ValueError),
        ({"identity": {"model": "\ud83d\ude00"}}, ValueError), ({"salt": 3}, TypeError), ({"extra": "x"}, TypeError),
    ],
)  # fmt: skip
def test_wrong_arguments(options: Any, error: type[Exception], small: World, path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    for call in (lambda: small.save(path, TOKENS, **options), lambda: small.restore(path, **options)):
        with pytest.raises(error):
            call()
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_no_such_tenant_is_refused(path: Path) -> None:
    with world(SMALL, tenants={"one": Tenant(max_blocks=3)}) as target:
        with pytest.raises(ValueError, match="other"):
            target.restore(path, tenant="other")
        found = target.restore(path, tenant="one")
        assert found[:2] == (12, 32)
        assert found.reason
        target.check_load(TOKENS[:12], range(3))


def test_nothing_to_save(small: World, tmp_path: Path) -> None:
    for tokens, terms in (
        (talk(1), {}),
        (TOKENS[:3], {}),
        ([], {}),
        (TOKENS, {"salt": "x"}),
        (TOKENS, {"extra": b"x"}),
    ):
        with pytest.raises(MissingKeyError):
            small.save(tmp_path / "new", tokens, **terms)
    small.cache.remove(small.keys(TOKENS)[5:6])
    assert small.save(tmp_path / "part", TOKENS) == 20
    with world(SMALL) as target:
        assert target.restore(tmp_path / "part") == (20, 20, "")
        target.check_load(TOKENS[:20], range(4, 9))
    assert [each.name for each in tmp_path.iterdir()] == ["part"]


def test_only_this_user_can_read_a_file_and_equal_saves_are_equal(small: World, path: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "other").write_bytes(b"anything")
        (tmp_path / "other").chmod(0o644)
        small.save(tmp_path / "other", TOKENS)
        small.save(tmp_path / ("\U0001f600" * 60), TOKENS)
    finally:
        os.umask(before)
    found = list(tmp_path.iterdir())
    assert len(found) == 3
    for each in found:
        assert each.stat().st_mode & 0o777 == 0o600
        assert each.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("text", ["\U0001f600", '"', "\\", "\ud800", "\0", "e\u0301"])
def test_any_identity_that_is_saved_can_be_restored(text: str, small: World, tmp_path: Path) -> None:
    for size in (1, 4091):
        terms = {"identity": {"model": text * size}}
        try:
            small.save(tmp_path / "file", TOKENS, **terms)
        except ValueError:  # its text is too long in JSON
            if size == 1:
                raise
        else:
            with world(SMALL) as target:
                assert target.restore(tmp_path / "file", **terms) == ALL


def test_progress_is_called_in_order_and_may_raise(small: World, path: Path, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def until_then(tokens: int, of: int) -> None:
        seen.append((tokens, of))
        if len(seen) == most:
            raise EnoughError

    with world(SMALL) as target:
        for call in (small.save, None):
            for most in (0, 1, 3, 8):
                seen: list[tuple[int, int]] = []
                target.cache.clear()
                try:
                    if call is None:
                        target.restore(path, progress=until_then)
                    else:
                        call(tmp_path / "new", TOKENS, progress=until_then)
                    assert not most
                except EnoughError:
                    assert len(seen) == most
                assert seen == [(4 * (place + 1), 32) for place in range(most or 8)]
                assert sorted(each.name for each in tmp_path.iterdir()) == [
                    "file",
                    *["new"] * (call is not None and not most),
                ]
                (tmp_path / "new").unlink(missing_ok=True)
                if call is None and most:
                    until(lambda: target.held() == (0, 0, 0))
                    found = target.cache.lookup(target.keys(TOKENS))
                    assert found >= most, "those of which progress has told stay"
                    target.check_load(TOKENS[: 4 * found], range(found))
                assert small.held() == target.held() == (0, 0, 0)


FAULTS = [
    ("open", errno.EACCES), ("fallocate", errno.ENOSPC), ("pwritev", errno.ENOSPC), ("pwritev", errno.EIO),
    ("fdatasync", errno.EIO), ("replace", errno.EXDEV), ("folder", errno.EEXIST), ("nowhere", errno.ENOENT),
]  # fmt: skip


@pytest.mark.parametrize(("call", "number"), FAULTS)
@pytest.mark.parametrize("there", [False, True])
def test_a_failing_disk_leaves_what_was_there(
    call: str, number: int, there: bool, small: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, path, descriptors = FaultyFiles(), tmp_path / "file", len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(session_file, "SYSTEM", operations)
    if call == "folder":
        path.mkdir()
    elif there and call != "nowhere":
        path.write_bytes(b"old")
    if call == "nowhere":
        path = tmp_path / "none" / "file"
    elif call == "replace":

        def replace(*_: Any) -> None:
            raise OSError(number, "refused")

        monkeypatch.setattr(os, "replace", replace)
    elif call != "folder":
        operations.failing[call] = number
    with pytest.raises(OSError, match=r".") as caught:
        small.save(path, TOKENS)
    assert caught.value.errno == number
    left = list(tmp_path.iterdir())
    if call == "nowhere":
        assert not left
    elif call == "folder":
        assert left == [path]
        assert not list(path.iterdir())
    else:
        assert [each.read_bytes() for each in left] == [b"old"] * there
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert small.held() == (0, 0, 0)


def test_a_file_that_cannot_be_read_ends_a_restore(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = FaultyFiles()
    monkeypatch.setattr(session_file, "SYSTEM", operations)
    with world(SMALL) as target:

        def fail(*_: int) -> None:
            operations.failing["preadv"] = errno.EIO

        fail()
        with pytest.raises(OSError, match="Input") as caught:
            target.restore(path)
        assert caught.value.errno == errno.EIO
        assert not target.resident()
        operations.failing.clear()
        with pytest.raises(OSError, match="Input"):
            target.restore(path, progress=fail)
        found = target.cache.lookup(target.keys(TOKENS))
        assert 0 < found < 8
        target.check_load(TOKENS[: 4 * found], range(found))
        assert target.held() == (0, 0, 0)


@pytest.mark.parametrize("dim", [512, 500])
def test_no_page_is_written_both_directly_and_through_the_page_cache(
    dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()
    monkeypatch.setattr(OpenFile, "try_direct", lambda _, offset: tried.append(offset))
    with world(SMALL._replace(dim=dim)) as each:
        each.store(TOKENS)
        each.save(tmp_path / "file", TOKENS)
    assert bool(tried) == (dim == 512)


def test_a_cache_that_is_full_says_so(path: Path) -> None:
    for capacity, policy in ((3, "lru"), (5, "prefix"), (7, "s3fifo"), (5, "arc")):
        with world(SMALL, capacity=capacity, policy=policy) as target:
            found = target.restore(path)
            assert found.of == 32
            assert "no room" in found.reason
            assert target.cache.lookup(target.keys(TOKENS)) * 4 == found.tokens > 0
            target.check_load(TOKENS[: found.tokens], range(found.tokens // 4))
    with world(SMALL, store_after=1) as target:
        assert target.restore(path)[0] == 0


def test_a_full_cache_of_others_makes_room(path: Path) -> None:
    with world(SMALL) as target:
        target.store(talk(5))
        assert target.restore(path) == ALL
        target.check_load(TOKENS, range(8))
        assert target.restore(path) == ALL, "what is there is not read again"


def test_nothing_is_done_with_a_closed_engine(small: World, path: Path, tmp_path: Path) -> None:
    small.cache.close(SECONDS)
    small.cache.engine.close(SECONDS)
    for call in (lambda: small.save(tmp_path / "new", TOKENS), lambda: small.restore(path)):
        with pytest.raises(Exception, match="closed"):
            call()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_tokens_of_a_file_can_be_read(path: Path, tmp_path: Path) -> None:
    assert read_tokens(path) == list(TOKENS[:32])
    with SessionFile(path) as file:
        end = file.plan.place(2, 0)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:end])
    assert read_tokens(tmp_path / "cut") == list(TOKENS[:8])
    with pytest.raises(SessionFileError, match="it is no file"):
        read_tokens(tmp_path)


@pytest.mark.parametrize("tiers", [0, 1])
def test_a_store_that_has_not_ended_is_waited_for(tiers: int, tmp_path: Path) -> None:
    with world(SMALL, tiers=[DictTier() for _ in range(tiers)]) as source:
        keys = source.keys(TOKENS)
        blocks = range(len(keys) * source.kind.factor)
        source.write(source.memory(blocks, source.values(TOKENS)))
        with held_stream(source.devices[0]) as (stream, gate):
            job = source.cache.store(keys, source.ids(blocks), after=stream)
            with pytest.raises(MissingKeyError):
                source.save(tmp_path / "file", TOKENS, deadline=0.05)
            opening = threading.Timer(0.05, gate.open)
            opening.start()
            assert source.save(tmp_path / "file", TOKENS, deadline=SECONDS) == 32
            opening.join()
            job.wait(SECONDS)
        with world(SMALL) as target:
            assert target.restore(tmp_path / "file") == ALL


def test_a_block_that_its_codec_could_not_hold_goes_into_no_file(tmp_path: Path) -> None:
    with world(Kind(codec="bf16-12")) as source:
        source.store(TOKENS)
        lease = source.cache.acquire(source.keys(TOKENS)[2:3])
        source.slots[0][lease.slots()[0]] = 255  # as if a commit without its job had let an unfit block through
        lease.release()
        assert source.save(tmp_path / "file", TOKENS) == 2 * source.kind.factor * source.kind.tokens


@pytest.mark.parametrize("long", ["x" * 400 + "a", "not there"])
def test_identities_are_compared_whole(long: str, small: World, tmp_path: Path) -> None:
    """However a message shortens them."""
    assert small.save(tmp_path / "long", TOKENS, **identity(rope=long)) == 32
    with world(SMALL) as target:
        for other in (identity(rope="x" * 400 + "b"), identity()):
            refused(target, tmp_path / "long", SessionFileError, "rope", **other)
        assert target.restore(tmp_path / "long", **identity(rope=long)) == ALL


@pytest.mark.parametrize("name", ["save", "restore"])
def test_no_thread_uses_the_file_once_the_call_has_raised(
    name: str, small: World, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor may be another file's by then."""
    at_work, late = threading.Semaphore(0), list[bool]()

    def slow(self: OpenFile, views: Any, offset: int) -> bool:
        at_work.release()
        time.sleep(0.05)
        late.append(self.descriptor < 0)
        return bool(self._transfer(os.preadv if name == "restore" else os.pwritev, self.descriptor, views, offset))

    def refuse(*_: int) -> None:
        at_work.acquire()
        raise OverflowError

    monkeypatch.setattr(OpenFile, "read_payload" if name == "restore" else "write_payload", slow)
    with world(SMALL) as target:
        call = partial(small.save, tmp_path / "other", TOKENS) if name == "save" else partial(target.restore, path)
        with pytest.raises(OverflowError) as caught:
            call(progress=refuse)
        time.sleep(0.1)
        assert late
        assert not any(late), f"{caught.value!r} keeps the frames of the call"


def test_more_axes_than_numpy_has_are_refused() -> None:
    axes = tuple(f"axis {number}" for number in range(30))
    form = BlockForm("uint8", 1, axes, (GroupForm(1, (1,) * 30),))
    with pytest.raises(ValueError, match="JSON keeps"):
        Plan(Contents(form, 1, {"model": "m"}, "", "", "test"))


def test_a_save_goes_where_the_path_was(small: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the working folder changes meanwhile."""
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    assert small.save(Path("file"), TOKENS, progress=lambda *_: os.chdir(tmp_path / "later")) == 32
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "later"]


def test_keys_that_another_call_has_pending_are_not_restored(path: Path) -> None:
    with world(SMALL) as target:
        with target.cache.reserve(target.keys(TOKENS)[1:3]) as other:
            tokens, of, reason = target.restore(path)
            per_key = target.kind.factor * target.kind.tokens
            assert (tokens, of) == (per_key, 32)
            assert "another call is storing it" in reason
            other.abort()
        assert target.restore(path) == ALL
