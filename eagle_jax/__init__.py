"""EAGLE and EAGLE-2 speculative decoding in JAX: the target's own text, token for token, in fewer forward passes."""

from eagle_jax.checkpoint import load_head, load_medusa, save_head
from eagle_jax.completion import Chunk, Completion
from eagle_jax.config import HeadConfig, MedusaConfig, ModelConfig, RopeScaling, SamplingConfig, TreeConfig
from eagle_jax.conversation import Conversation
from eagle_jax.datastore import load_datastore
from eagle_jax.draft_model import DraftModel
from eagle_jax.generation import generate, stream
from eagle_jax.head import Head
from eagle_jax.loading import load_target
from eagle_jax.lookahead import Lookahead
from eagle_jax.lookup import PromptLookup
from eagle_jax.medusa import Medusa
from eagle_jax.rest import Rest
from eagle_jax.target import Target

__all__ = [
    "Chunk",
    "Completion",
    "Conversation",
    "DraftModel",
    "Head",
    "HeadConfig",
    "Lookahead",
    "Medusa",
    "MedusaConfig",
    "ModelConfig",
    "PromptLookup",
    "Rest",
    "RopeScaling",
    "SamplingConfig",
    "Target",
    "TreeConfig",
    "generate",
    "load_datastore",
    "load_head",
    "load_medusa",
    "load_target",
    "save_head",
    "stream",
]
