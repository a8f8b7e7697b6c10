"""Writes tests/goldens/: what transformers' PyTorch models say, for the tests that run without PyTorch.

    python tests/make_goldens.py  # needs torch and the embedded model; running it again gives the same files

Tiny Llamas hold all their weights, as float16 numbers, so that the files stay small. The embedded model is read by
transformers' own converter, so that this library's is checked too.
"""

import json

import numpy as np
import torch
from rig import GOLDENS
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from eagle_jax.embedded import model_path

BASE = dict(
    vocab_size=16,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
)
CASES = {
    "plain": {"num_key_value_heads": 4},
    "grouped": {},
    "head_dim": {"head_dim": 10},
    "rope_theta": {"rope_theta": 500000.0},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
TOKENS = 24
# Rotary attention sees differences of positions only, so the second row has gaps.
POSITIONS = np.stack([np.arange(24), np.concatenate([np.arange(8), np.arange(200, 208), np.arange(3000, 3008)])])

PROMPT = (
    "In 1903, two brothers from Ohio flew 37 metres; by 1969 people walked on the Moon. What came between the two? "
    "Answer in one sentence, please."
)
TEXTS = (PROMPT, "", "  x = 10**25\n\n\tprint(x)", "naïve café, 東京 🙂", "<|im_start|>user\nHi<|im_end|>\n")
LONG = 4000
SHOWN = (0, 7, 19, 20, 31, 39)  # places of the prompt whose numbers are kept


def make_model(overrides, seed):
    """A random Llama whose weights are float16 numbers and large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(**(BASE | overrides), attn_implementation="eager")
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            weight.normal_(std=0.5)
        elif "embed_tokens" in name or "lm_head" in name:
            weight.normal_()
        else:
            weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
        weight.copy_(weight.half().float())
    return model


def causal_mask(length):
    return np.tril(np.ones((1, length, length), bool))


def run_model(model, tokens, positions, mask):
    """Features and logits float32 [B, T, ...] of tokens [B, T] under a mask bool[B or 1, T, T]."""
    additive = np.where(mask, 0.0, torch.finfo(torch.float32).min).astype(np.float32)[:, None]
    additive = torch.from_numpy(np.broadcast_to(additive, (len(tokens), *additive.shape[1:])).copy())
    with torch.no_grad():
        features = model.model(
            input_ids=torch.from_numpy(tokens),
            position_ids=torch.from_numpy(positions),
            attention_mask=additive,
            use_cache=False,
        ).last_hidden_state
        return features.numpy(), model.lm_head(features).numpy()


def golden(name, seed):
    """The arrays of one tiny case: configuration, weights, inputs and what is expected."""
    overrides = CASES[name]
    model = make_model(overrides, seed)
    tokens = np.random.default_rng(seed).integers(0, BASE["vocab_size"], (2, TOKENS))
    features, logits = run_model(model, tokens, POSITIONS, causal_mask(TOKENS))
    weights = {name: weight.half().numpy() for name, weight in model.named_parameters()}
    return weights | {
        "config": np.array(json.dumps(BASE | overrides)),
        "tokens": tokens.astype(np.int32),
        "positions": POSITIONS.astype(np.int32),
        "features": features,
        "logits": logits,
    }


def smollm2_golden():
    path = model_path("smollm2-135m")
    config = LlamaConfig(**load_gguf_checkpoint(path)["config"], attn_implementation="eager")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)  # tied
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    tokens = np.tile(tokenizer(PROMPT)["input_ids"][:40], (2, 1))
    positions = np.stack([np.arange(40), np.concatenate([np.arange(20), np.arange(LONG, LONG + 20)])])
    features, logits = run_model(model, tokens, positions, causal_mask(40))
    best = np.argsort(-logits[:, SHOWN], axis=-1, kind="stable")[..., :8]
    return {
        "tokens": tokens.astype(np.int32),
        "positions": positions.astype(np.int32),
        "shown": np.array(SHOWN),
        "features": features[:, SHOWN],
        "best": best.astype(np.int32),
        "best_logits": np.take_along_axis(logits[:, SHOWN], best, axis=-1),
        "texts": np.array(json.dumps(TEXTS)),
        "text_ids": np.array(json.dumps([tokenizer(text)["input_ids"] for text in TEXTS])),
    }


def main():
    torch.set_num_threads(1)  # sums in one order
    GOLDENS.mkdir(exist_ok=True)
    for seed, name in enumerate(CASES):
        np.savez_compressed(GOLDENS / f"{name}.npz", **golden(name, seed))
    np.savez_compressed(GOLDENS / "smollm2.npz", **smollm2_golden())


if __name__ == "__main__":
    main()
