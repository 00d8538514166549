"""`kvoffload bench`: measurements. Every figure comes with the number of rows whose bytes were wrong.

The benchmarks, each with `add_parser(benches)`:

    transfer      every copy method, by model            transfer.py, latency.py, frameworks.py
    sweep         bytes of a copy x number of copies     sweep.py
    fleet         several hosts over one shared store    fleet_command.py, fleet.py
    field         concurrent with computation, and       field.py, field_setup.py, field_methods.py, field_compute.py,
                  in both directions at once             field_measure.py, field_report.py, field_plots.py
    interference  slow-down of a computation             interference.py, backgrounds.py
    parts         loading layer by layer                 layer_groups.py
    interop       CuPy and JAX                           frameworks_compared.py, cupy_methods.py, jax_methods.py,
                                                         framework_data.py
    vllm          vLLM's own workers, on the same GPU    vllm.py, vllm_classes.py, vllm_setup.py, vllm_methods.py,
                  memory; the scheduler's calls          vllm_measure.py, vllm_report.py, vllm_report.py
    submit        host time of a call                    submit.py, bare_submissions.py
    cache         bookkeeping of the prefix cache        cache_bookkeeping.py
    disk          a disk tier                            disk.py, disk_files.py, disk_rounds.py, disk_costs.py,
                                                         disk_report.py
                  and a GPU's transfers                  disk_gpu.py, disk_gpu_setup.py
                  that fails                             disk_failing.py, disk_faults.py, disk_failing_command.py
    remote        tiers over distributed stores          remote.py, remote_bare.py, remote_rounds.py, remote_costs.py,
                                                         remote_report.py, remote_servers.py
    plot          figures of saved results               plots.py

What they use, lower files first:

    clock, rounds, tools, contiguous, lab    a device with a clock, interleaved rounds, comparison, the contiguous copy
    setup, setup_bytes                       planes, pool and addresses of a transfer, and the right bytes
    baselines, measurements                  other copy methods; every copy method on one setup
    tables, summary, report, command         tables, ratios, the end of a benchmark, the parser

Imported by the command line only: `kvoffload bench` finds this package by its entry point.
"""

__version__ = "0.2.0.dev0"  # kvoffload's
