"""`kvoffload bench`: measurements. Every figure comes with the number of rows whose bytes were wrong.

The benchmarks, each with `add_parser(benches)`:

    transfer      every copy method, by model            transfer.py
    sweep         bytes of a copy x number of copies     transfer.py
    field         concurrent with computation, and       field.py, field_methods.py, field_report.py
                  in both directions at once
    sharded       several GPUs in one process            sharded.py
    parts         loading layer by layer                 layer_groups.py
    interop       CuPy and JAX                           interop.py, framework_data.py, cupy_methods.py, jax_methods.py
    vllm          vLLM's own workers, on the same GPU    vllm.py, vllm_classes.py, vllm_methods.py, vllm_report.py
                  memory; the scheduler's calls
    submit        host time of a call                    submit.py
    cache         bookkeeping of the prefix cache        cache_bookkeeping.py
    pool          a pool that engines share              pool.py, pool_processes.py, pool_table.py
    disk          a disk tier                            disk.py, tier_calls.py
                  and a GPU's transfers                  disk_gpu.py
    remote        tiers over distributed stores          remote.py, tier_calls.py
    fleet         several hosts over one shared store    fleet.py
    plot          figures of saved results               plots.py

What they use, lower files first:

    harness       a device with a clock, poison and an exact comparison, rounds in turns, the contiguous copy
    setup         planes, pool and addresses of a transfer, and the right bytes
    copy_methods  every copy method on one setup: this library's and bare calls; grid_stride is one of the latter
    field_compute, series    a computation, and series of transfers by several methods concurrent with it
    tier_calls    what benchmarks of tiers share
    report, command          the end of a benchmark, the parser

Imported by the command line only: `kvoffload bench` finds this package by its entry point.
"""

__version__ = "0.2.0.dev0"  # kvoffload's
