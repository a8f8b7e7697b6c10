"""transformers' own decoding in PyTorch, with a target's weights, as a peer to measure against.

The peer gets the same ids, the same end tokens and as many threads as the process has cores. A streamer keeps when its
ids arrive, which tells its prefill from its decoding.

PyTorch is loaded when a peer is made, or with a target's tokenizer, for transformers imports it where it is installed.
How its threads wait must be said before that, so this module imports neither, and `require_torch` comes first.
"""

import dataclasses
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax import measure
from eagle_jax.config import ModelConfig, SamplingConfig
from eagle_jax.convert import tensor_for
from eagle_jax.repository import TARGET_TABLE
from eagle_jax.target import Target

LOOKUP_TOKENS = 10  # most ids that prompt look-up proposes at once

SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)
ROPE_FIELDS = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


def require_torch() -> None:
    """Sets how PyTorch's threads wait, unless the environment says or PyTorch is loaded; call it before a target is.

    Raises:
      RuntimeError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError('The peer runs in PyTorch, which is not installed; pip install "eagle_jax[peers]".')
    # OpenMP reads this once, when PyTorch is loaded. Threads that spin while they wait made PyTorch 7 times slower on
    # cores that others used too, and in this process JAX's threads are always there. Set later it would change nothing
    # but what `about` says.
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def torch_model(target: Target) -> Any:
    """A transformers model in PyTorch with the target's weights and dtype, ready to generate.

    Raises:
      ValueError: none of transformers' classes is such a model.
      RuntimeError: PyTorch is not installed.
    """
    require_torch()
    import transformers

    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(measure.cores())
    name, config = peer_config(target.config)
    weights = {}
    for path, leaf in nnx.to_flat_state(nnx.state(target.model)):
        tensor_name, transform = tensor_for(path, TARGET_TABLE)  # transposing is its own inverse
        # NumPy has no bfloat16 that PyTorch knows; float32 holds it exactly.
        weight = transform(np.asarray(leaf[...].astype(jnp.float32)), target.config)
        weights[tensor_name] = torch.from_numpy(np.array(weight)).to(getattr(torch, str(target.dtype)))
    cls: Any = getattr(transformers, name + "ForCausalLM")
    model = cls.from_pretrained(None, config=config, state_dict=weights, dtype=getattr(torch, str(target.dtype)))
    return model.eval().to(device())


def device() -> str:
    """Where PyTorch runs: on the GPU where JAX does."""
    torch: Any = importlib.import_module("torch")
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def about() -> str:
    """Versions, place, and threads with how they were told to wait."""
    import transformers

    torch: Any = importlib.import_module("torch")
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__} on {device()}, "
        f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'not set')}"
    )


def peer_config(config: ModelConfig) -> tuple[str, Any]:
    """The prefix of transformers' classes for a model like this, and its configuration.

    Raises:
      ValueError: there is none.
    """
    import transformers

    fields: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    fields |= {"rope_parameters": rope_parameters(config), "bos_token_id": None, "eos_token_id": None}
    biased = config.attention_bias, config.attention_output_bias
    windows = {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
    }
    dense = config.num_local_experts is None
    if dense and config.qk_norm and len(set(biased)) == 1 and not config.mlp_bias:
        name, own = "Qwen3", windows | {"attention_bias": config.attention_bias}
    elif dense and not config.qk_norm and biased == (True, False) and not config.mlp_bias:
        name, own = "Qwen2", windows
    elif dense and not config.qk_norm and len(set(biased)) == 1 and config.sliding_window is None:
        name, own = "Llama", {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    elif not config.qk_norm and not any(biased) and not config.mlp_bias and config.layer_types is None:
        name, own = "Mistral" if dense else "Mixtral", {"sliding_window": config.sliding_window}
        if not dense:
            own |= {field: getattr(config, field) for field in ("num_local_experts", "num_experts_per_tok")}
    else:
        raise ValueError("transformers has no class for this target's mixture of biases, norms, windows and experts.")
    return name, getattr(transformers, name + "Config")(**fields, **own)


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """As transformers 5 writes them."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling.rope_type not in ROPE_FIELDS:
        raise ValueError(f"The target's rope type is {scaling.rope_type!r}, which transformers does not have.")
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    fields = {"rope_type": scaling.rope_type, "rope_theta": config.rope_theta, "factor": scaling.factor}
    if scaling.rope_type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = original
    own = {name: getattr(scaling, name) for name in ROPE_FIELDS[scaling.rope_type]}
    return fields | {name: value for name, value in own.items() if value is not None}


class Arrivals:
    """A streamer that keeps when ids come and how many; the prompt comes first."""

    def __init__(self, clock: measure.Clock):
        self.clock = clock
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, ids: Any) -> None:
        self.times.append(self.clock())
        self.counts.append(ids.numel())

    def end(self) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformersDecoding:
    """`generate`, plain or with prompt look-up, one prompt at a time.

    Its noise is PyTorch's, so that only greedy texts can be compared.
    """

    target: Target
    model: Any  # `torch_model` of it
    lookup: bool = False
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0
    max_new_tokens: int = 128
    clock: measure.Clock = time.perf_counter

    @property
    def same_text(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def drafting(self) -> str:
        return f"look-up in the text, {LOOKUP_TOKENS} tokens" if self.lookup else ""

    def shape(self, prompts: Sequence[Sequence[int]]) -> Hashable:
        """PyTorch compiles nothing; its first call of all is slow nevertheless."""
        return self.sampling.temperature > 0

    def __call__(self, prompts: Sequence[Sequence[int]]) -> measure.Timed:
        torch: Any = importlib.import_module("torch")
        (prompt,) = prompts
        torch.manual_seed(self.seed)
        arrivals = Arrivals(self.clock)
        begun = self.clock()
        ids = torch.tensor([list(prompt)], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._generation_config(len(prompt)),
            streamer=arrivals,
        )
        new = out[0, len(prompt) :].tolist()
        ended = self.clock()
        first = arrivals.times[1]
        return measure.Timed(
            ids=[new],
            accepted=[count - 1 for count in arrivals.counts[2:]],
            early=arrivals.counts[1],
            prefill=first - begun,
            decoding=ended - first,
        )

    def _generation_config(self, prompt_length: int) -> Any:
        import transformers

        sampling, ends = self.sampling, list(self.target.eos_token_ids)
        options: dict[str, Any] = {
            # This library's decoding ends where the context does.
            "max_new_tokens": min(self.max_new_tokens, self.target.config.context_length - prompt_length),
            "do_sample": sampling.temperature > 0,
            "repetition_penalty": sampling.repetition_penalty,
            "eos_token_id": ends or None,
            "pad_token_id": ends[0] if ends else 0,
        }
        if sampling.temperature > 0:
            fields = ("temperature", "top_k", "top_p", "min_p")
            options |= {name: getattr(sampling, name) for name in fields}
        if self.lookup:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        return transformers.GenerationConfig(**options)
