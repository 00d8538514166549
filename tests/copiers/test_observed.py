"""The choice between two copiers by what transfers took: how good it is, what finding out costs, what it never does.

Situations and times are those of `observing`; here are the shares of the better copier's throughput that must be kept.
"""

from __future__ import annotations

from statistics import fmean

import pytest
from counting import python_calls
from observing import FOLLOWED, MIXED, RATES, SEEDS, SIZES, TO_AND_FRO, World, lags, run, shares
from seeds import rest_long

from kvoffload.copiers.observed import Comparison, Estimate, Way

WAYS = Way("pack", 1e-3), Way("strided", 1.2e-3)
NBYTES = 50_000_000

WRONG_PROFILES = [(2.0, 1.0), (0.5, 1.0), (1.0, 2.0), (1.0, 0.5), (2.0, 0.5), (0.5, 2.0), (2.0, 2.0)]


@pytest.mark.parametrize("size", [*SIZES, MIXED])
@pytest.mark.parametrize("situation", RATES)
def test_the_better_copier_carries_nearly_all(situation: str, size: int | str) -> None:
    """Times scatter by 10%."""
    found = shares([(situation, 200)], size)
    assert fmean(found) >= 0.95
    assert min(found) >= 0.90


@pytest.mark.parametrize("scales", rest_long([(each,) for each in WRONG_PROFILES], 2))
@pytest.mark.parametrize("situation", RATES)
def test_a_profile_that_is_off_by_two_costs_little(situation: str, scales: tuple[float, float]) -> None:
    for size in (*SIZES, MIXED):
        found = shares([(situation, 200)], size, World(scales=scales))
        assert fmean(found) >= 0.95, size
        assert min(found) >= 0.90, size


@pytest.mark.parametrize(
    "world",
    [World(outliers=0.01), World(depth=4), World(waits="even"), World(waits="half"), World(waits="every other")],
    ids=["outliers", "4 in flight", "waits differ", "half wait", "every other waits"],
)
def test_times_that_scatter_cost_little(world: World) -> None:
    for situation in RATES:
        for size in (*SIZES, MIXED):
            assert fmean(shares([(situation, 200)], size, world)) >= 0.93, (situation, size)


@pytest.mark.parametrize("size", rest_long([MIXED, *SIZES], 1))
def test_situations_that_change_now_and_then_are_followed(size: int | str) -> None:
    """Every second, with 200 transfers a second."""
    assert fmean(shares(FOLLOWED, size)) >= 0.94
    assert fmean(shares(FOLLOWED, size, World(outliers=0.01))) >= 0.93


