"""Breaker and TierSpeed as data: a state, an event, the next state."""

from __future__ import annotations

import time

import pytest
from tier_classes import DictTier

from kvoffload.cache.tiering.below import Breaker, BreakerState, TierBelow, TierSpeed
from kvoffload.tiers import MemoryTier, Outcome, TierStatistics

DONE, FAILED, DECLINED = Outcome.DONE, Outcome.FAILED, Outcome.DECLINED
CLOSED, OPEN, TRYING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.TRYING
PAUSE, HUNG = 1.0, 30.0


def in_state(state: BreakerState) -> Breaker:
    """At the time 0."""
    breaker = Breaker(HUNG)
    if state is not CLOSED:
        for _ in range(5):
            breaker.failed(-PAUSE)
    if state is TRYING:
        assert breaker.usable(0.0, 0.0)
        breaker.given(0.0)
    assert breaker.state is state
    return breaker


@pytest.mark.parametrize(
    ("state", "event", "then", "usable"),
    [
        (CLOSED, "succeeded", CLOSED, True),
        (CLOSED, "failed", CLOSED, True),
        (CLOSED, "given", CLOSED, True),
        (CLOSED, "undecided", CLOSED, True),
        (CLOSED, "hangs", OPEN, False),
        (OPEN, "succeeded", OPEN, True),
        (OPEN, "failed", OPEN, True),
        (OPEN, "given", TRYING, False),
        (OPEN, "undecided", OPEN, True),
        (OPEN, "hangs", OPEN, False),
        (TRYING, "succeeded", CLOSED, True),
        (TRYING, "failed", OPEN, False),
        (TRYING, "given", TRYING, False),
        (TRYING, "undecided", TRYING, True),
        (TRYING, "hangs", OPEN, False),
    ],
)
def test_every_event_in_every_state(state: BreakerState, event: str, then: BreakerState, usable: bool) -> None:
    """`usable`: whether the tier may be given a job right afterwards, when the pause of OPEN is over."""
    breaker = in_state(state)
    if event == "hangs":
        assert not breaker.usable(0.0, HUNG)
    elif event == "succeeded":
        breaker.succeeded()
    else:
        getattr(breaker, event)(0.0)
    assert breaker.state is then
    assert breaker.usable(0.0, 0.0) is usable


def test_the_log_says_once_that_a_tier_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    below = TierBelow(MemoryTier(1 << 16), HUNG)
    for failures in range(1, 8):
        below.late(begun=True)
        assert len(caplog.records) == (failures >= 5)
    assert "tier memory fails" in caplog.text


