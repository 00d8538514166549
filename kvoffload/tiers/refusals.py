"""What a full disk or store answers to a put. Such a put is DECLINED: the medium is well, and only has no room.

    who says it                     how
    a file system                   errno ENOSPC, EDQUOT (a quota), EFBIG (a limit on the size of files)
    obstore, over a folder          its text, with the number: "(os error 28)"
    obstore, over the network       HTTP 507; the codes of MinIO and Ceph for a full server and for quotas, which come
                                    with 507, 400 and 403
    Valkey, Redis                   OOM: `maxmemory` is reached, and the policy evicts nothing, or too little
    Mooncake                        -200 no memory, -1602 the quota of its file system, -1700 the quota of a tenant

All other errors are FAILED, refusals to write included: EROFS, EACCES and EPERM; HTTP 401, 403 and 405; READONLY (a
replica), NOPERM (the login) and MISCONF (the server cannot save) of Valkey; -1603 of Mooncake. A cache then gives the
tier no puts for a while, and goes on reading: see `TierBelow`.
"""

from __future__ import annotations

import errno
import re

from kvoffload.cache.tiering.tier import Outcome

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MOONCAKE_NO_ROOM = frozenset({-200, -1602, -1700})
_TEXTS = {  # of exceptions without a number, by the package that has their class
    "obstore": re.compile(
        rf"\(os error ({'|'.join(map(str, sorted(NO_ROOM)))})\)|\b507 Insufficient Storage\b"
        r"|<Code>(XMinioStorageFull|XMinioAdminBucketQuotaExceeded|QuotaExceeded)</Code>"
    ),
    "glide_shared": re.compile(r"\bOOM:? command not allowed"),
}


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a put that raised this error: DECLINED if there was no room, else FAILED."""
    text = _TEXTS.get(type(error).__module__.partition(".")[0])
    full = error.errno in NO_ROOM if isinstance(error, OSError) else text is not None and text.search(str(error))
    return Outcome.DECLINED if full else Outcome.FAILED
