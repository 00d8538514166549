"""ValkeyTier without a server: arguments that are refused, and the answers of a client that is the test's."""

from __future__ import annotations

from typing import Any

import pytest
from remote_sessions import RemoteSession
from tier_classes import attached

from kvoffload.tiers import Limits, Outcome, ValkeyConnection, ValkeyTier

glide = pytest.importorskip("glide_sync")
DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED


class Client:
    """A client of glide, which answers every batch and `mget` as the test has said. `scanned` are the names that each
    SCAN finds; it keeps those that were unlinked.
    """

    def __init__(self) -> None:
        self.answers: Any = []
        self.scanned: list[list[bytes]] = []
        self.unlinked: list[bytes] = []
        self.closed = 0

    def exec(self, batch: Any, raise_on_error: bool) -> list[Any]:
        assert (len(batch.commands), raise_on_error) == (len(self.answers), False)
        return list(self.answers)

    def mget(self, names: list[str], buffers: list[memoryview]) -> Any:
        assert len(names) == len(buffers)
        return self.answers

    def custom_command(self, given: list[str | bytes]) -> Any:
        if given[0] == "UNLINK":
            assert len(given) > 1, "the server refuses it without names"
            self.unlinked += [name for name in given if isinstance(name, bytes)]
            return len(given) - 1
        found = self.scanned.pop(0)
        return [b"7" if self.scanned else b"0", found]

    def close(self) -> None:
        self.closed += 1


def test_clearing_deletes_all_names_that_scans_find(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(glide.GlideClient, "create", lambda _: client)
    client.scanned = [[b"a", b"b"], [], [b"c"], []]
    with RemoteSession(ValkeyTier(identity="x")) as session:
        assert session.tier.clear().wait(30) == [DONE]
    assert (client.unlinked, client.scanned) == ([b"a", b"b", b"c"], [])


def test_a_client_that_answers_with_too_few_values_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(glide.GlideClient, "create", lambda _: client)
    with RemoteSession(ValkeyTier(identity="x", limits=Limits(threads=1)), pools=1) as session:
        client.answers = [None, None]
        assert session.get(b"k") is MISSING
        for closed, answers in enumerate(([None], b"OK", None)):
            assert client.closed == closed
            client.answers = answers
            assert session.get(b"k") is FAILED
        assert client.closed == 3, "its answers would go to later calls"


def test_a_part_that_is_no_string_is_no_record_and_another_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(glide.GlideClient, "create", lambda _: client)
    tier = ValkeyTier(identity="x")
    assert not tier.capabilities.durable, "the records are in memory"
    with RemoteSession(tier, pools=1):
        wrong_type = glide.RequestError("WRONGTYPE Operation against a key holding the wrong kind of value")
        for last, outcome in (
            (4096, DONE), (0, MISSING), (wrong_type, MISSING), (glide.RequestError("LOADING"), FAILED), (b"OK", FAILED)
        ):  # fmt: skip
            client.answers = [192, last]
            assert tier.exists([b"k"]).wait(30) == [outcome], last


@pytest.mark.parametrize(
    "addresses",
    [
        "", "host", "host:", ":1", "host:port", [7], [], 3, None, "host:0", "host:65536", "redis://host:6379",
        "user:hunter2@host:6379", "redis://user:hunter2@host:6379",
    ],
)  # fmt: skip
def test_addresses_that_are_refused(addresses: Any) -> None:
    with pytest.raises(ValueError, match="addresses must be") as found:
        ValkeyTier(addresses, identity="x")
    assert "hunter2" not in str(found.value)


@pytest.mark.parametrize("argument", ["timeout", "expiry"])
@pytest.mark.parametrize("value", [0.0, -1, "2", float("nan"), float("inf"), True])
def test_times_that_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be a number of seconds"):
        ValkeyTier(identity="x", **{argument: value})


def test_a_user_without_a_password_is_refused() -> None:
    """It would connect as the server's default user."""
    with pytest.raises(ValueError, match="username needs a password"):
        ValkeyConnection(username="kv")


@pytest.mark.parametrize("cluster", [False, True])
def test_options_that_the_client_has_not_are_refused_at_once(cluster: bool) -> None:
    tier = ValkeyTier(identity="x", cluster=cluster, connection=ValkeyConnection(options={"not_one": 1}))
    with pytest.raises(TypeError, match="not_one"), attached(tier):
        pass


def test_no_secret_of_a_connection_is_shown() -> None:
    connection = ValkeyConnection(username="kv", password="hunter2", options={"credentials": "hunter3"})
    assert "kv" in repr(connection)
    assert "hunter" not in repr(connection)


@pytest.mark.parametrize("connection", [{"password": "hunter2"}, "kv:hunter2@host", 5])
def test_what_is_no_connection_is_refused(connection: Any) -> None:
    with pytest.raises(TypeError, match=r"connection must be a kvoffload\.tiers\.ValkeyConnection, or None") as found:
        ValkeyTier(identity="x", connection=connection)
    assert "hunter2" not in str(found.value)
