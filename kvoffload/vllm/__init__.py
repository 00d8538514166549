"""kvoffload inside vLLM: an out-of-tree OffloadingSpec, and a connector that survives failed transfers, too.

    --kv-transfer-config '{"kv_connector": "KVOffloadConnector", "kv_connector_module_path": "kvoffload.vllm",
                           "kv_role": "kv_both", "kv_connector_extra_config": {
                               "spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.vllm",
                               "cpu_bytes_to_use": 68719476736}}'

Nothing else in the package imports it; it imports vLLM, and for the current stream torch. See docs/guides/vllm.md.
"""

from kvoffload.vllm import releases as _releases

_releases.check_release()

from kvoffload.vllm.connector import KVOffloadConnector  # noqa: E402
from kvoffload.vllm.manager import KVOffloadManager  # noqa: E402
from kvoffload.vllm.options import Options  # noqa: E402
from kvoffload.vllm.spec import KVOffloadSpec  # noqa: E402
from kvoffload.vllm.worker import KVOffloadWorker  # noqa: E402

__all__ = ["KVOffloadConnector", "KVOffloadManager", "KVOffloadSpec", "KVOffloadWorker", "Options"]
