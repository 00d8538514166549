"""Profiles: the costs of every copier on a machine, measured there or shipped, kept as JSON.

A profile belongs to a GPU's name, the driver, the link and the bindings; `kvoffload tune` measures one and keeps it in
the cache folder. Without one there are two defaults: for H200-class GPUs on PCIe Gen5 x16, measured; and for every
other GPU, derived from the first (see `limited_to`). `kvoffload.tuning.costs` computes times from it,
`kvoffload.copiers.selection` chooses a copier by them. Nothing here touches a device.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload.internal import cachefiles
from kvoffload.internal.checks import shown
from kvoffload.internal.hostinfo import generation_of
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning.costs import (
    FIELD,
    CopierName,
    Costs,
    Curve,
    FlatCosts,
    HostCosts,
    Shape,
    Situation,
    driver_copies,
)
from kvoffload.tuning.costs_json import (
    number,
    parse_copier,
    parse_costs,
    parse_host,
    pretty,
    render_costs,
    render_host,
    short,
)

if TYPE_CHECKING:
    from kvoffload.device.device import Device

FORMAT = 3
_GEN4_X16 = 25e9  # bytes per second of payload that PCIe Gen4 x16 reaches, of 31.5 on the wire
_H200_CLASS = ("H100", "H200", "H800", "GH200", "B100", "B200", "B300")


class ProfileKey(NamedTuple):
    """The machine that a profile was measured on. It is valid only where all of these are equal.

    Attributes:
        gpu: its name, such as "NVIDIA H200".
        driver: the CUDA version that the driver supports, such as "13.0".
        bindings: the version of cuda-bindings, such as "13.3".
        link_generation: the highest PCIe generation that the GPU supports, since an idle link may show a lower one.
            None if Linux does not say.
        link_width: lanes in use. None if Linux does not say.
    """

    gpu: str
    driver: str
    link_generation: int | None
    link_width: int | None
    bindings: str


class Deviation(NamedTuple):
    """How far expected times are off, `|expected / measured - 1|`: median and worst of so many `transfers`."""

    median: float
    worst: float
    transfers: int


@dataclass(frozen=True, eq=False)
class Profile:
    """What transfers cost on a machine. Two profiles are equal only if they are the same object.

    Attributes:
        key: the machine that it was measured on; None for a default.
        source: where the figures come from, as text to show.
        simulated: True if a simulated device was measured: the figures mean nothing for a GPU.
        costs: by direction, on an idle GPU; `seconds` computes times from it.
        situations: the same by situation, from fewer transfers. Empty if unknown, as are the following.
        host: by copier, host seconds for which a submission keeps its caller.
        around: by copier, how much longer a transfer takes for its caller (from the call until it is seen to have
            landed) than on the GPU's clock.
        errors: by copier, how far expected times are off, for transfers that `costs` were not fitted to.
        codec: by situation and direction, how many times as fast as without it a transfer by "pack" is with the codec
            "bf16-12", its blocks the same.
    """

    key: ProfileKey | None
    source: str
    costs: dict[Direction, Costs]
    errors: dict[str, Deviation] = field(default_factory=dict)
    situations: dict[Situation, dict[Direction, Costs]] = field(default_factory=dict)
    host: dict[str, HostCosts] = field(default_factory=dict)
    around: dict[str, HostCosts] = field(default_factory=dict)
    codec: dict[Situation, dict[Direction, float]] = field(default_factory=dict)
    simulated: bool = False

    def seconds(self, copier: CopierName, shape: Shape, situation: Situation = Situation.IDLE) -> float:
        """Return the expected seconds of a transfer of this size by this copier, on the GPU's clock; infinity if it was
        not measured.

        If the situation was not measured, the seconds are those on an idle GPU.
        """
        return self.situations.get(situation, self.costs)[shape.direction].seconds(copier, shape)

    def host_seconds(self, copier: CopierName, shape: Shape) -> float:
        """Return how many seconds a submission is expected to keep its caller; 0.0 if unknown."""
        return _host_seconds(self.host, copier, shape)

    def seconds_around(self, copier: CopierName, shape: Shape) -> float:
        """Return the expected seconds beyond `seconds` for the caller of a transfer, `host_seconds` included; 0.0 if
        unknown.

        The caller's time goes from the call until it sees that the transfer has landed.
        """
        return _host_seconds(self.around, copier, shape)

    def limited_to(self, link: float, source: str) -> Profile:
        """Return a profile for the same GPU behind a slower link, of `link` bytes per second. `source` says where it
        comes from. It has no key, so it cannot be saved.

        A transfer that would be faster than the link allows takes what its bytes need there, plus its fixed cost.
        """

        def limit(costs: dict[Direction, Costs]) -> dict[Direction, Costs]:
            return {direction: _limit(each, link) for direction, each in costs.items()}

        limited = {situation: limit(costs) for situation, costs in self.situations.items()}
        return replace(self, key=None, source=source, costs=limit(self.costs), situations=limited, errors={}, codec={})

    def __repr__(self) -> str:
        return f"Profile({self.source!r})"


def _host_seconds(found: dict[str, HostCosts], copier: CopierName, shape: Shape) -> float:
    costs = found.get(copier)
    return 0.0 if costs is None else costs.fixed + costs.copy * driver_copies(copier, shape)


def _limit(costs: Costs, link: float) -> Costs:
    strided = costs.strided
    assert strided is not None
    limited = {}
    for name, flat in costs.flat.items():
        curves = []
        for nbytes, counts, seconds in flat.curves:
            least = [strided.fixed + count * nbytes / link for count in counts]
            curves.append(Curve(nbytes, counts, tuple(map(max, seconds, least))))
        limited[name] = FlatCosts(tuple(curves))
    rows = map(max, strided.row_seconds, [nbytes / link for nbytes in strided.row_bytes])
    return replace(costs, link=min(costs.link, link), strided=replace(strided, row_seconds=tuple(rows)), flat=limited)


# the profile of a device ----------------------------------------------------------------------------------------------


def key_of(device: Device) -> ProfileKey:
    """Return the key for this device's profile, whether or not one is saved. Simulated devices have one, too."""
    capabilities, pci = device.capabilities, device.pci
    return ProfileKey(
        gpu=device.name,
        driver=".".join(map(str, capabilities.driver_version)),
        link_generation=generation_of(pci.max_link_speed),
        link_width=pci.link_width,
        bindings=".".join(map(str, capabilities.bindings_version)),
    )


