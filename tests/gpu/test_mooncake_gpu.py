"""Two processes, each with an engine on the GPU, over one Mooncake Store."""

from __future__ import annotations

from pathlib import Path

import pytest
from mooncake_servers import Host, MooncakeServers

pytestmark = [pytest.mark.gpu, pytest.mark.servers, pytest.mark.timeout(300)]


@pytest.mark.usefixtures("only_gpu")
def test_what_one_process_stored_from_the_gpu_another_loads_onto_it(tmp_path: Path) -> None:
    with (
        MooncakeServers(tmp_path, store_bytes=256 << 20) as servers,
        Host(servers, backend="cuda") as first,
        Host(servers, backend="cuda") as second,
    ):
        assert first.ask("store 0 16") == 16
        assert second.ask("load 0 16") == 16  # every byte is compared
        assert second.ask("store 40 48") == 8
        assert first.ask("load 40 50") == 8
        first.kill()
        assert second.ask("load 0 16") == 16  # the memory is that of the store's process
