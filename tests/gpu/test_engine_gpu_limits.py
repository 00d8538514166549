# queues


@pytest.mark.parametrize("copier", COPIERS)
def test_pitfall_06_submission_time_stays_bounded(gpu_device: kvoffload.Device, copier: str) -> None:
    """2000 transfers of 3 blocks behind a gate. A full driver queue would hold the submission up for good."""
    with rig(gpu_device, planes=4, block_bytes=4 * KIB, num_blocks=64, num_slots=64) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        rng = np.random.default_rng(3)
        opener = threading.Timer(60, gate.open)  # so that a failure is a failure and no hang
        opener.start()
        seconds = []
        for number in range(2000):
            ids = rng.choice(64, 3, replace=False)
            call = bench.engine.load if number % 2 else bench.engine.store
            began = time.perf_counter()
            call(ids, ids, after=held if number < 2 else NO_WAIT, copier=copier)
            seconds.append(time.perf_counter() - began)
        in_flight = bench.engine.statistics().in_flight
        opener.cancel()
        gate.open()
        bench.engine.drain(60)
        micro = [each * 1e6 for each in seconds]
        late = averages.median(micro[-200:])
        print(f"{copier}: median {averages.median(micro):.0f} us, last 200 {late:.0f} us, max {max(micro):.0f} us")
        assert in_flight == 2000
        assert averages.median(seconds) < 500e-6
        assert averages.median(seconds[-200:]) < 4 * averages.median(seconds[100:300])
        assert max(seconds) < 0.1
        whole(bench.engine)


# leaks


def _host_state() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def test_pitfall_30_ten_thousand_transfers_leak_nothing(gpu_device: kvoffload.Device) -> None:
    with rig(gpu_device, planes=4, block_bytes=4 * KIB, num_blocks=64, num_slots=64) as bench:

        def transfers(count: int) -> None:
            rng = np.random.default_rng(5)
            for number in range(count):
                ids = rng.choice(64, 3, replace=False)
                (bench.engine.store if number % 2 else bench.engine.load)(
                    ids, ids, after=NO_WAIT, copier=COPIERS[number % 3]
                )
                if number % 100 == 0:
                    bench.engine.drain(30)
                    bench.engine.poll()
            bench.engine.drain(30)
            bench.engine.poll()

        def gpu_bytes() -> int:
            with gpu_device.current():
                return gpu_device.driver.free_and_total_bytes()[0]

        transfers(2000)
        gc.collect()
        before = (gpu_bytes(), _host_state(), bench.engine.statistics())
        transfers(10_000)
        gc.collect()
        after = (gpu_bytes(), _host_state(), bench.engine.statistics())
        assert before[0] - after[0] <= 4 << 20, "GPU memory"
        assert after[1] == before[1], "file descriptors and threads"
        assert after[2].streams - before[2].streams <= 2
        assert after[2].events - before[2].events <= 100
        whole(bench.engine)


def test_engines_and_buffers_give_their_memory_back(gpu_device: kvoffload.Device) -> None:
    def free_bytes() -> int:
        with gpu_device.current():
            return gpu_device.driver.free_and_total_bytes()[0]

    def use() -> None:
        with rig(gpu_device, planes=4, block_bytes=1 << 20, num_blocks=16, num_slots=16) as bench:
            bench.engine.store(range(16), range(16)).wait(30)
        del bench
        gc.collect()
        gpu_device.reclaim()

    use()
    before = free_bytes()
    for _ in range(5):
        use()
    assert before - free_bytes() <= 4 << 20


# contexts and threads


def test_pitfall_36_any_thread_and_any_context(bench: Rig) -> None:
    from cuda.bindings import driver as cuda

    def created() -> Any:
        arguments = (0, 0) if bench.device.driver.bindings_version < (13, 0) else (None, 0, 0)
        status, context = cuda.cuCtxCreate(*arguments)
        assert not status, status
        return context

    results: list[Any] = []

    def work(own: bool) -> None:
        try:
            context: Any = created() if own else None
            bench.engine.store([1], [1], after=NO_WAIT).wait(30)
            bench.engine.load([1], [2], after=PER_THREAD).wait(30)
            bench.engine.poll()
            current = int(cuda.cuCtxGetCurrent()[1])
            results.append(current == (int(context) if own else 0))
            if own:
                cuda.cuCtxDestroy(context)
        except BaseException as error:
            results.append(error)

    for own in (False, True):
        thread = threading.Thread(target=work, args=(own,))
        thread.start()
        thread.join()
    assert results == [True, True]
    assert all_are(bench.slot(1), 2)
    assert all_are(bench.block(2), 2)