@pytest.mark.parametrize("size", SIZES)
def test_a_change_is_followed_within_a_dozen_transfers(size: int) -> None:
    """To long kernels and back, which pack and strided times both show."""
    found = sorted(lag for seed in SEEDS for lag in lags(TO_AND_FRO, size, seed, World(noise=0.03)))
    assert found[len(found) // 2] <= 5
    assert found[len(found) * 9 // 10] <= 12
    assert fmean(shares(TO_AND_FRO, size)) >= 0.89, "changes every 60 transfers"


def test_a_situation_that_the_carrying_copier_does_not_show_is_found_in_the_end() -> None:
    """Strided copies take as long as before, only packing does not wait any more: nothing but the budget asks."""
    comparison = Comparison(WAYS)
    for _ in range(50):
        forecast = comparison.choose(WAYS, NBYTES)
        comparison.note(forecast, 6e-3 if forecast.number == 0 else 1.2e-3)
    assert forecast.number == 1
    chosen = []
    for _ in range(400):
        forecast = comparison.choose(WAYS, NBYTES)
        comparison.note(forecast, 1e-3 if forecast.number == 0 else 1.2e-3)
        chosen.append(forecast.number)
    assert 50 < chosen.index(0) < 200, "4 times a transfer at 3%"
    assert sum(chosen[200:]) < 30


@pytest.mark.parametrize("ratio", [1.0, 1.05, 1.3, 2.0, 5.0, 30.0])
def test_finding_out_has_a_bounded_price(ratio: float) -> None:
    """Each copier takes the same time always. All that tries cost is 3%, and what was overdrawn in the beginning."""
    comparison, spent, lost, tries = Comparison(WAYS), 0.0, 0.0, 0
    for _ in range(5000):
        forecast = comparison.choose((Way("pack", 1e-3), Way("strided", 1e-3)), NBYTES)
        seconds = 1e-3 if forecast.number == 0 else 1e-3 * ratio
        comparison.note(forecast, seconds)
        spent, lost, tries = spent + seconds, lost + seconds - 1e-3, tries + (forecast.price > 0.0)
    assert lost <= 0.03 * spent + 4 * 1e-3 * ratio
    assert tries >= 0.8 * 5000 * 0.03 / max(ratio - 1.0, 0.25)


def test_tries_whose_time_never_comes_do_not_stop_it() -> None:
    """They failed, say. Others follow, as seldom as if all had been in vain."""
    comparison, tries = Comparison(WAYS), 0
    for _ in range(4000):
        forecast = comparison.choose(WAYS, NBYTES)
        if forecast.price:
            tries += 1
        else:
            comparison.note(forecast, 1e-3)
    assert 100 <= tries <= 4000 // 16


def test_no_two_tries_are_in_flight() -> None:
    comparison = Comparison(WAYS)
    for _ in range(50):
        in_flight = [comparison.choose(WAYS, NBYTES) for _ in range(16)]
        assert sum(forecast.price > 0.0 for forecast in in_flight) <= 1
        for forecast in in_flight:
            comparison.note(forecast, 1e-3)


def test_the_same_times_lead_to_the_same_choices() -> None:
    assert run(TO_AND_FRO, SIZES, 7) == run(TO_AND_FRO, SIZES, 7)


def test_seconds_besides_the_transfer_count_in_the_choice_alone() -> None:
    """Ends sooner, but keeps the caller."""
    comparison = Comparison(WAYS)
    ways = Way("pack", 1e-3, extra=1e-3), Way("strided", 1.2e-3)
    for _ in range(20):
        forecast = comparison.choose(ways, NBYTES)
        comparison.note(forecast, ways[forecast.number].predicted)
    assert comparison.choose(ways, NBYTES).seconds == pytest.approx((2e-3, 1.2e-3))
    assert comparison.estimates[0].ratio == pytest.approx(1.0)


@pytest.mark.parametrize(("predicted", "extra"), [(2.1e-3, 0.0), (1.1e-3, 1e-3)])
def test_what_even_idle_takes_twice_as_long_is_first_tried_from_the_budget(predicted: float, extra: float) -> None:
    """Of a fast one that nobody knows the first time is wanted at once."""
    for slow in (False, True):
        ways = Way("pack", 1e-3), Way("strided", predicted if slow else 1.1e-3, extra=extra if slow else 0.0)
        comparison, tried = Comparison(ways), []
        for _ in range(100):
            forecast = comparison.choose(ways, NBYTES)
            tried.append(forecast.price > 0.0)
            comparison.note(forecast, ways[forecast.number].predicted)
        first = tried.index(True)
        assert 30 < first < 60 if slow else first < 4, "1.1 times a transfer at 3%"


def test_the_first_expectation_is_the_profiles() -> None:
    ways = Way("pack", 1e-3, ratio=1.5), Way("strided", 1.2e-3)
    comparison = Comparison(ways)
    assert comparison.expect(ways, NBYTES).copier == "strided"
    assert comparison.choose(ways, NBYTES).seconds == pytest.approx((1.5e-3, 1.2e-3))


@pytest.mark.parametrize("calm", [6, 7])
def test_two_jumps_soon_after_each_other_say_that_times_scatter(calm: int) -> None:
    """What is a surprise then takes more than after a change of a situation that had lasted for eight times."""
    estimate = Estimate(1.0)
    for ratio in (*[1.0] * calm, 3.0, 3.0):
        estimate.note(ratio)
    assert estimate.ratio == pytest.approx(3.0), "it has jumped"
    estimate.note(4.2)
    surprised = estimate.doubt != 1.0
    assert surprised == (calm == 7)


def test_it_says_why() -> None:
    comparison, texts = Comparison(WAYS), []
    for _ in range(20):
        forecast = comparison.choose(WAYS, NBYTES)
        texts.append(str(forecast))
        comparison.note(forecast, (1.25e-3, 1e-3)[forecast.number])
    assert texts[0] == "pack: 50.0 GB/s expected from the profile; strided 41.7"
    assert texts[1] == "strided: 41.7 GB/s expected from the profile; pack 40.0"
    assert texts[2] == "strided: 50.0 GB/s expected from the last transfers; pack 40.0"
    tried = "pack: 40.0 GB/s expected from the last transfers, tried; strided 50.0"
    assert set(texts[3:]) == {texts[2], tried}


def test_a_choice_is_cheap() -> None:
    """It is made for every transfer: about a microsecond."""
    comparison = Comparison(WAYS)
    for _ in range(30):
        comparison.note(comparison.choose(WAYS, NBYTES), 1e-3)
    entered = python_calls(lambda: comparison.choose(WAYS, NBYTES))
    assert len(entered) <= 3, entered  # itself, the expectation, and its record
