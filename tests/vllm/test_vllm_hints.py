"""The session of a request, and the hints that came with it: what of them reaches the cache, and when."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from vllm_parts import keys, request

fake_vllm.install()

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402

from kvoffload import CacheIndex, CacheRequest, ClosedError  # noqa: E402
from kvoffload.vllm import KVOffloadConnector, KVOffloadManager  # noqa: E402

A = keys(*range(8))


def action(kind: Any, version: Any = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: Any, version: Any = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def with_params(session: Any, hints: Any) -> Any:
    """A request whose hints and session are in kv_transfer_params."""
    context = request("1", A)
    context.kv_transfer_params = {"session": session, "kv_hints": hints}
    return context


def with_field(hints: dict[str, Any]) -> Any:
    """A request whose hints are in vLLM's field of its own."""
    context = request("1", A)
    actions = [KvHintAction(**each) for each in hints["actions"]]
    context.kv_hints = KvHintsEnvelope(hints["protocol_version"], hints["message_id"], actions)
    return context


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the cache is told: ("open", session), ("end",) and the hints."""
    told: list[Any] = []
    opens, ends = CacheIndex.open_request, CacheRequest.end

    def open_request(index: CacheIndex, **options: Any) -> Any:
        told.append(("open", options.get("session")))
        return opens(index, **options)

    def hint(_: CacheIndex, kind: Any, **options: Any) -> None:
        told.append((kind, options["session"], options["ttl"], options["due"]))

    def end(made: CacheRequest) -> None:
        told.append(("end",))
        ends(made)

    monkeypatch.setattr(CacheIndex, "open_request", open_request)
    monkeypatch.setattr(CacheIndex, "hint", hint)
    monkeypatch.setattr(CacheRequest, "end", end)
    return told


def served(context: Any) -> KVOffloadManager:
    manager = KVOffloadManager(8)
    manager.on_new_request(context)
    output: Any = manager.prepare_store(A[:2], context)
    assert output.keys_to_store == A[:2]
    manager.complete_store(set(A[:2]), context)
    manager.on_request_finished(context)
    manager.index.check()
    return manager


ARRIVING = {
    "retain": (action("kv.retain"), ("retain", "own", 300.0, None)),
    "pin": (action("pin", "0.1", ttl_seconds=60), ("retain", "own", 60, None)),
    "with a time": (action("kv.retain", ttl=9.5, estimated_resume_seconds=4), ("retain", "own", 9.5, 4)),
    "with a late time": (action("kv.retain", estimated_resume_seconds=400), ("retain", "own", 800.0, 400)),
    "of another session": (action("kv.retain", session_id="s"), ("retain", "s", 300.0, None)),
    "prefetch": (action("kv.prefetch", target_session="s"), ("prefetch", "s", 300.0, None)),
    "with block hashes": (action("kv.prefetch", block_hashes=["11"], priority=3), ("prefetch", "own", 300.0, None)),
    "release": (action("kv.release"), ("release", "own", 300.0, None)),
    "evict": (action("kv.evict", session="s"), ("release", "s", 300.0, None)),
    "invalidate": (action("kv.invalidate"), ("release", "own", 300.0, None)),
    "deref": (action("kv.deref"), ("release", "own", 300.0, None)),
    "demote": (action("kv.demote", session_id="s"), ("demote", "s", 300.0, None)),
    "offload": (action("offload"), ("demote", "own", 300.0, None)),
}


@pytest.mark.parametrize("field", [True, False])
@pytest.mark.parametrize("name", ARRIVING)
def test_an_action_arrives(name: str, field: bool, calls: list[Any]) -> None:
    """Retain and prefetch at the beginning of the request, the others at its end."""
    sent, hint = ARRIVING[name]
    context = with_params("own", envelope(sent))
    if field:
        context = with_field(envelope(sent))
        context.kv_transfer_params = {"session": "own", "kv_hints": envelope(action("kv.evict", session="wrong"))}
    served(context)
    early, late = ([hint], []) if hint[0] in ("retain", "prefetch") else ([], [hint])
    assert calls == [("open", "own"), *early, ("end",), *late]


MALFORMED = {
    "no envelope": "kv.retain",
    "an envelope of another version": envelope(action("kv.retain"), version="2.0"),
    "no version": {"actions": [action("kv.retain")]},
    "no list of actions": {"protocol_version": "0.1", "actions": {"0": action("kv.retain")}},
    "no action": envelope("kv.retain"),
    "an unknown action": envelope(action("kv.fetch")),
    "no type": envelope(action(None)),
    "a list as type": envelope(action(["kv.retain"])),
    "an action of another version": envelope(action("kv.retain", "2.0")),
    "a number as version": envelope(action("kv.retain", 1.0)),
    "a list as payload": envelope({**action("kv.retain"), "payload": [1]}),
    "ranges of tokens": envelope(action("kv.retain", directives=[{"priority": 0}])),
    "a number as session": envelope(action("kv.evict", session_id=7)),
    "a text as ttl": envelope(action("kv.retain", ttl_seconds="60")),
    "ttl 0": envelope(action("kv.retain", ttl=0)),
    "ttl true": envelope(action("kv.retain", ttl=True)),
    "a huge ttl": envelope(action("kv.retain", ttl=10**400)),
    "no number": envelope(action("kv.retain", ttl=float("nan"))),
    "due in the past": envelope(action("kv.retain", estimated_resume_seconds=-1)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_ignored_with_one_line(
    name: str, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kvoffload"):
        served(with_params("own", MALFORMED[name]))
    assert calls == [("open", "own"), ("end",)]
    assert [(record.levelname, record.msg[:7]) for record in caplog.records] == [("DEBUG", "ignored")]


def test_a_malformed_action_does_not_stop_the_next_one(calls: list[Any]) -> None:
    served(with_params("own", envelope(action("kv.fetch"), action("kv.retain", ttl=-1), action("kv.retain"))))
    assert calls == [("open", "own"), ("retain", "own", 300.0, None), ("end",)]


def test_the_first_16_actions_count(calls: list[Any]) -> None:
    served(with_params(None, envelope(*(action("kv.prefetch", session=str(n)) for n in range(20)))))
    assert [call[1] for call in calls[1:-1]] == [str(n) for n in range(16)]


@pytest.mark.parametrize("session", [7, "", "s" * 513, ["s"], {"s": 1}])
def test_a_malformed_session_is_none(session: Any, calls: list[Any]) -> None:
    served(with_params(session, envelope(action("kv.retain"))))
    assert calls == [("open", None), ("end",)]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"session": None, "kv_hints": None}, [], "?"])
def test_without_a_session_nothing_changes(params: Any, calls: list[Any]) -> None:
    context = request("1", A)
    context.kv_transfer_params = params
    served(context)
    assert calls == [("open", None), ("end",)]


def test_a_context_of_an_older_vllm_has_no_such_field(calls: list[Any]) -> None:
    context = with_params("own", envelope(action("kv.retain")))
    names = ("req_id", "kv_transfer_params", "get_state", "set_state", "get_offload_key_position")
    served(SimpleNamespace(**{name: getattr(context, name) for name in names}))
    assert calls == [("open", "own"), ("retain", "own", 300.0, None), ("end",)]


def test_the_connector_passes_on_vllms_own_session_id(calls: list[Any]) -> None:
    """vLLM's ReqContext has none. It wins over kv_transfer_params, and holds for this request only."""
    manager = KVOffloadManager(8)
    connector: Any = KVOffloadConnector.__new__(KVOffloadConnector)
    contexts = {"1": with_params("other", envelope(action("kv.retain"))), "2": request("2", A), "3": request("3", A)}
    connector.connector_scheduler = SimpleNamespace(
        manager=manager, on_new_request=lambda new: manager.on_new_request(contexts[new.request_id])
    )
    connector.on_new_request(SimpleNamespace(request_id="1", session_id="own"))
    connector.on_new_request(SimpleNamespace(request_id="2", session_id=None))
    connector.on_new_request(SimpleNamespace(request_id="3"))  # an older vLLM
    assert calls == [("open", "own"), ("retain", "own", 300.0, None), ("open", None), ("open", None)]
    connector.connector_scheduler.manager = object()  # vLLM's own
    connector.on_new_request(SimpleNamespace(request_id="2", session_id="own"))