def test_the_log_says_once_that_a_call_hangs(caplog: pytest.LogCaptureFixture) -> None:
    class Hanging(MemoryTier):
        longest = 0.0

        def statistics(self) -> TierStatistics:
            return TierStatistics(longest_call=self.longest)

    tier = Hanging(1 << 16)
    below = TierBelow(tier, HUNG)
    assert below.usable
    assert caplog.records == []
    tier.longest = HUNG
    for _ in range(3):
        assert not below.usable
    (record,) = caplog.records
    assert "a call hangs" in record.getMessage()


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(4):
            breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state is CLOSED
    for _ in range(5):
        breaker.failed(0.0)
    assert (breaker.state, breaker.opened) == (OPEN, 1)


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_success() -> None:
    breaker, now, pauses = Breaker(HUNG), 0.0, []
    for _ in range(5):
        breaker.failed(now)
    for _ in range(9):
        pause = next(pause for pause in (1, 2, 4, 8, 16, 32, 60) if breaker.usable(now + pause, 0.0))
        assert not breaker.usable(now + pause - 0.01, 0.0)
        pauses.append(pause)
        now += pause
        breaker.given(now)
        breaker.failed(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    breaker.given(now)
    breaker.succeeded()
    for _ in range(5):
        breaker.failed(now)
    assert breaker.usable(now + 1.0, 0.0)


def test_a_call_that_hangs_keeps_it_open_until_it_has_returned() -> None:
    breaker = Breaker(HUNG)
    for now in range(0, 1000, 10):
        assert not breaker.usable(float(now), HUNG + now)
        assert breaker.pauses(now + 0.04), "its calls are not looked at before that"
        assert now == 0 or not breaker.pauses(now + 0.06), "they may have returned"
    assert breaker.opened == 1
    assert breaker.usable(1000.0, 0.0)


def test_calls_that_go_on_after_a_deadline_keep_it_open_until_they_have_returned() -> None:
    breaker = Breaker(HUNG)
    breaker.late(10.0)
    assert breaker.usable(10.0, 0.0)
    assert breaker.usable(10.5, 0.4), "this one began after the deadline"
    assert breaker.refuses(11.0, 1.1)
    assert breaker.state is CLOSED, "asking changes nothing"
    assert not breaker.usable(11.0, 1.1)
    assert (breaker.state, breaker.opened) == (OPEN, 1)
    assert not breaker.usable(12.0, 2.1)
    assert breaker.usable(12.5, 0.0), "no pause: it may have been slow for once"
    breaker.given(12.5)
    assert not breaker.usable(12.5, 0.0)
    breaker.succeeded()
    assert breaker.state is CLOSED


def test_a_try_that_is_never_answered_is_followed_by_another_one() -> None:
    breaker = in_state(TRYING)
    assert not breaker.usable(HUNG - 0.01, 0.0)
    assert breaker.usable(HUNG, 0.0)


def below_that_may_try(gets: bool, puts: bool) -> TierBelow:
    """A tier whose breakers are open as given, and whose pauses are over."""
    below, before = TierBelow(DictTier(), HUNG), time.monotonic() - 2 * PAUSE
    for breaker in [below.breaker] * gets + [below.puts] * puts:
        for _ in range(5):
            breaker.failed(before)
    return below


def states(below: TierBelow) -> tuple[BreakerState, BreakerState]:
    return below.breaker.state, below.puts.state


@pytest.mark.parametrize(
    ("outcomes", "then", "usable"),
    [
        ([DONE], (CLOSED, CLOSED), (True, True)),
        ([FAILED, DONE], (CLOSED, OPEN), (True, False)),
        ([FAILED], (TRYING, OPEN), (True, False)),  # it says nothing of gets
        ([DECLINED], (TRYING, TRYING), (True, True)),
    ],
)
def test_a_put_tries_both_breakers(
    outcomes: list[Outcome], then: tuple[BreakerState, BreakerState], usable: tuple[bool, bool]
) -> None:
    below = below_that_may_try(gets=True, puts=True)
    assert below.takes_puts
    below.put([b"key"], [0], "", lambda: None)
    assert states(below) == (TRYING, TRYING)
    assert not below.usable
    below.answered(outcomes, of_put=True)
    assert states(below) == then
    assert (below.usable, below.takes_puts) == usable


@pytest.mark.parametrize(
    ("outcome", "then"), [(DONE, (CLOSED, OPEN)), (FAILED, (OPEN, OPEN)), (DECLINED, (TRYING, OPEN))]
)
def test_a_get_tries_the_breaker_of_the_tier_alone(outcome: Outcome, then: tuple[BreakerState, BreakerState]) -> None:
    below = below_that_may_try(gets=True, puts=True)
    below.get([b"key"], [0], None, lambda: None)
    assert not below.takes_puts
    below.answered([outcome])
    assert states(below) == then


def test_puts_that_fail_leave_the_tier_to_its_gets_and_gets_leave_no_puts() -> None:
    below = below_that_may_try(gets=False, puts=False)
    below.answered([FAILED] * 5, of_put=True)
    assert states(below) == (CLOSED, OPEN)
    assert (below.usable, below.takes_puts, below.left_alone) == (True, False, True)
    assert below.statistics().opened == 1
    below = below_that_may_try(gets=False, puts=False)
    below.answered([FAILED] * 4)
    below.answered([DONE], of_put=True)
    below.answered([FAILED])
    assert states(below) == (OPEN, CLOSED)
    assert (below.usable, below.takes_puts, below.left_alone) == (False, False, True)


def test_speed_is_a_moving_mean_of_recent_jobs() -> None:
    speed = TierSpeed()
    assert speed.expected(0.0) is None
    speed.measured(10, 1.0, 0.0)
    assert speed.expected(0.0) == pytest.approx(0.1)
    speed.measured(10, 2.0, 1.0)
    assert speed.expected(1.0) == pytest.approx(0.13)
    speed.measured(0, 9.0, 2.0)
    assert speed.expected(2.0) == pytest.approx(0.13)


def test_an_old_measurement_says_nothing() -> None:
    speed = TierSpeed()
    speed.measured(1, 5.0, 0.0)
    assert speed.expected(30.0) == 5.0
    assert speed.expected(30.1) is None
    speed.measured(1, 1.0, 40.0)
    assert speed.expected(40.0) == 1.0, "the old one does not count"
