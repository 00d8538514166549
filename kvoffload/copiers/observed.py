"""Chooses between two copiers by what the last transfers took, at a bounded price for finding out.

A profile says what a copier takes in a few situations. It cannot say which situation this is: whether other streams run
long kernels, what else is on the link. Transfers say it: the driver gives their times anyway. Nothing is submitted for
the sake of measuring.

For each kind of transfer (direction, whether the other direction is active, size up to a factor of two) both copiers
have an `Estimate`: the seconds that transfers took, divided by the seconds that the profile predicts. The copier with
fewer expected seconds carries the transfer. The other one is *tried*, so that its estimate stays true, if

1. the budget can pay for it. The price of a try is the time that it is expected to lose to the better copier. The
   budget grows by 3% of the time of all transfers. So copiers that are nearly equal are compared often, and one that
   takes five times as long is tried once in 130 transfers;
2. the last try was surprisingly fast, and faster than the better copier: it may have been chance, so it is repeated;
3. the better copier became clearly faster or slower since the last try: the situation has changed;
4. it was never tried, the better copier is known, and by the profile the other one takes less than twice as long on an
   idle GPU.

Cases 2 to 4 may overdraw the budget, up to a limit.
"""

from __future__ import annotations

from typing import NamedTuple

from kvoffload.tuning import CopierName

_BUDGET = 0.03  # of the time of all transfers
# In transfers by the better copier: the price of a try at least, so that equal ones are compared every 8 transfers; the
# most that is paid if more was not expected, since its time may have been chance; and the overdraft.
_LEAST_PRICE, _MOST_PRICE, _OVERDRAFT = 0.25, 20.0, 10.0
_KNOWN = 4  # times, after which an estimate is worth its full price
_HOPELESS = 2.0  # times as long on an idle GPU: then the first try comes from the budget alone
_PATIENCE = 16  # transfers until the next try, unless the last one's time is there before

_GAIN, _GAIN_OF_SURPRISE = 0.25, 0.1  # how far a time moves an estimate
_SURPRISE, _CHANGE = 1.3, 1.14  # at least; ratios of times
_SURPRISE_BY_SPREAD, _CHANGE_BY_SPREAD = 2.5, 1.8
_SPREAD, _MOST_SPREAD = 0.1, 4.0  # times scatter by 10% where nothing else is known


class Way(NamedTuple):
    """A copier that could carry a transfer.

    Attributes:
        predicted: seconds on the GPU's clock while nothing else runs, by the profile.
        extra: further seconds that count in the choice, such as the host time of the call.
        ratio: of the first expectation to `predicted`.
    """

    copier: CopierName
    predicted: float
    extra: float = 0.0
    ratio: float = 1.0


class Forecast(NamedTuple):
    """A choice between two ways. As text it says which one, and why.

    Attributes:
        number: of the way that carries the transfer, 0 or 1.
        seconds: expected, of both ways, with the extra ones.
        price: taken from the budget for a try; 0.0 if it is none.
        known: whether the expectation comes from transfers, not from the profile alone.
    """

    comparison: Comparison
    ways: tuple[Way, Way]
    nbytes: int
    number: int
    seconds: tuple[float, float]
    price: float
    known: bool

    @property
    def copier(self) -> CopierName:
        return self.ways[self.number].copier

    def __str__(self) -> str:
        pairs = zip(self.seconds, self.ways, strict=True)
        rates = [f"{self.nbytes / (seconds - way.extra) / 1e9:.1f}" for seconds, way in pairs]
        source = "the last transfers" if self.known else "the profile"
        tried = ", tried" if self.price else ""
        other = f"{self.ways[1 - self.number].copier} {rates[1 - self.number]}"
        return f"{self.copier}: {rates[self.number]} GB/s expected from {source}{tried}; {other}"


