"""What a put asks its store before it writes: once for all keys, and again after records were deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from dict_remote import DictRemote, Parts, Store
from remote_sessions import RemoteSession

from kvoffload.tiers import Limits, Outcome, TierJob
from kvoffload.tiers.remote import Questions

DONE, FAILED = Outcome.DONE, Outcome.FAILED
KEYS = [b"a", b"b", b"c"]


class Slow:
    """A store whose answer to the first question waits for `answer`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[bytes, ...]] = []
        self.began, self.answer = threading.Event(), threading.Event()
        self._error = error

    def __call__(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked.append(tuple(keys))
        if len(self.asked) == 1:
            self.began.set()
            assert self.answer.wait(20)
            if self._error is not None:
                raise self._error
        return [key == b"b" for key in keys]


def test_calls_at_the_same_time_wait_for_one_question() -> None:
    store = Slow()
    questions, job = Questions(store), TierJob(KEYS)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(questions.has, [key], job) for key in KEYS]
        assert store.began.wait(20)
        store.answer.set()
    assert [call.result() for call in calls] == [[False], [True], [False]]
    assert store.asked == [tuple(KEYS)]


def test_an_error_is_raised_by_those_that_wait_and_the_next_call_asks_again() -> None:
    store = Slow(ConnectionError("gone"))
    questions, job = Questions(store), TierJob(KEYS)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(questions.has, KEYS, job)
        assert store.began.wait(20)
        [question] = questions._of.values()
        second = threads.submit(questions.has, KEYS, job)
        store.answer.set()
    assert isinstance(first.exception(), ConnectionError)
    assert isinstance(second.exception(), ConnectionError | None)  # it may have come late enough to ask itself
    assert questions.has(KEYS, job) == [False, True, False]
    questions._of[job] = question  # as one that has waited finds it
    with pytest.raises(ConnectionError, match="did not say"):
        questions.has(KEYS, job)


def test_the_answer_is_forgotten_with_the_job_and_after_a_deletion() -> None:
    store = Slow()
    store.answer.set()
    questions, job = Questions(store), TierJob(KEYS)
    forgets: list[Callable[[], None]] = [lambda: questions.forget(job), questions.forget_all]
    for forget in forgets:
        before = len(store.asked)
        questions.has([b"a"], job)
        questions.has([b"b"], job)
        assert len(store.asked) == before + 1
        forget()
        assert not questions._of
    questions.has([b"a"], job)
    assert len(store.asked) == 3


def test_an_answer_from_before_a_deletion_is_not_used_after_it() -> None:
    """The deletion is over before the store's answer arrives, which is older than it."""
    store = Slow()
    questions, job = Questions(store), TierJob(KEYS)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(questions.has, [b"a"], job)
        assert store.began.wait(20)
        questions.forget_all()
        store.answer.set()
    questions.has([b"b"], job)
    assert len(store.asked) == 2


def test_a_put_asks_once_and_a_tier_keeps_nothing_of_it() -> None:
    store: Store = {}
    with RemoteSession(DictRemote(store, limits=Limits(threads=1))) as session:
        tier = session.tier
        assert isinstance(tier, DictRemote)
        job = tier.put([b"x", b"y"], [0, 1])
        assert job.wait(30) == [DONE, DONE]
        assert [count for name, count in tier.calls if name == "have"] == [2]
        assert not tier._questions._of


def test_a_put_that_asks_during_a_removal_writes_the_key_that_was_removed() -> None:
    """The store says that it has y, and a moment later the removal of y ends, for which the write of y has waited."""
    store: Store = {}
    removing, remove, written = threading.Event(), threading.Event(), threading.Event()

    class Waiting(DictRemote):
        def delete_names(self, names: Sequence[str]) -> list[bool]:
            removing.set()
            assert remove.wait(20)
            return super().delete_names(names)

        def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
            try:
                return super().store_parts(names, parts)
            finally:
                written.set()

    with RemoteSession(Waiting(store, limits=Limits(threads=2))) as session:
        assert session.put(b"y", 1) is DONE
        removal = session.tier.remove([b"y"])
        assert removing.wait(20)
        written.clear()
        job = session.tier.put([b"x", b"y"], [0, 1])
        assert written.wait(20)  # x
        remove.set()
        assert removal.wait(20) == [DONE]
        assert job.wait(20) == [DONE, DONE]
        assert len(store) == 2


def test_a_store_that_does_not_answer_fails_the_put() -> None:
    store: Store = {}

    class Silent(DictRemote):
        def have_names(self, names: Sequence[str]) -> list[bool]:  # noqa: ARG002
            raise TimeoutError("no answer")

    with RemoteSession(Silent(store)) as session:
        assert session.put(b"k", 1) is FAILED
    assert not store


@pytest.mark.parametrize("together", [True, False])
def test_a_store_with_a_request_for_each_name_is_asked_by_each_call(*, together: bool) -> None:
    store: Store = {}
    remote = DictRemote(store, limits=Limits(threads=2))
    remote.asks_for_all_keys = together
    with RemoteSession(remote) as session:
        job = session.tier.put([b"%d" % number for number in range(8)], range(8))
        assert job.wait(30) == [DONE] * 8
    asked = [count for name, count in remote.calls if name == "have"]
    assert asked == ([8] if together else [1] * 8)