def profile_for(device: Device) -> Profile:
    """Return the profile that was measured and saved for a device, or a default. A simulated device gets the default
    for unknown GPUs.
    """
    return default_profile(None) if device.simulated else load_profile(key_of(device))


def check_profile(profile: object) -> Profile:
    """Return `profile` if it is a `Profile`.

    Raises:
        TypeError: it is not; the message says where profiles come from.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            "profile must be a kvoffload.tuning.Profile, or None for the device's own; "
            f"kvoffload.tuning.parse(path.read_bytes()) reads one from a file; got {shown(profile)}"
        )
    return profile


def load_profile(key: ProfileKey | None) -> Profile:
    """Return the measured profile for `key` from `profile_path(key)`, or a default. With None, the default for unknown
    GPUs.

    A file that cannot be used is ignored, with one KVOffloadWarning per process.
    """
    if key is None:
        return default_profile(None)
    path = profile_path(key)
    content = cachefiles.read(path)
    if content is None:
        return default_profile(key)
    try:
        profile = parse(content)
        if profile.key != key or profile.simulated:
            raise ValueError(f"it was measured on {profile.key}, this is {key}")
    except ValueError as error:
        default = default_profile(key)
        cachefiles.warn_once(
            f"the profile {path} is ignored ({error}), and the {default.source} is used; `kvoffload tune` measures a "
            "new one",
            cause="unusable profile",
        )
        return default
    return profile


def default_profile(key: ProfileKey | None) -> Profile:
    """Return the profile to use until one is measured: one for H200-class GPUs on PCIe Gen5 x16, one for all others and
    for None. A link that Linux does not report counts as PCIe Gen5 x16.
    """
    of_h200, of_unknown = _defaults()
    if key is None or not any(name in key.gpu for name in _H200_CLASS):
        return of_unknown
    # virtual machines often do not show the link; then the name decides
    fast_link = (key.link_generation or 5) >= 5 and (key.link_width or 16) >= 16
    return of_h200 if fast_link else of_unknown


@cache
def _defaults() -> tuple[Profile, Profile]:
    """Return the profile for H200-class GPUs, and that for unknown ones."""
    measured = parse(Path(__file__).with_name("h200_pcie5.json").read_bytes())
    source = f"default for H200-class GPUs on PCIe Gen5 x16: {measured.source}"
    h200 = replace(measured, key=None, source=source)
    source = "default for an unknown GPU: an H200's costs, but no copy method faster than PCIe Gen4 x16"
    return h200, h200.limited_to(_GEN4_X16, source)


# files ----------------------------------------------------------------------------------------------------------------


def profile_path(key: ProfileKey) -> Path:
    """Return the file that `save_profile` writes for this key and `load_profile` reads. It need not exist yet.

    It is in the folder `profiles` below the one that the environment variable KVOFFLOAD_CACHE names, or else below
    `kvoffload` in the user's cache folder.
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cachefiles.cache_folder() / "profiles" / f"{digest[:32]}.json"


