"""The session of a vLLM request, and the hints that came with it, in the envelope of vLLM's pull request 53423.

docs/guides/vllm.md has the fields that are read here. Anything else is ignored: a hint never fails a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import ReqContext

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.sessions import Action, Hint, default_ttl
from kvoffload.errors import KVOffloadError
from kvoffload.internal.log import LOGGER

_VERSIONS = ("0.1", "1.0")  # of envelopes and of actions
_MOST_ACTIONS, _LONGEST_NAME = 16, 512
_ACTIONS: dict[str, Action] = {
    "retain": "retain", "pin": "retain", "prefetch": "prefetch", "demote": "demote", "offload": "demote",
    "release": "release", "evict": "release", "invalidate": "release", "deref": "release",
}  # fmt: skip


def session_of(context: ReqContext, named: object = None) -> str | None:
    """Return the session that vLLM has `named`, else the one that `kv_transfer_params` name."""
    name = _first(named, _get(context.kv_transfer_params, "session"))
    if name is None or (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME):
        return name
    LOGGER.debug("ignored a session that is no text of 1 to %d characters: %.80r", _LONGEST_NAME, name)
    return None


def hints_of(context: ReqContext, session: str | None) -> list[Hint]:
    """Return the hints that came with a request of this session."""
    envelope = _first(getattr(context, "kv_hints", None), _get(context.kv_transfer_params, "kv_hints"))
    actions = [] if envelope is None else _get(envelope, "actions")
    if not isinstance(actions, list) or (actions and _get(envelope, "protocol_version") not in _VERSIONS):
        LOGGER.debug("ignored hints of an unknown version or form: %.200r", envelope)
        return []
    hints = [(action, _hint(action, session)) for action in actions[:_MOST_ACTIONS]]
    for action in [action for action, hint in hints if hint is None] + actions[_MOST_ACTIONS:]:
        LOGGER.debug("ignored a hint that is unknown, malformed, without a session or one too many: %.200r", action)
    return [hint for _, hint in hints if hint is not None]


def _hint(action: object, own: str | None) -> Hint | None:
    kind, payload = _get(action, "action_type"), _get(action, "payload")
    known = _ACTIONS.get(kind.removeprefix("kv.")) if isinstance(kind, str) else None
    if known is None or _get(action, "action_version") not in _VERSIONS or not isinstance(payload, Mapping | None):
        return None
    session = _first(*(_get(payload, name) for name in ("session_id", "target_session", "session")), own)
    due = _get(payload, "estimated_resume_seconds")
    default = default_ttl(due if isinstance(due, int | float) else None)
    ttl = _first(_get(payload, "ttl_seconds"), _get(payload, "ttl"), default)
    timely = all(type(each) in (int, float) and 0 < each < 1e9 for each in (ttl, 1 if due is None else due))
    ranges = _get(payload, "directives") is not None  # of tokens, each with a time of its own
    return Hint(known, session, "", ttl, due) if isinstance(session, str) and timely and not ranges else None


def _get(holder: object, name: str) -> Any:
    """Return a field of JSON, or of vLLM's structs; None: there is none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def give(index: CacheIndex, hints: Sequence[Hint], *actions: Action) -> None:
    for hint in [hint for hint in hints if hint.action in actions]:
        try:
            LOGGER.debug("%s", index.hint(hint.action, session=hint.session, ttl=hint.ttl, due=hint.due))
        except (KVOffloadError, ValueError, RuntimeError) as error:  # such as tiers that are closed
            LOGGER.debug("%s: %s", hint.action, error)
