"""Passwords are in no message: of errors, of the log, of commands. Where they stood is "***"."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.internal.checks import masked, reason, shown
from kvoffload.internal.log import LOGGER

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("at redis://user:hunter2@host:6379/0, later", "at redis://***@host:6379/0, later"),
        ("redis://:hunter2@host", "redis://***@host"),
        ("https://hunter2@host/path", "https://***@host/path"),
        ("etcd://root:hunter2@one:1;root:hunter2@two:2", "etcd://***@two:2"),
        ("user:hunter2@host:6379: timed out", "***@host:6379: timed out"),
        ("user:hunt@er/hunter2@host:6379", "***@host:6379"),
        ("a:hunter2@b:1,redis://c:hunter2@d:2", "***@d:2"),
        ("{'server': 'redis://:hunter2@host:1', 'a': 'b'}", "{'server': 'redis://***@host:1', 'a': 'b'}"),
        ("https:/AK:hunter2@bucket", "***@bucket"),
        ("http://host/x?X-Amz-Signature=hunter2&b=1", "http://host/x?X-Amz-Signature=***&b=1"),
        ("http://host/x?sv=1&sig=hunter2", "http://host/x?sv=1&sig=***"),
        ("http://host/x?token=hunter2", "http://host/x?token=***"),
        ("password=hunter2", "password=***"),
        ("{'secret_access_key': 'hunter2, more', 'a': 'b'}", "{'secret_access_key': ***, 'a': 'b'}"),
        ("DefaultEndpoint=x;AccountKey=hunter2;a=b", "DefaultEndpoint=x;AccountKey=***;a=b"),
        ('"session_token": "hunter2"', '"session_token": ***'),
    ],
)  # fmt: skip
def test_logins_and_secrets_are_hidden(text: str, hidden: str) -> None:
    assert masked(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "identity 'llama-3.1-8b@0e9e39f/bf16'",
        "tokens_per_block=16, num_slots=8",
        "the store at s3://bucket/folder says: no such bucket",
        "password=env:VARIABLE",
        "127.0.0.1:6379: it refuses user or password",
        "mail me@host",
        "",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@given(
    st.text(st.characters(exclude_categories=("Z", "C")), min_size=1), st.sampled_from(["", "redis://", "x=(http://"])
)
def test_a_password_of_any_characters_is_hidden(password: str, scheme: str) -> None:
    assert masked(f"see {scheme}user:{password}@host:1").endswith("***@host:1")
    assert "user:" not in masked(f"see {scheme}user:{password}@host:1")


def test_messages_are_masked_before_they_are_cut() -> None:
    address = f"redis://user:{SECRET}@host"
    assert all(SECRET[:3] not in shown(address, length) for length in range(60))
    assert reason(OSError(f"{address}: refused")) == "OSError: redis://***@host: refused"


@pytest.mark.parametrize("arguments", [(f"redis://u:{SECRET}@host",), (OSError(f"u:{SECRET}@host:1"),)])
def test_the_log_is_masked(caplog: pytest.LogCaptureFixture, arguments: tuple[object, ...]) -> None:
    with caplog.at_level(logging.INFO, "kvoffload"):
        LOGGER.info("no answer of %s", *arguments)
        LOGGER.info("%d of %d", 1, 2)
    assert SECRET not in caplog.text
    assert "***@host" in caplog.text
    assert caplog.records[1].args == (1, 2), "records without secrets stay as they are"


def test_an_object_that_cannot_show_itself_does_not_raise_out_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    monkeypatch.setattr(logging, "raiseExceptions", False)
    LOGGER.warning("of %r", Mute())