def save_profile(profile: Profile) -> Path | None:
    """Write a measured profile to the file from which `load_profile` reads its `key`, in place of an older one. Returns
    the path; None, with a KVOffloadWarning, if it cannot be written.

    Raises:
        ValueError: its `key` is None: it is a default.
    """
    if profile.key is None:
        raise ValueError("profile must be a measured one, with a key: defaults come with the package")
    path = profile_path(profile.key)
    return path if cachefiles.write(path, render(profile)) else None


def render(profile: Profile) -> bytes:
    """Return the profile as JSON, for `parse`: times in microseconds, the link in GB/s, all numbers rounded."""
    fields = {
        "format": FORMAT,
        "source": profile.source,
        "simulated": profile.simulated,
        "key": None if profile.key is None else profile.key._asdict(),
        "costs": {str(direction): render_costs(costs) for direction, costs in profile.costs.items()},
        "situations": {
            str(situation): {str(direction): render_costs(costs) for direction, costs in found.items()}
            for situation, found in profile.situations.items()
        },
        "host": {name: render_host(costs) for name, costs in profile.host.items()},
        "around": {name: render_host(costs) for name, costs in profile.around.items()},
        "errors": {
            name: [short(each.median), short(each.worst), each.transfers] for name, each in profile.errors.items()
        },
    }
    if profile.codec:
        codec = profile.codec.items()
        fields["codec"] = {each: {name: short(times) for name, times in found.items()} for each, found in codec}
    return (pretty(fields) + "\n").encode()


def parse(content: bytes) -> Profile:
    """Return the profile that `render` wrote.

    Raises:
        ValueError: `content` is not a profile, or has another format; the message says why.
    """
    try:
        fields = json.loads(content)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}, this version reads {FORMAT}")
        return Profile(
            key=None if fields["key"] is None else ProfileKey(**fields["key"]),
            source=str(fields["source"]),
            simulated=bool(fields["simulated"]),
            costs=_parse_directions(fields["costs"]),
            situations={
                each: _parse_directions(fields["situations"][each]) for each in FIELD if each in fields["situations"]
            },
            host={parse_copier(name): parse_host(each) for name, each in fields["host"].items()},
            around={parse_copier(name): parse_host(each) for name, each in fields["around"].items()},
            errors={
                str(name): Deviation(number(median), number(worst), int(number(transfers)))
                for name, (median, worst, transfers) in fields["errors"].items()
            },
            codec={
                Situation(situation): {Direction(direction): number(each) for direction, each in found.items()}
                for situation, found in fields.get("codec", {}).items()
            },
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"it is not a profile: {error!r}") from error
    except RecursionError as error:
        raise ValueError("it is not a profile: it is nested too deeply") from error
    except ValueError as error:  # of json, too
        raise ValueError(f"it cannot be read: {error}") from error


def _parse_directions(fields: dict[str, Any]) -> dict[Direction, Costs]:
    return {direction: parse_costs(fields[str(direction)]) for direction in Direction}
