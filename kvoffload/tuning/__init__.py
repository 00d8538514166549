"""What transfers cost on a machine: measured by `kvoffload.calibration`, kept, and used by
`kvoffload.copiers.selection`.

    CopyMethod, Shape     how a transfer is carried, and what it looks like      costs.py
    Profile          seconds and slow-downs of every way, for a machine     profile.py, costs.py
    load_profile     the measured one, or a default                         profile.py, h200_pcie5.json
    fitting          from timed transfers to costs                          fitting.py

Pure: no device is seen here.
"""

from kvoffload.tuning.costs import CopyMethod, Shape
from kvoffload.tuning.profile import (
    Deviation,
    Profile,
    ProfileKey,
    default_profile,
    key_of,
    load_profile,
    parse,
    profile_for,
    profile_path,
    render,
    save_profile,
)

__all__ = [
    "CopyMethod",
    "Deviation",
    "Profile",
    "ProfileKey",
    "Shape",
    "default_profile",
    "key_of",
    "load_profile",
    "parse",
    "profile_for",
    "profile_path",
    "render",
    "save_profile",
]
