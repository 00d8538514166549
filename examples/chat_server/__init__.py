"""A chat server: SmolLM2 in JAX, continuous batching, an OpenAI-compatible endpoint, and kvoffload inside.

Read it from below:

    gguf.py       reads the file with weights and vocabulary
    tokenizer.py  text to tokens and back, the chat template
    llama.py      the model, on the layers that jax_paged_decode.py has, too: ../paged_decode
    blocks.py     the prefix cache on the device
    requests.py   a prompt and its answer
    engine.py     batches, fetches, stores: all of kvoffload is here
    server.py     HTTP
    __main__.py   the command: python -m chat_server --help
"""
