"""A call of a cache: the lock is taken, the state brought up to date, and events are reported at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from kvoffload.cache.entries import Record
from kvoffload.cache.state import CacheState
from kvoffload.internal.nesting import in_call, raise_nested

_A = TypeVar("_A")
_R = TypeVar("_R")


class Owner(Protocol):
    """What has guarded methods.

    Attributes:
        _state: what they change, under its lock.
        _check_usable: is called before the lock is taken, and may raise; None: nothing is called.
    """

    _state: CacheState
    _check_usable: Callable[[], None] | None


_O = TypeVar("_O", bound=Owner)


def refuse(owner: Owner, argument: object) -> Any:
    """Raise RuntimeError: a policy, a signal handler or a finalizer calls the cache in the middle of a call."""
    del owner, argument
    raise_nested("the cache")


def end_later(owner: Owner, record: Record) -> None:
    """Have the next call of the cache end a record."""
    owner._state.abandoned.append(record)


def from_truth(answer: Callable[[_O, _A], _R]) -> Callable[[_O, _A], _R]:
    """Answer in the middle of another call, unless a policy asks: that call is changing it, or follows its advice."""

    def nested(owner: _O, argument: _A) -> _R:
        state = owner._state
        if state.consulting or any(pool.stale for pool in state.pools.all):
            refuse(owner, argument)
        return answer(owner, argument)

    return nested


def guarded(step: Callable[[_O, _A], _R], nested: Callable[[Any, Any], _R] = refuse) -> Callable[[_O, _A], _R]:
    """Make a call of the cache of a method. Public calls check their arguments, and then make one guarded call.

    The step has one argument: `*arguments, **options` cost a call 0.14 us more (Python 3.11, in a loop). It runs under
    the lock, with `state.working` set and the state up to date. What it proposes (`CacheState.propose`) is abandoned if
    an exception leaves the call, whether it comes out of the step, out of a hook of `notify`, or from a signal at any
    point.

    Args:
        nested: is called in place of the step if a call in the same thread has not returned, of this cache or of
            anything that shares its lock. The state is then in the middle of a change: it may read the truth alone.
    """

    @wraps(step)
    def call(self: _O, argument: _A) -> _R:
        if self._check_usable is not None:
            self._check_usable()
        state, record = self._state, None
        if in_call(state.lock):
            return nested(self, argument)
        try:
            with state.lock:
                try:
                    state.working = True
                    if state.abandoned or state.storing or state.loading or state.awaited or not state.consistent:
                        state.enter()
                    result = step(self, argument)
                finally:
                    record, state.proposed = state.proposed, None
                    state.changes += 1
                    state.working = state.consulting = False
            if state.recorder.unreported:
                state.recorder.notify()
        except BaseException:
            state.abandoned.append(record)  # ignored if it has not begun, or has come to its end
            raise
        return result

    return call


class _GivesState(Protocol):
    def __call__(self, owner: Owner, step: Callable[[CacheState], _R], /) -> _R: ...


def _given_the_state(owner: Owner, step: Callable[[CacheState], _R]) -> _R:
    return step(owner._state)


locked: _GivesState = guarded(_given_the_state)  # type: ignore[assignment]  # mypy drops the type variable
"""`locked(self, step)`: a guarded call of a function of the state, where a tenth of a microsecond does not matter."""

reading: _GivesState = guarded(_given_the_state, nested=_given_the_state)
"""The same for a function that reads the truth alone (see `entries`): it also answers in the middle of another call."""
