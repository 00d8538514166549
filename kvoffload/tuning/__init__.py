"""What transfers cost on a machine: measured by `kvoffload.calibration`, kept, and used by
`kvoffload.copiers.selection`.

    Shape         the size of a transfer                       costs.py
    Profile       seconds of every copier on a machine         profile.py, costs_json.py
    load_profile  the measured profile, or a default           profile.py, h200_pcie5.json
    fit           costs from timed transfers                   fitting.py

Nothing here touches a device.
"""

from kvoffload.tuning.costs import (
    CONCURRENT_COMPUTE,
    COPIERS,
    FIELD,
    CopierName,
    HostCosts,
    Shape,
    Situation,
)
from kvoffload.tuning.profile import (
    Deviation,
    Profile,
    ProfileKey,
    check_profile,
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
    "CONCURRENT_COMPUTE", "COPIERS", "FIELD", "CopierName", "Deviation", "HostCosts", "Profile", "ProfileKey", "Shape",
    "Situation", "check_profile", "default_profile", "key_of", "load_profile", "parse", "profile_for", "profile_path",
    "render", "save_profile",
]  # fmt: skip
