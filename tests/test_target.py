"""The target against transformers' PyTorch models: stored results always, fresh ones where PyTorch is installed."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rig import GOLDENS, from_hugging_face

from eagle_jax import ModelConfig, cache
from eagle_jax.layers import causal_mask
from eagle_jax.tree import NO_PARENT, ancestor_mask

CASES = ("plain", "grouped", "head_dim", "rope_theta", "tied", "biases")
INPUTS = ("config", "tokens", "positions", "features", "logits")

close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


class Case:
    """A target and what PyTorch says of its tokens i32[2, 24]."""

    def __init__(self, arrays):
        self.config = ModelConfig(**json.loads(str(arrays["config"])))
        weights = {name: arrays[name].astype(np.float32) for name in arrays if name not in INPUTS}
        self.graphdef, self.params = nnx.split(from_hugging_face(self.config, weights))
        self.tokens, self.positions, self.features, self.logits = (arrays[name] for name in INPUTS[1:])

    def run(self, tokens, positions, mask, prefix=None):
        return run(self.graphdef, self.params, tokens, positions, mask, prefix)

    def prefix(self, length):
        """A cache of the first `length` i32[2] tokens of each row, with room to spare."""
        config = self.config
        empty = cache.empty(
            layers=config.num_hidden_layers,
            batch=2,
            capacity=32,
            kv_heads=config.kv_heads,
            key_dim=config.key_dim,
            dtype=jnp.float32,
        )
        *_, rows = self.run(self.tokens, self.positions, causal_mask(24))
        return cache.commit(empty, rows, jnp.asarray(length))


@partial(jax.jit, static_argnums=0)
def run(graphdef, params, tokens, positions, mask, prefix):
    model = nnx.merge(graphdef, params)
    features, rows = model(tokens, positions, mask, prefix)
    return features, model.logits(features), rows


def stored(name):
    return dict(np.load(GOLDENS / f"{name}.npz"))


def fresh(name):
    pytest.importorskip("torch")
    import make_goldens

    return make_goldens.golden(name, seed=1000 + CASES.index(name))


@pytest.fixture(scope="module", params=[stored, fresh], ids=lambda source: source.__name__)
def source(request):
    return request.param


def check_case(arrays):
    """A whole run, and a block behind a cache whose rows differ in length."""
    case = Case(arrays)
    features, logits, _ = case.run(case.tokens, case.positions, causal_mask(24))
    close(features, case.features)
    close(logits, case.logits)
    start = np.array([16, 11])
    place = np.arange(2)[:, None], start[:, None] + np.arange(8)
    features, logits, _ = case.run(case.tokens[place], case.positions[place], causal_mask(8), prefix=case.prefix(start))
    close(features, case.features[place])
    close(logits, case.logits[place])


@pytest.mark.parametrize("name", [name for name in CASES if name != "head_dim"])
def test_agrees_with_pytorch(source, name):
    check_case(source(name))


def test_E3_target_with_head_dim_of_its_own(source):
    """head_dim 10, where hidden_size / num_attention_heads is 6."""
    arrays = source("head_dim")
    config = ModelConfig(**json.loads(str(arrays["config"])))
    assert config.key_dim * config.num_attention_heads != config.hidden_size
    check_case(arrays)


# A root with two children, one of which has two children and a grandchild.
PARENTS = (NO_PARENT, 0, 0, 1, 1, 4)
DEPTHS = np.array([0, 1, 1, 2, 2, 3])
LEAF_PATHS = ((0, 2), (0, 1, 3), (0, 1, 4, 5))


def test_tree_block_equals_each_of_its_paths(source):
    """A node sees the cache, its ancestors and itself: as if its path alone had been written there."""
    case = Case(source("grouped"))
    start = np.array([16, 11])
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, case.config.vocab_size, (2, len(PARENTS)))
    mask = ancestor_mask(jnp.tile(jnp.asarray(PARENTS), (2, 1)), depth=3)
    # Positions go on from the prefix's last one, far from where the second row began.
    at_root = case.positions[[0, 1], start]
    features, logits, _ = case.run(tokens, at_root[:, None] + DEPTHS, mask, prefix=case.prefix(start))
    rows = np.arange(2)[:, None]
    for path in map(list, LEAF_PATHS):
        place = start[:, None] + np.arange(len(path))
        line, positions = case.tokens.copy(), case.positions.copy()  # what stands after the path changes nothing
        line[rows, place] = tokens[:, path]
        positions[rows, place] = at_root[:, None] + np.arange(len(path))
        wanted, wanted_logits, _ = case.run(line, positions, causal_mask(24))
        close(features[:, path], wanted[rows, place])
        close(logits[:, path], wanted_logits[rows, place])


def test_tree_mask_agrees_with_pytorch():
    pytest.importorskip("torch")
    import make_goldens

    model = make_goldens.make_model(make_goldens.CASES["grouped"], seed=77)
    weights = {name: weight.numpy() for name, weight in model.named_parameters()}
    config = ModelConfig(**make_goldens.BASE)
    graphdef, params = nnx.split(from_hugging_face(config, weights))
    tokens = np.random.default_rng(6).integers(0, config.vocab_size, (1, len(PARENTS)))
    positions = 300 + DEPTHS[None]
    mask = np.array([[[j in ancestors(i) for j in range(len(PARENTS))] for i in range(len(PARENTS))]])
    features, logits, _ = run(graphdef, params, tokens, positions, jnp.asarray(mask), None)
    wanted_features, wanted_logits = make_goldens.run_model(model, tokens, positions, mask)
    close(features, wanted_features)
    close(logits, wanted_logits)


def ancestors(node):
    return {node} if node == 0 else {node} | ancestors(PARENTS[node])


def test_embedded_model_agrees_with_pytorch(smollm2):
    """Dequantised weights, features and best tokens, up to position 4019."""
    wanted = stored("smollm2")
    graphdef, params = nnx.split(smollm2.model)
    features, logits, _ = run(graphdef, params, wanted["tokens"], wanted["positions"], causal_mask(40), None)
    features, logits = (np.asarray(array)[:, wanted["shown"]] for array in (features, logits))
    best = np.argsort(-logits, axis=-1, kind="stable")[..., :8]
    np.testing.assert_array_equal(best, wanted["best"])
    # Features reach 50 here, so that a part of the tolerance goes with their size.
    close(np.take_along_axis(logits, best, axis=-1), wanted["best_logits"], rtol=1e-4)
    close(features, wanted["features"], rtol=1e-4)


def test_embedded_tokenizer_agrees_with_transformers(smollm2):
    wanted = stored("smollm2")
    texts, ids = json.loads(str(wanted["texts"])), json.loads(str(wanted["text_ids"]))
    assert [smollm2.tokenizer(text)["input_ids"] for text in texts] == ids
    assert [smollm2.tokenizer.decode(row) for row in ids] == texts
