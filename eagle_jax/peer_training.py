"""The same training step in PyTorch, eager, for comparison: transformers' own decoder layer behind `fc`.

It is what trainers in PyTorch do: whole logits of every pair, autograd's memory, torch.optim.AdamW.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from eagle_jax import measure
from eagle_jax.checkpoint import HEAD_TABLE
from eagle_jax.convert import tensor_for
from eagle_jax.head import Head
from eagle_jax.peers import peer_config, require_torch
from eagle_jax.training import Batch, TrainConfig

# What this step is without; other options of a recipe it has. A rate that ends where it began has no decay.
KNOWN = {"optimizer": "adamw", "labels": "soft", "unroll": 1, "accumulate": 1, "noise": 0.0, "final_learning_rate": 1.0}


class TorchTraining:
    """A head's masters and optimizer in PyTorch, from the same weights.

    Supports what the comparison is about: the recipes that `KNOWN` leaves, float32, a Llama-shaped head.
    """

    def __init__(self, head: Head, config: TrainConfig):
        require_torch()
        for name, known in KNOWN.items():
            if getattr(config, name) != known:
                raise ValueError(
                    f"TrainConfig.{name} is {getattr(config, name)!r}, but the step in PyTorch knows {known!r} alone; "
                    f"compare at that."
                )
        if head.config.inputs != "feature+shifted_token":
            raise ValueError(f"The step in PyTorch is for EAGLE's inputs; this head's are {head.config.inputs!r}.")
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(measure.cores())
        llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
        self.config = config
        name, settings = peer_config(head.config)
        if name != "Llama":
            raise ValueError(f"The step in PyTorch is for heads shaped like Llama's layers; this one is like {name}'s.")
        settings._attn_implementation = "sdpa"
        hidden = head.config.hidden_size
        self.fc = self.torch.nn.Linear(2 * hidden, hidden, bias=head.config.fc_bias)
        self.layer = llama.LlamaDecoderLayer(settings, layer_idx=0)
        self.layer.input_layernorm = self.torch.nn.Identity()
        self.rotary = llama.LlamaRotaryEmbedding(settings)
        self.embedding, self.lm_head = (self._tensor(x) for x in (head.ends.embedding, head.ends.lm_head))
        modules = self.torch.nn.ModuleDict({"fc": self.fc, "layers": self.torch.nn.ModuleList([self.layer])})
        modules.load_state_dict({name: self._tensor(weight) for name, weight in published_weights(head).items()})
        self.parameters = dict(modules.named_parameters())
        self.optimizer = self.torch.optim.AdamW(
            [
                {
                    "params": [weight for weight in self.parameters.values() if (weight.ndim > 1) is matrices],
                    "weight_decay": config.weight_decay if matrices else 0.0,
                }
                for matrices in (True, False)
            ],
            **{"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8},
        )
        self.steps = 0

    def _tensor(self, values: Any) -> Any:
        return self.torch.from_numpy(np.array(values, np.float32))

    def batch(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Tokens, loss mask and features as PyTorch's tensors."""
        assistant = np.asarray(batch.assistant)
        mask = np.pad(assistant[:, 1:-1] & assistant[:, 2:], ((0, 0), (0, 1)))
        tokens = self.torch.from_numpy(np.array(batch.tokens, np.int64))
        return tokens, self.torch.from_numpy(mask), self._tensor(batch.features)

    def __call__(self, batch: tuple[Any, Any, Any]) -> float:
        """One optimizer step; returns the loss."""
        functional, config = self.torch.nn.functional, self.config
        tokens, mask, features = batch
        inputs, wanted = features[:, :-1], features[:, 1:]
        x = self.fc(self.torch.cat([self.embedding[tokens[:, 1:]], inputs], dim=-1))
        positions = self.torch.arange(x.shape[1])[None]
        predicted = self.layer(x, position_embeddings=self.rotary(x, positions), attention_mask=None)
        predicted = predicted[0] if isinstance(predicted, tuple) else predicted
        count = mask.sum().clamp(min=1)
        regression = functional.smooth_l1_loss(predicted, wanted, reduction="none").mean(dim=-1)
        with self.torch.no_grad():
            teacher = functional.softmax(wanted @ self.lm_head.T, dim=-1)
        entropy = -(teacher * functional.log_softmax(predicted @ self.lm_head.T, dim=-1)).sum(dim=-1)
        loss = config.regression_weight * regression + config.cross_entropy_weight * entropy
        loss = (loss * mask).sum() / count
        self.optimizer.zero_grad()
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.parameters.values(), config.gradient_clip, error_if_nonfinite=True)
        warm = min(1.0, (self.steps + 1) / (config.warmup_steps + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * warm
        self.optimizer.step()
        self.steps += 1
        return float(loss.detach())


def published_weights(head: Head) -> Mapping[str, np.ndarray]:
    """A head's weights under their published names."""
    weights = {}
    for path, leaf in nnx.to_flat_state(nnx.state(head.model)):
        name, transform = tensor_for(path, HEAD_TABLE)
        weights[name] = transform(np.asarray(leaf[...], np.float32), head.config)
    return weights
