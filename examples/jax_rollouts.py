"""Train a small model in JAX, and let it answer between the steps: the KV cache follows the weights.

Each step of the training takes the answers of the policy as it is now (rollouts), and changes the weights. After that,
no block that the weights before have computed may be found again: `cache.use_weights("policy@7")` sees to that at once,
and the blocks of earlier policies make room for those of this one. Within a step, prompts that begin alike, and later
turns of a conversation, find what the cache has.

Every answer is compared with that of a server without kvoffload, whose device has room for everything.

    python examples/jax_rollouts.py                    # a GPU, or the CPU over the simulated device
    python examples/jax_rollouts.py --adapter          # no training: two weights in turn, whose blocks are found again
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from paged_decode.backend import ONE_ALGORITHM

TASKS, SAMPLES, TURNS = 6, 4, 3
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 64, 24, 16
CONTEXT = 256
RATE = 3e-3


def conversations(engine: Any, step: int) -> list[list[int]]:
    """All turns of all conversations with the weights of now: tokens of prompts and answers. `SAMPLES` conversations
    have a task in common, and all begin alike; answers are drawn at random, always the same for the same step.
    """
    from chat_server.requests import Wanted

    told = np.random.default_rng(step)
    system = told.integers(256, size=SYSTEM_TOKENS).tolist()
    tasks = [system + told.integers(256, size=TURN_TOKENS).tolist() for _ in range(TASKS)]
    talks = [list(task) for task in tasks for _ in range(SAMPLES)]
    for turn in range(TURNS):
        wanted = [Wanted(ANSWER_TOKENS, 1.0, 100 * step + 10 * number + turn) for number in range(len(talks))]
        requests = [engine.submit(talk, each) for talk, each in zip(talks, wanted, strict=True)]
        for talk, request in zip(talks, requests, strict=True):
            talk += list(request)
            if turn < TURNS - 1:
                talk += told.integers(256, size=TURN_TOKENS).tolist()
    return talks


def log_likelihood(size: Any, weights: Any, tokens: Any) -> Any:
    """Of each token after the ones before it: (batch, length - 1), by a forward pass without a cache."""
    import jax
    import jax.numpy as jnp
    from paged_decode import model

    batch, length = tokens.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
    table = np.zeros((batch, length // model.BLOCK_TOKENS), np.int32)
    step = model.Step(tokens, positions, positions, table, np.arange(batch * length, dtype=np.int32))
    rotation, x = model.rotary(jnp, size, step), model.embed(weights, step)
    for layer in weights["layers"]:
        queries, keys, values = model.project(jnp, size, layer, x, rotation)
        blocks = (batch, -1, model.BLOCK_TOKENS, size.kv_heads, size.head_size)
        x = model.attend(jnp, size, layer, x, step, queries, keys.reshape(blocks), values.reshape(blocks))
        x = model.feed_forward(jnp, size, layer, x)
    likely = jax.nn.log_softmax(model.unembed(jnp, size, weights, x, step).reshape(batch, length, -1))
    return jnp.take_along_axis(likely[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


def trained(size: Any, weights: Any, tokens: Any, advantages: Any) -> Any:
    """The weights after a step of REINFORCE: answers that were better than the average become likelier."""
    import jax

    def loss(weights: Any) -> Any:
        return -(log_likelihood(size, weights, tokens) * advantages).mean()

    return jax.tree.map(lambda weight, slope: weight - RATE * slope, weights, jax.grad(loss)(weights))


def reward(talk: Sequence[int]) -> tuple[float, list[bool]]:
    """How much of the answers is tokens below 64; and which tokens of the conversation are of answers."""
    mine = [False] * len(talk)
    for turn in range(TURNS):
        end = SYSTEM_TOKENS + (turn + 1) * TURN_TOKENS + turn * ANSWER_TOKENS
        mine[end : end + ANSWER_TOKENS] = [True] * ANSWER_TOKENS
    answers = [token for token, is_mine in zip(talk, mine, strict=True) if is_mine]
    return sum(token < 64 for token in answers) / len(answers), mine


def padded(talks: Sequence[Sequence[int]]) -> tuple[Any, Any, float]:
    """Tokens, (batch, CONTEXT); advantages of the tokens of answers, (batch, CONTEXT - 1); the mean reward."""
    rewards, masks = zip(*map(reward, talks), strict=True)
    tokens, advantages = np.zeros((len(talks), CONTEXT), np.int32), np.zeros((len(talks), CONTEXT), np.float32)
    spread = np.std(rewards) or 1.0
    for row, (talk, mask) in enumerate(zip(talks, masks, strict=True)):
        tokens[row, : len(talk)] = talk
        advantages[row, : len(mask)] = np.array(mask) * (rewards[row] - np.mean(rewards)) / spread
    return tokens, advantages[:, 1:], float(np.mean(rewards))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of the training (%(default)s)")
    parser.add_argument("--adapter", action="store_true", help="two weights in turn, instead of training")
    chosen = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_ALGORITHM}"
    try:
        import jax
        from chat_server import llama
        from chat_server.engine import Engine, EngineOptions
    except ImportError as error:
        print(f"{error}: pip install 'kvoffload[jax]'", file=sys.stderr)
        return 2
    from paged_decode.model import ModelSize

    size = ModelSize(layers=2, width=64, query_heads=4, kv_heads=2, head_size=16, hidden=128, vocabulary=256)
    weights, other = llama.random_weights(size, "float32"), llama.random_weights(size, "float32", seed=1)
    options = partial(EngineOptions, identity="rollouts", context_tokens=CONTEXT, batch=8, share_generated=True)
    # The device holds a third of what a step needs, the pool all of it, and with adapters that of both.
    blocks = TASKS * SAMPLES * CONTEXT // 16 * (2 if chosen.adapter else 1)
    few = options(device_blocks=8 * CONTEXT // 16 + 1, pool_bytes=blocks * 8192, prefill_tokens_per_second=1.0)
    train = jax.jit(partial(trained, size))
    different, computed = 0, {"kvoffload": 0, "unbounded": 0}
    with (
        Engine(size, weights, few) as engine,
        Engine(size, weights, options(device_blocks=4096, offload=False)) as all_,
    ):
        engines = {"kvoffload": engine, "unbounded": all_}
        for each in engines.values():
            each.start()
        print("step  reward  tokens that differ  prompt tokens computed: kvoffload  unbounded  keys of other weights")
        for step in range(chosen.steps):
            name = ("base", "adapter")[step % 2] if chosen.adapter else f"policy@{step}"
            seed = step // 2 // 2 if chosen.adapter else step  # with adapters, each asks twice for the same
            before = {which: each.counts["computed"] for which, each in engines.items()}
            for each in engines.values():
                each.use_weights(name, other if name == "adapter" else weights)
            talks, expected = (conversations(each, seed) for each in engines.values())
            wrong = sum(
                one != two for pair in zip(talks, expected, strict=True) for one, two in zip(*pair, strict=True)
            )
            new = {which: each.counts["computed"] - before[which] for which, each in engines.items()}
            tokens, advantages, mean = padded(talks)
            if not chosen.adapter:
                weights = train(weights, tokens, advantages)
            different += wrong
            computed = {which: computed[which] + new[which] for which in new}
            old = engine.cache.statistics().of_other_weights if engine.cache is not None else 0
            print(f"{step:4}{mean:8.3f}{wrong:20}{new['kvoffload']:35}{new['unbounded']:11}{old:23}", flush=True)
    ratio = computed["kvoffload"] / computed["unbounded"]
    print(f"{different} tokens differ; prompt tokens computed: {ratio:.3f} of those of an unbounded cache")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
