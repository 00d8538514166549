"""The library's one logger, "kvoffload". Quiet unless the program gives it, or the root logger, a handler and a level.

    INFO      a device was opened, a pool pinned, a profile chosen; an engine is closed with transfers in flight
    WARNING   a transfer failed; a measured profile is ignored; the driver lacks what fast copies need
    ERROR     a CUDA context is lost; code of the caller's raised: a done callback, a tracer

Nothing is logged for a transfer that ends well, and nothing while the engine's lock is held.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("kvoffload")
LOGGER.addHandler(logging.NullHandler())
