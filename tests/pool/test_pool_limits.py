"""What a shared pool refuses, drops or says once: messages that are too large, members, removals, bad arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pooling import keys_of, member, serve

from kvoffload import Status
from kvoffload.pool import messages
from kvoffload.pool.messages import MOST_KEY_BYTES, MOST_MESSAGE, Assembler, Operation, datagrams

# messages that are too large ------------------------------------------------------------------------------------------


def test_the_largest_message_that_a_member_sends_is_taken() -> None:
    assembler, taken = Assembler(), None
    for datagram in datagrams(1, Operation.FIND, bytes(MOST_MESSAGE)):
        assert taken is None
        taken = assembler.take(datagram)
    assert taken == (1, Operation.FIND, bytes(MOST_MESSAGE))


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
