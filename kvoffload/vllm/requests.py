"""What the manager keeps for each request of vLLM: the request of the index that stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.requests import CacheRequest


@dataclass(slots=True)
class RequestState:
    """Kept in vLLM's `ReqContext`, by its type.

    Attributes:
        owner: the index that `request` is of; several managers may see one context.
        request: its keys are not evicted by later ones of the same request.
        resets: how often the manager had been reset when the request came.
        end: where the last of its keys so far ends, in tokens.
    """

    owner: CacheIndex
    request: CacheRequest
    resets: int
    end: int = 0


def state_of(index: CacheIndex, context: ReqContext, resets: int) -> RequestState:
    """The state of a context, made if there is none; with an open request of the index."""
    state: RequestState | None = context.get_state(RequestState)
    if state is None or state.owner is not index:
        state = RequestState(index, index.open_request(), resets)
        context.set_state(state)
    elif state.request.ended:
        state.request, state.end = index.open_request(), 0
    return state


def end_request(index: CacheIndex, context: ReqContext) -> None:
    """The request has ended: its keys were used once, the first ones last."""
    state = context.get_state(RequestState)
    if state is not None and state.owner is index:
        state.request.end()


def keep_order(index: CacheIndex, context: ReqContext, state: RequestState, added: Sequence[OffloadKey]) -> None:
    """Let the request have its keys in the order of their tokens, also if these, the latest, are not its last.

    Then, as after a partial tail was stored before what precedes it, another request of the index takes its keys over.
    """
    first = last = context.get_offload_key_position(added[0]) or 0
    if len(added) > 1:
        last = context.get_offload_key_position(added[-1]) or 0
    follows, state.end = first >= state.end, max(last, state.end)
    if follows:
        return
    keys = state.request.keys
    ordered = sorted(keys, key=lambda key: context.get_offload_key_position(OffloadKey(key)) or 0)
    if ordered != list(keys):
        state.request = index.open_request()
        index.load(ordered, request=state.request)


def in_order(keys: Sequence[OffloadKey], context: ReqContext) -> Sequence[OffloadKey]:
    """Keys in the order of the tokens they stand for: keys of several groups come group after group.

    As they are, if vLLM has not said where one of them ends.
    """
    if len(keys) < 2 or get_offload_group_idx(keys[0]) == get_offload_group_idx(keys[-1]):
        return keys
    ends = list(map(context.get_offload_key_position, keys))
    if None in ends:
        return keys
    return [key for _, key in sorted(zip(ends, keys, strict=True), key=lambda pair: pair[0])]


def has_order(keys: Sequence[OffloadKey], context: ReqContext) -> bool:
    """Whether vLLM has said where these keys end, as its scheduler does for each."""
    return bool(keys) and context.get_offload_key_position(keys[0]) is not None
