"""An eSurge engine with a Llama of random weights, without a network: for the measurement and the tests beside it.

EasyDeL 0.3.0 imports packages that serving does not use, patches Hugging Face's models, sets flags that newer XLAs
refuse, and has a class that newer flax cannot hash. `import_easydel` works around these, `make_engine` uses it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

_UNUSED = ("datasets", "gcsfs", "google", "googleapiclient", "grafanalib", "grain", "ray", "tensorstore", "wandb")
_TORCH = ("torch", "torch_xla", "torchaudio", "torchvision")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_LL128_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_PROTO")


@dataclass(frozen=True)
class Sizes:
    """Of the model and its KV cache.

    Attributes:
        token_steps: how many tokens a step may have; each is compiled, and a step is padded up to the next.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocabulary: int = 128
    page_tokens: int = 8
    pages: int = 24
    longest: int = 128
    requests: int = 4
    token_steps: tuple[int, ...] = (32,)
    dtype: str = "float32"

    @property
    def page_bytes(self) -> int:
        """Of a page in all layers."""
        return (
            2 * self.layers * self.page_tokens * self.kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)
        )


def make_engine(sizes: Sizes, *, seed: int = 0) -> Any:
    """An eSurge that computes on JAX's default device. Its loop is stopped: `run_step` or `engine.initiate()`."""
    import_easydel()
    import jax
    import jax.numpy as jnp
    from easydel.inference.esurge import eSurge
    from easydel.inference.esurge.runners.model_runner import eSurgeRunner
    from easydel.modules.llama import LlamaConfig, LlamaForCausalLM
    from flax import nnx

    if jax.default_backend() == "cpu":
        _let_unified_attention_run_on_the_cpu()
    dtype = jnp.dtype(sizes.dtype)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.longest,
        attn_mechanism="unified_attention",
        gradient_checkpointing="",
        bos_token_id=0,
        eos_token_id=sizes.vocabulary - 1,
    )
    config.add_basic_configurations(
        attn_mechanism="unified_attention",
        attn_dtype=dtype,
        kvdtype=dtype,
        freq_max_position_embeddings=sizes.longest,
        mask_max_position_embeddings=sizes.longest,
    )
    # eSurge sizes its cache by the free memory of the device, and steps by a rule of its own.
    import easydel.caching.unified_attention.cache as caching

    caching.per_device_hbm_budget_bytes = lambda *_, **__: sizes.pages * sizes.page_bytes
    eSurgeRunner._get_token_paddings = staticmethod(lambda *_, **__: list(sizes.token_steps))
    model = LlamaForCausalLM(config=config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(seed))
    engine = eSurge(
        model=model,
        processor=_make_tokenizer(sizes.vocabulary),
        dtype=dtype,
        max_model_len=sizes.longest,
        max_num_seqs=sizes.requests,
        max_num_seq_buckets=[sizes.requests],
        max_num_batched_tokens=sizes.token_steps[-1],
        min_input_pad=sizes.requests,
        page_size=sizes.page_tokens,
        hbm_utilization=0.5,
        async_scheduling=False,
        overlap_execution=False,
        enable_prefix_caching=True,
        compile_runner=True,
        use_aot_forward=True,
        silent_mode=True,
    )
    loop = engine._scheduler_thread
    engine.terminate()  # holds the lock that the loop waits for: it gives up after 5 s, and the loop makes a last round
    if loop is not None:
        loop.join()
    return engine


def new_request(name: str, tokens: Sequence[int], new_tokens: int) -> Any:
    """A request that takes the most probable token each time."""
    from easydel.inference.esurge.request import EngineRequest
    from easydel.inference.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=list(tokens), sampling_params=sampling, eos_token_id=None)


def run_step(engine: Any) -> Any:
    """One round of the loop that `engine.initiate()` runs in a thread. Returns what was scheduled."""
    output = engine.scheduler.schedule()
    engine.scheduler.update_from_output(output, engine.runner.execute_model(output))
    return output


def import_easydel() -> None:
    """Import EasyDeL, once. What it changes in the process stays so."""
    if "easydel" in sys.modules:
        return
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "ENABLE_DISTRIBUTED_INIT": "0",
        "ESURGE_WORKER_TRUST_REMOTE_CODE": "0",
    }
    sys.meta_path.insert(0, _Stubs())
    # EasyDeL patches torch's models where it finds torch, and Hugging Face imports it: in this process there is none.
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name in _TORCH else find(name, *more)
    with _flags_kept():
        import easydel
    # `easydel.modules` imports every model, and some of them patch Hugging Face's classes: only the one that is needed.
    modules = ModuleType("easydel.modules")
    modules.__path__ = [os.path.join(os.path.dirname(easydel.__file__), "modules")]
    modules.__spec__ = importlib.machinery.ModuleSpec("easydel.modules", None, is_package=True)
    sys.modules["easydel.modules"] = modules
    with _flags_kept():
        import easydel.inference.esurge
        import easydel.modules.llama
    from easydel.operations._operation_meta import OperationMetadata

    OperationMetadata.__hash__ = lambda self: id(self)
    OperationMetadata.__eq__ = lambda self, other: self is other


@contextmanager
def _flags_kept() -> Iterator[None]:
    """Keep variables that EasyDeL sets on import from XLA, which may not know their flags, and from NCCL."""
    before = {name: os.environ.get(name) for name in _FLAGS}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class _Stub(ModuleType):
    """A package that is not installed: any name in it is a class that accepts everything."""

    def __getattr__(self, name: str) -> Any:
        if name == "is_initialized":
            return lambda *_, **__: False
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnythingMeta(name, (_Anything,), {})


class _AnythingMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__


class _Anything(metaclass=_AnythingMeta):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self  # as a decorator

    def __getattr__(self, name: str) -> Any:
        return _Anything()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is not installed of `_UNUSED`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002
        if fullname.partition(".")[0] not in _UNUSED:
            return None
        sys.meta_path.remove(self)
        try:
            if importlib.util.find_spec(fullname) is not None:
                return None
        except ImportError:
            pass
        finally:
            sys.meta_path.insert(0, self)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        stub = _Stub(spec.name)
        stub.__path__ = []
        return stub

    def exec_module(self, module: ModuleType) -> None:
        pass


def _let_unified_attention_run_on_the_cpu() -> None:
    """EasyDeL refuses it there, though ejkernel has it in plain XLA."""
    import easydel.operations.kernels.unified_attention as kernels
    import jax
    from easydel.infra.mixins import generation

    if isinstance(kernels.jax, SimpleNamespace):
        return
    plain = kernels.unified_attention
    kernels.unified_attention = lambda *args, **options: plain(*args, **options | {"platform": "xla"})
    kernels.jax = SimpleNamespace(**vars(jax) | {"default_backend": lambda: "gpu"})
    generation._resolve_backend_for_esurge = lambda *_, **__: "gpu"


def _make_tokenizer(vocabulary: int) -> str:
    """The folder of a tokenizer with the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary - 2)}
    words |= {"<unk>": vocabulary - 2, "</s>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tempfile.mkdtemp(prefix="esurge-tokenizer-")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return folder
