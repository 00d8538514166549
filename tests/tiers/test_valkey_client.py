"""ValkeyTier without a server: arguments that are refused, and the answers of a client that is the test's."""

from __future__ import annotations

from typing import Any

import pytest
from remote_sessions import RemoteSession
from tier_classes import attached

from kvoffload.tiers import Outcome, ValkeyConnection, ValkeyTier

glide = pytest.importorskip("glide_sync")
DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED


class Client:
    """A client of glide, which answers every batch as the test has said."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def exec(self, batch: Any, raise_on_error: bool) -> list[Any]:
        assert (len(batch.commands), raise_on_error) == (len(self.answers), False)
        return self.answers

    def close(self) -> None:
        pass


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
        "", "host", "host:", ":1", "host:port", [7], [], "host:0", "host:65536", "redis://host:6379",
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