class Estimate:
    """The ratio of observed to predicted seconds of a copier.

    Attributes:
        spread: how far single times are from it, on the average.
        count: times that it comes from, since it jumped.
        doubt: how far the last time was off, as a ratio, if that was a surprise; else 1.0.
        seen: the ratio of the other copier when this one's last time came.
        age: how many times of the other copier came since.
        wanted: cases 2 to 4 ask for a try.
    """

    doubt = seen = 1.0
    spread = _SPREAD
    age = count = 0
    wanted = False

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def note(self, ratio: float) -> None:
        """Move towards a new ratio.

        1. It is about as usual.
        2. A surprise: a single one counts little, since it may be chance (a clock, another process on the link).
        3. The second surprise in a row, in the same direction: the situation has changed, so jump to the nearer one.
           Two jumps soon after each other show that times scatter as much. Then such times are no surprise any more,
           and the estimate is their mean.
        """
        off = ratio / self.ratio
        far = off if off > 1.0 else 1.0 / off
        limit = max(_SURPRISE, 1.0 + _SURPRISE_BY_SPREAD * self.spread)
        doubt, self.doubt = self.doubt, 1.0
        self.count += 1
        if far <= limit:  # 1
            gain = max(_GAIN, 1.0 / self.count)
        elif doubt == 1.0 or (off > 1.0) != (doubt > 1.0):  # 2
            self.doubt, gain = off, _GAIN_OF_SURPRISE
            off = limit if off > 1.0 else 1.0 / limit
        else:  # 3
            gain = 1.0
            off = min(off, doubt) if off > 1.0 else max(off, doubt)
            if self.count > 2 * _KNOWN:
                self.spread, far = _SPREAD, 1.0 + _SPREAD
            self.count = 1
        self.ratio *= 1.0 + gain * (off - 1.0)
        self.spread += _GAIN_OF_SURPRISE * (min(far - 1.0, _MOST_SPREAD) - self.spread)

    def has_left(self, ratio: float) -> bool:
        """Return whether it is clearly above or below an earlier value."""
        far = self.ratio / ratio if self.ratio > ratio else ratio / self.ratio
        return self.doubt == 1.0 and far > max(_CHANGE, 1.0 + _CHANGE_BY_SPREAD * self.spread)


class Comparison:
    """Two copiers for one kind of transfer. Belongs to one engine, under its lock. An interrupt leaves it usable: each
    value may be old, none is half written.

    Args:
        ways: of the first transfer; the copiers stay the same.
    """

    _budget = 0.0  # seconds
    _quiet = 0  # transfers until the next try

    def __init__(self, ways: tuple[Way, Way]) -> None:
        self.estimates = Estimate(ways[0].ratio), Estimate(ways[1].ratio)

    def expect(self, ways: tuple[Way, Way], nbytes: int) -> Forecast:
        """Return the better way, as far as is known. Nothing changes."""
        one, two = self.estimates
        (_, predicted, extra, _), (_, other_predicted, other_extra, _) = ways
        seconds = one.ratio * predicted + extra, two.ratio * other_predicted + other_extra
        number, better = (0, one) if seconds[0] <= seconds[1] else (1, two)
        return Forecast(self, ways, nbytes, number, seconds, 0.0, better.count > 0)

    def choose(self, ways: tuple[Way, Way], nbytes: int) -> Forecast:
        """Return the way for a transfer: the better one, or a try of the other."""
        forecast = self.expect(ways, nbytes)
        if self._quiet:
            self._quiet -= 1
            return forecast
        number, seconds = forecast.number, forecast.seconds
        other, least = self.estimates[1 - number], seconds[number]
        price = seconds[1 - number] - least
        way = ways[1 - number]
        hopeless = not other.count and way.predicted + way.extra > _HOPELESS * least
        if other.count < _KNOWN and not hopeless:
            price *= other.count / _KNOWN
        if price < _LEAST_PRICE * least:
            price = _LEAST_PRICE * least
        budget = self._budget
        if budget < price and (hopeless or not other.wanted or budget <= -_OVERDRAFT * least):
            return forecast
        self._budget = min(budget, 2.0 * price) - price  # no more is saved, for times when tries are cheap
        self._quiet = _PATIENCE
        return forecast._replace(number=1 - number, price=price, known=other.count > 0)

    def note(self, forecast: Forecast, seconds: float) -> None:
        """Note that a transfer that was chosen so took these seconds on the GPU's clock, more than 0.0."""
        number, price, least = forecast.number, forecast.price, forecast.seconds[1 - forecast.number]
        way, estimate, other = forecast.ways[number], self.estimates[number], self.estimates[1 - number]
        self._budget += _BUDGET * seconds
        if price:  # a try costs what it took beyond the other way
            loss = min(seconds + way.extra - least, max(price, _MOST_PRICE * least))
            self._budget += price - max(loss, _LEAST_PRICE * least)
            self._quiet = 0
        estimate.note(seconds / way.predicted)
        estimate.seen, estimate.age = other.ratio, 0
        estimate.wanted = estimate.doubt < 1.0 and seconds + way.extra < least  # 2
        other.age += 1
        if other.age <= 2 * _KNOWN:  # still the situation in which the other one was seen, but better known
            other.seen = estimate.ratio
        if other.count:
            other.wanted = (other.wanted and other.doubt < 1.0) or estimate.has_left(other.seen)  # 2, 3
        else:
            other.wanted = estimate.count > 1  # 4
