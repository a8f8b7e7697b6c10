"""Options as frozen, hashable, keyword-only dataclasses: what is static when a program is compiled.

Each class refuses senseless values when it is made, so that a bad option is found before any model is loaded.
"""

import dataclasses
from typing import Literal, get_args


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _require(value > 0, f"{type(owner).__name__}.{name} is {value}; it must be at least 1.")


ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "factors")
FULL, SLIDING = "full_attention", "sliding_attention"  # layer_types
Inputs = Literal["token", "feature", "feature+token", "feature+shifted_token"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed for texts longer than those of the pretraining; see `rope.py`.

    `original_max_position_embeddings=None` means the model's `max_position_embeddings`. "factors" divides each
    frequency by a number of its own, as GGUF files state it.
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None follows from the factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # factors

    def __post_init__(self):
        _require(
            self.rope_type in ROPE_TYPES,
            f"The rope type is {self.rope_type!r}; supported are 'default', {', '.join(map(repr, ROPE_TYPES))}.",
        )
        _require(0 < self.factor < float("inf"), f"RopeScaling.factor is {self.factor}; it must be positive.")
        original = self.original_max_position_embeddings
        _require(
            original is None or original > 0,
            f"RopeScaling.original_max_position_embeddings is {original}; it must be at least 1.",
        )
        low, high = self.low_freq_factor, self.high_freq_factor
        _require(
            0 < low < high,
            f"RopeScaling has low_freq_factor {low} and high_freq_factor {high}; the second must be more.",
        )
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            _require(
                value is None or 0 < value < float("inf"),
                f"RopeScaling.{name} is {value}; it must be positive and finite.",
            )
        object.__setattr__(self, "factors", tuple(self.factors))
        _require(
            all(0 < factor < float("inf") for factor in self.factors), "RopeScaling.factors must be positive numbers."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family, under Hugging Face's field names.

    `num_key_value_heads=None` means one per attention head; `head_dim=None` means hidden_size / num_attention_heads.
    `layer_types` says for each layer whether its attention is "full_attention" or a "sliding_attention" over the last
    `sliding_window` tokens; None is the second for all layers where there is a window, else the first.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False  # of the projections to queries, keys and values
    attention_output_bias: bool | None = None  # None: as attention_bias, which is Llama's way; Qwen2 has none
    qk_norm: bool = False  # RMSNorm over each query's and key's head dimension, Qwen3's way
    mlp_bias: bool = False
    num_local_experts: int | None = None  # of a mixture of experts, Mixtral's way; None is one MLP for all tokens
    num_experts_per_tok: int | None = None

    def __post_init__(self):
        _require_positive(
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        # Resolved here, so that two spellings of one model are equal and hash alike.
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _require_positive(self, "num_key_value_heads", "head_dim")
        _require(
            self.num_attention_heads % self.kv_heads == 0,
            f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of num_key_value_heads, "
            f"which is {self.kv_heads}.",
        )
        _require(self.key_dim % 2 == 0, f"head_dim is {self.key_dim}; rotary embeddings need an even one.")
        _require(
            self.rope_scaling is None or self.rope_scaling.rope_type != "dynamic" or self.key_dim > 2,
            f"head_dim is {self.key_dim}; dynamic rope scaling needs at least 4.",
        )
        _require(1 < self.rope_theta < float("inf"), f"rope_theta is {self.rope_theta}; it must be above 1.")
        _require(0 < self.rms_norm_eps < 1, f"rms_norm_eps is {self.rms_norm_eps}; it must be between 0 and 1.")
        if self.attention_output_bias is None:
            object.__setattr__(self, "attention_output_bias", self.attention_bias)
        _require(
            self.rope_scaling is None or len(self.rope_scaling.factors) in (0, self.key_dim // 2),
            "RopeScaling.factors must be as many as there are frequencies, head_dim / 2.",
        )
        if self.sliding_window is not None:
            _require_positive(self, "sliding_window")
        if self.layer_types is not None:
            self._check_layer_types(tuple(self.layer_types))
        experts, chosen = self.num_local_experts, self.num_experts_per_tok
        _require(
            (experts is None) == (chosen is None) and 1 <= (chosen or 1) <= (experts or 1),
            f"num_local_experts is {experts} and num_experts_per_tok {chosen}; the second must be from 1 to the first, "
            f"or both None.",
        )

    def _check_layer_types(self, kinds: tuple[str, ...]) -> None:
        _require(
            len(kinds) == self.num_hidden_layers,
            f"layer_types lists {len(kinds)} layers, but num_hidden_layers is {self.num_hidden_layers}.",
        )
        for kind in kinds:
            _require(kind in (FULL, SLIDING), f"layer_types holds {kind!r}; supported are {FULL!r} and {SLIDING!r}.")
        _require(
            SLIDING not in kinds or self.sliding_window is not None,
            f"layer_types holds {SLIDING!r}, but sliding_window is not given.",
        )
        uniform = set(kinds) == {FULL if self.sliding_window is None else SLIDING}
        object.__setattr__(self, "layer_types", None if uniform else kinds)

    @property
    def kv_heads(self) -> int:
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def key_dim(self) -> int:
        assert self.head_dim is not None
        return self.head_dim

    @property
    def context_length(self) -> int:
        """Most tokens of a text, scaling included: "linear" and "dynamic" are stated against the length before it."""
        scaling, stated = self.rope_scaling, self.max_position_embeddings
        if scaling is None or scaling.rope_type not in ("linear", "dynamic", "yarn"):
            return stated
        return max(stated, int((scaling.original_max_position_embeddings or stated) * scaling.factor))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer: how many tokens back its attention reaches, itself included; None is all of them."""
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(ModelConfig):
    """An autoregression head: one decoder layer behind `fc`, which joins a token's embedding with a feature.

    `draft_vocab_size=None` drafts over the target's whole vocabulary. `ranking_beta` says how far its scores can be
    trusted that are made with the target's noise (see `ranking.py`); `train/fit_beta.py` fits it. `inputs` says what
    the head reads at token j, to guess feature j + 1: EAGLE's feature j with token j + 1, and what its ablation
    compares with that (section 4.3.2): token j + 1 alone, feature j alone, or feature j with its own token j.
    """

    num_hidden_layers: int = 1
    fc_bias: bool = False
    draft_vocab_size: int | None = None
    ranking_beta: float = 1.0
    inputs: Inputs = "feature+shifted_token"

    def __post_init__(self):
        super().__post_init__()
        _require(
            self.num_hidden_layers == 1,
            f"HeadConfig.num_hidden_layers is {self.num_hidden_layers}; an EAGLE head has 1 decoder layer.",
        )
        _require(
            self.num_local_experts is None,
            f"HeadConfig.num_local_experts is {self.num_local_experts}; an EAGLE head's layer has one MLP.",
        )
        _require_draft_vocabulary(self, self.draft_vocab_size, self.vocab_size)
        _require(
            self.inputs in get_args(Inputs),
            f"HeadConfig.inputs is {self.inputs!r}; it must be {', '.join(map(repr, get_args(Inputs)))}.",
        )
        _require(
            0 < self.ranking_beta < float("inf"),
            f"HeadConfig.ranking_beta is {self.ranking_beta}; it must be positive and finite.",
        )

    @property
    def reads_token(self) -> bool:
        return self.inputs != "feature"

    @property
    def reads_feature(self) -> bool:
        return self.inputs != "token"

    @property
    def shifted(self) -> bool:
        """Whether the token is the one that follows the feature's own."""
        return self.inputs != "feature+token"


def _require_draft_vocabulary(owner: object, size: int | None, vocab_size: int) -> None:
    _require(
        size is None or 0 < size <= vocab_size,
        f"{type(owner).__name__}.draft_vocab_size is {size}; it must be between 1 and vocab_size, "
        f"which is {vocab_size}.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Medusa's heads for a target: head k guesses, from the feature at a token, the token k + 1 places on.

    `draft_vocab_size=None` drafts over the target's whole vocabulary.
    """

    vocab_size: int
    hidden_size: int
    draft_vocab_size: int | None = None
    medusa_num_heads: int = 4

    def __post_init__(self):
        _require_positive(self, "vocab_size", "hidden_size", "medusa_num_heads")
        _require_draft_vocabulary(self, self.draft_vocab_size, self.vocab_size)

    @property
    def key_dim(self) -> int:
        """There is no attention whose heads a mesh would have to keep whole."""
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is chosen from the target's logits, for one row. The defaults are greedy decoding."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off

    def __post_init__(self):
        temperature, top_p, min_p, penalty = self.temperature, self.top_p, self.min_p, self.repetition_penalty
        _require(0 <= temperature < float("inf"), f"temperature is {temperature}; it must be 0 (greedy) or positive.")
        _require(self.top_k >= 0, f"top_k is {self.top_k}; it must be 0 (off) or positive.")
        _require(0 < top_p <= 1, f"top_p is {top_p}; it must be above 0 and at most 1 (off).")
        _require(0 <= min_p <= 1, f"min_p is {min_p}; it must be between 0 (off) and 1.")
        _require(0 < penalty < float("inf"), f"repetition_penalty is {penalty}; it must be positive (1 is off).")


Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """The shape of a draft tree.

    kind: "dynamic" (EAGLE-2), "static" (EAGLE-1) or "chain".
    nodes: capacity, the root included; 1 is plain decoding. A static tree has as many as its `choices` say.
    depth: levels below the root.
    top_k: frontier width and children of an expanded node, for a dynamic tree.
    choices: the paths of a static tree; (0, 2) is the third-best child of the root's best child.
      None is the method's published default: EAGLE-1's 26 nodes, or Medusa's 64.
    children: which tokens a node of a "static" or "chain" tree gets: the draft's "best", or ones "sampled" from its
      distribution, as EAGLE-1 and speculative sampling were published. At temperature 0 both are the best. Sampled ones
      leave the law of the text as it is, but not its tokens under a seed.
    common_random_numbers: above temperature 0, rank children with the noise that the target's tokens will be drawn
      with; False ranks by the draft's probability alone, as EAGLE-2 does. The text is the same.
    """

    kind: Literal["dynamic", "static", "chain"] = "dynamic"
    nodes: int = 60
    depth: int = 6
    top_k: int = 10
    choices: tuple[Path, ...] | None = None
    children: Literal["best", "sampled"] = "best"
    common_random_numbers: bool = True

    def __post_init__(self):
        _require(
            self.kind in ("dynamic", "static", "chain"),
            f"TreeConfig.kind is {self.kind!r}; it must be 'dynamic', 'static' or 'chain'.",
        )
        _require_positive(self, "nodes", "depth", "top_k")
        _require(
            self.children in ("best", "sampled"),
            f"TreeConfig.children is {self.children!r}; it must be 'best' or 'sampled'.",
        )
        _require(
            self.children == "best" or self.kind != "dynamic",
            "TreeConfig.children is 'sampled', but kind is 'dynamic', whose shape would depend on what is drawn; "
            "set kind='static' or kind='chain'.",
        )
        _require(
            self.choices is None or self.kind == "static",
            f"TreeConfig.choices shape a static tree, but kind is {self.kind!r}; leave them out or set kind='static'.",
        )
        if self.choices is not None:
            choices = tuple(tuple(path) for path in self.choices)
            object.__setattr__(self, "choices", choices)
            _check_choices(choices)


def _check_choices(choices: tuple[Path, ...]) -> None:
    seen = set()
    for path in choices:
        _require(len(path) > 0, "TreeConfig.choices holds an empty path; the root is there without being listed.")
        _require(min(path) >= 0, f"TreeConfig.choices holds {path}, but a rank must not be negative.")
        _require(path not in seen, f"TreeConfig.choices holds the node {path} twice; list each node once.")
        seen.add(path)
    for path in choices:
        parent = path[:-1]
        _require(
            not parent or parent in seen,
            f"TreeConfig.choices holds {path} without its parent {parent}; add the parent.",
        )
