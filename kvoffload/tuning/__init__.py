"""What transfers cost on a machine: measured by `kvoffload.calibration`, kept, and used by
`kvoffload.copiers.selection`.

    CopyMethod, Shape   the method that copies a transfer, and the transfer's size     costs.py
    Profile             seconds and slow-downs of every copy method on a machine       profile.py, costs_json.py
    load_profile        the measured profile, or a default                             profile.py, h200_pcie5.json
    fit                 costs from timed transfers                                     fitting.py

Nothing here touches a device.
"""

from kvoffload.tuning.costs import (
    CONCURRENT_COMPUTE,
    FIELD,
    CopierChoice,
    CopierName,
    CopyMethod,
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
    "CONCURRENT_COMPUTE", "FIELD", "CopierChoice", "CopierName", "CopyMethod", "Deviation", "HostCosts", "Profile",
    "ProfileKey", "Shape", "Situation", "check_profile", "default_profile", "key_of", "load_profile", "parse",
    "profile_for", "profile_path", "render", "save_profile",
]  # fmt: skip