def test_four_threads_submit_and_wait(bench: Rig) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = np.random.default_rng(number)
            mine = range(8 * number, 8 * number + 8)
            for _ in range(50):
                blocks, slots = rng.permutation(mine)[:4], rng.permutation(mine)[:4]
                store = bench.engine.store(blocks, slots, after=NO_WAIT)
                load = bench.engine.load(slots, blocks, after=NO_WAIT)
                store.wait(60)
                load.wait(60)
                for block, slot in zip(blocks, slots, strict=True):
                    assert all_are(bench.slot(int(slot)), int(block) + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# a real geometry


@pytest.fixture(scope="module")
def llama_bytes() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes of 64 planes x 128 blocks x 32 KiB: 256 MiB."""
    return np.random.default_rng(1).integers(0, 256, (64, 128, 32 * KIB), dtype=np.uint8)


@pytest.mark.parametrize("copier", [*COPIERS, None])
def test_llama_blocks_there_and_back(gpu_device: kvoffload.Device, llama_bytes: Any, copier: str | None) -> None:
    planes = gpu_device.allocate_planes(64, block_bytes=32 * KIB, num_blocks=128)
    slab: Any = planes[0].owner
    slab.copy_from(llama_bytes)
    rng = np.random.default_rng(2)
    stored, loaded, slots = rng.permutation(128)[:32], rng.permutation(128)[:32], rng.permutation(48)[:32]
    with OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=48) as engine:
        engine.store(stored, slots, copier=copier).wait(60)
        assert (engine.slots[slots].reshape(32, 64, 32 * KIB) == llama_bytes[:, stored].transpose(1, 0, 2)).all()
        engine.load(slots, loaded, copier=copier).wait(60)
        expected = llama_bytes.copy()
        expected[:, loaded] = llama_bytes[:, stored]
        assert (slab.to_numpy().reshape(expected.shape) == expected).all()


def _median_seconds(call: Callable[[], kvoffload.Job], count: int = 100) -> float:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        job = call()
        seconds.append(time.perf_counter() - began)
        job.wait(30)
    return averages.median(seconds)


@pytest.mark.parametrize(("planes", "blocks", "limit"), [(64, 32, 250e-6), (160, 512, 1e-3)])
def test_submissions_return_at_once(gpu_device: kvoffload.Device, planes: int, blocks: int, limit: float) -> None:
    made = gpu_device.allocate_planes(planes, block_bytes=8 * KIB, num_blocks=1024)
    order = np.random.default_rng(4).permutation(1024)[:blocks]
    with OffloadEngine(KVLayout([made]), device=gpu_device, num_slots=blocks) as engine:
        slots = np.arange(blocks)
        _median_seconds(lambda: engine.store(order, slots), 10)
        store = _median_seconds(lambda: engine.store(order, slots))
        load = _median_seconds(lambda: engine.load(slots, order))
        print(f"{blocks} blocks x {planes} planes: store {store * 1e6:.0f} us, load {load * 1e6:.0f} us")
        assert store <= limit
        assert load <= limit


# the process


def test_pitfall_31_a_process_that_ends_with_work_in_flight(gpu_device: kvoffload.Device) -> None:
    import subprocess
    import sys

    assert not gpu_device.closed
    script = """
import kvoffload
device = kvoffload.open_device()
planes = device.allocate_planes(32, block_bytes=1 << 20, num_blocks=32)
engine = kvoffload.OffloadEngine(kvoffload.KVLayout([planes]), device=device, num_slots=32)
for _ in range(8):
    engine.store(range(32), range(32))
    engine.load(range(32), range(32))
"""
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