def test_a_promise_holds_for_the_request_that_takes_over_the_keys(calls: list[Any]) -> None:
    """As after a partial tail that was stored first; nothing else is said twice."""
    context = with_params("own", envelope(action("kv.retain"), action("kv.prefetch"), action("kv.release")))
    manager = KVOffloadManager(8)
    for piece in (1, 0):
        manager.prepare_store([A[piece]], context)
    manager.on_request_finished(context)
    retain, prefetch, release = ((kind, "own", 300.0, None) for kind in ("retain", "prefetch", "release"))
    assert calls == [("open", "own"), retain, prefetch, ("open", "own"), retain, ("end",), release]


@pytest.mark.parametrize("error", [ClosedError, ValueError, RuntimeError])
def test_a_hint_that_fails_does_not_fail_the_request(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hint(*_: Any, **__: Any) -> None:
        raise error("no")

    monkeypatch.setattr(CacheIndex, "hint", hint)
    served(with_params("own", envelope(action("kv.retain"), action("kv.evict"))))


@pytest.mark.parametrize("pieces", [[A[:2]], [A[:1], A[1:2]], [A[1:2], A[:1]]], ids=["one", "in order", "tail first"])
def test_released_keys_go_first(pieces: list[Any]) -> None:
    """With the cache itself: the released session's keys are evicted, though used later than the others."""
    manager = KVOffloadManager(4, policy="lru")
    others, new = keys(20, 21), keys(30, 31)
    for name, stored, hints in (("other", [others], []), ("own", pieces, [action("kv.release")])):
        context = with_params(name, envelope(*hints))
        manager.on_new_request(context)
        for some in stored:
            output: Any = manager.prepare_store(some, context)
            manager.complete_store(set(output.keys_to_store), context)
        manager.on_request_finished(context)
    output = manager.prepare_store(new, request("3", new))
    assert sorted(output.evicted_keys) == A[:2]
    manager.index.check()
