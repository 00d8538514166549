"""A model with a paged KV cache serves conversations that need more blocks than the device has.

    model.py         the layers of a small transformer, for numpy, CuPy and JAX alike
    jax_layers.py    a layer over a cache of JAX, also for chat_server/
    workload.py      synthetic conversations; which of them has which device blocks
    backend.py       the interface of a framework that computes steps
    arrays.py        the model for CuPy and numpy, which write arrays in place
    offload.py       stores and loads the blocks of conversations
    server.py        serves the batches: which blocks are where, when they are loaded, which step waits for them
    shared_store.py  two processes over one store: one computes and puts blocks there, the other continues
    timeline.py      when computations and transfers ran, and a figure of it
    report.py        runs the modes one after the other, compares the logits bit by bit, prints tokens a second

Run cupy_paged_decode.py or jax_paged_decode.py, which share this code.
"""
