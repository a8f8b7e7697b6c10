"""Medusa's heads: their arithmetic, their loss, what they draft, that no token changes, and their way to disk and back.

B batch rows, T tokens, K heads, E hidden size, W draft vocabulary.
"""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import greedy_sampler, ids, make_medusa, mean_accepted, random_prompts, softmax
from flax import nnx
from jax.sharding import PartitionSpec
from rig import tiny_target
from test_training import batch_of

import eagle_jax as ej
from eagle_jax import draft, generation, sampling, sharding, training
from eagle_jax.medusa_drafter import MEDUSA_CHOICES

VOCABULARY = np.asarray([1, 2, 4, 5, 7, 8, 9, 11, 12, 13, 14], np.int32)
PROMPTS = random_prompts(6, lengths=(1, 3, 8, 13), seed=4)


def parameters(medusa):
    """(W1, W2) of each head in float64, as the paper has them: they multiply from the left."""
    return [
        (np.asarray(head.linear.kernel[...], float).T, np.asarray(head.lm_head[...], float))
        for head in medusa.model.heads
    ]


def probabilities(medusa, feature):
    """softmax(W2 (SiLU(W1 h) + h)) of each head, [K][W], for one feature h."""
    feature = np.asarray(feature, float)
    found = []
    for first, second in parameters(medusa):
        inner = first @ feature
        found.append(softmax(second @ (inner / (1 + np.exp(-inner)) + feature)))
    return found


def test_the_forward_is_the_formula(target):
    medusa = make_medusa(target, vocabulary=VOCABULARY)
    features = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    logits = np.asarray(jax.jit(medusa.model)(jnp.asarray(features)))
    assert logits.shape == (2, 3, 11)
    for row in range(2):
        np.testing.assert_allclose(softmax(logits[row]), probabilities(medusa, features[row]), rtol=0, atol=1e-5)


def test_heads_begin_as_the_targets_own(target):
    """Each guesses what the LM head says of the feature itself, and training them leaves the target alone."""
    medusa = ej.Medusa.from_target(target, heads=2)
    features = jax.random.normal(jax.random.key(0), (3, 64))
    logits = medusa.model(features)
    for head in range(2):
        np.testing.assert_allclose(logits[:, head], target.model.logits(features), rtol=0, atol=1e-5)
    assert medusa.model.heads[0].lm_head[...] is not target.model.lm_matrix()


# --- Training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "draft_vocabulary"])
def test_the_loss_is_the_formula(vocabulary, labels):
    """Head k at token j: against the target's word on t_{j+1+k}, or that token, where t_{j+1} to it are one answer."""
    target = tiny_target()
    medusa, batch = make_medusa(target, vocabulary=vocabulary), batch_of(target, rows=2, length=12)
    batch = batch._replace(assistant=batch.assistant.at[1, 8].set(False))
    graphdef, params = nnx.split(medusa.model)
    found = training.head_sums(graphdef, params, medusa.ends, batch, labels=labels)
    rows = list(range(16)) if vocabulary is None else vocabulary.tolist()
    lm_head = np.asarray(target.model.lm_matrix(), float)[rows]
    tokens, assistant, features = (np.asarray(x) for x in batch)
    assert len(found) == 3
    for step, sums in enumerate(found, start=1):
        entropy, top1, top3, count = 0.0, 0, 0, 0
        for row, j in itertools.product(range(2), range(12 - 1 - step)):
            if not assistant[row, j + 1 : j + step + 2].all():
                continue
            log_q = np.log(probabilities(medusa, features[row, j])[step - 1])
            p = softmax(lm_head @ features[row, j + step].astype(float))
            rank = np.argsort(-log_q).tolist().index(int(p.argmax()))
            top1, top3, count = top1 + (rank < 1), top3 + (rank < 3), count + 1
            if labels == "soft":
                entropy -= p @ log_q
            elif tokens[row, j + step + 1] in rows:
                entropy -= log_q[rows.index(tokens[row, j + step + 1])]
        assert count > 3 and (sums.top1, sums.top3, sums.count, sums.regression) == (top1, top3, count, 0)
        np.testing.assert_allclose(sums.cross_entropy, entropy, rtol=1e-4)
    assert found[0].count > found[1].count > found[2].count


def test_later_heads_weigh_less():
    target = tiny_target()
    medusa, batch = make_medusa(target), batch_of(target)
    graphdef, params = nnx.split(medusa.model)
    recipe = training.medusa_recipe(training.TrainConfig(noise=0.5))
    sums = training.evaluate_step(params, medusa.ends, batch, graphdef=graphdef)
    _, metrics = training.train_step(
        training.init_state(params, recipe), medusa.ends, batch, graphdef=graphdef, config=recipe
    )
    wanted = sum(0.8**k * one.cross_entropy for k, one in enumerate(sums)) / sum(one.count for one in sums)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    for k in (2, 3):
        np.testing.assert_allclose(metrics[f"top1_{k}"], sums[k - 1].top1 / sums[k - 1].count, rtol=1e-6)


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def test_four_conversations_are_learned_by_heart(optimizer):
    """By every head. Under Muon the LM heads are AdamW's all the same: their moments say so."""
    target = tiny_target()
    medusa, batch = ej.Medusa.from_target(target, heads=2), batch_of(target)
    recipe = training.TrainConfig(steps=300, learning_rate=1e-2, warmup_steps=5, optimizer=optimizer)
    recipe = training.medusa_recipe(recipe)
    graphdef, params = nnx.split(medusa.model)
    state = training.init_state(params, recipe)
    if optimizer == "muon":
        shapes = [leaf.shape for leaf in jax.tree.leaves(state.optimizer)]
        assert shapes.count((16, 64)) == 2 * 2 and shapes.count((64, 64)) == 2 * 1
    before = np.asarray(target.model.lm_matrix())
    for _ in range(300):
        state, metrics = training.train_step(state, medusa.ends, batch, graphdef=graphdef, config=recipe)
    assert metrics["top1"] > 0.95 and metrics["top1_2"] > 0.95
    np.testing.assert_array_equal(target.model.lm_matrix(), before)


def test_nothing_is_unrolled():
    medusa = ej.Medusa.from_target(tiny_target(), heads=2)
    with pytest.raises(ValueError, match=r"unroll is 2.*\.$"):
        training.head_sums(*nnx.split(medusa.model), medusa.ends, batch_of(tiny_target()), unroll=2)


# --- Drafting ---------------------------------------------------------------------------------------------------------


def proposed(target, medusa, config, features, sampler=None):
    """The tree after a round that committed 2 tokens of the first row and 1 of the second, as paths with their scores.

    Features: [B, 3, E]; what a row's last committed token has is the second one, and the first.
    """
    drafter, params = medusa.bind(target, config)
    tokens = jnp.zeros(features.shape[:2], jnp.int32)
    committed = draft.Committed(tokens, features, tokens, jnp.asarray([2, 1]))

    @jax.jit
    def run(params):
        state = drafter.observe(params, drafter.init(params, 2, 8), committed)
        # A row that has ended commits nothing and keeps what it has.
        state = drafter.observe(params, state, committed._replace(features=features * 7, count=jnp.asarray([0, 0])))
        return drafter.propose(params, state, jnp.asarray([3, 5]), sampler or greedy_sampler(2))[0]

    tree = jax.device_get(run(params))
    assert tree.tokens.shape[1] == drafter.nodes and tree.depths.max() <= drafter.depth
    assert tree.tokens[:, 0].tolist() == [3, 5]
    found = []
    for row in range(2):
        paths = {0: ()}
        for node in range(1, drafter.nodes):
            parent = int(tree.parents[row, node])
            paths[node] = (*paths[parent], int(tree.tokens[row, node]))
            assert parent < node and tree.depths[row, node] == len(paths[node])
        found.append({path: float(tree.log_scores[row, node]) for node, path in paths.items()})
        assert len(found[row]) == drafter.nodes
    return found


@pytest.fixture(scope="module")
def features():
    return jnp.asarray(np.random.default_rng(5).normal(size=(2, 3, 64)), jnp.float32)


CHOICES = ((0,), (3,), (0, 1), (3, 0), (3, 2), (0, 1, 4), (0, 1, 4, 0))


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        (ej.TreeConfig(kind="static"), [path for path in MEDUSA_CHOICES if len(path) <= 3]),
        (ej.TreeConfig(kind="static", choices=CHOICES), [path for path in CHOICES if len(path) <= 3]),
        (ej.TreeConfig(kind="chain", nodes=9, depth=8), [(0,), (0, 0), (0, 0, 0)]),
    ],
    ids=["default", "choices", "chain"],
)
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "draft_vocabulary"])
def test_a_trees_levels_are_the_heads_best_tokens(target, features, config, choices, vocabulary):
    """Three heads: what lies deeper is left out."""
    medusa = make_medusa(target, vocabulary=vocabulary)
    names = np.arange(16) if vocabulary is None else vocabulary
    for row, found in enumerate(proposed(target, medusa, config, features)):
        log_q = np.log(probabilities(medusa, features[row, [1, 0][row]]))
        best = np.argsort(-log_q, axis=-1)
        wanted = {
            tuple(int(names[best[level, rank]]) for level, rank in enumerate(path)): sum(
                log_q[level, best[level, rank]] for level, rank in enumerate(path)
            )
            for path in choices
        }
        assert found == pytest.approx({(): 0.0} | wanted, abs=1e-4)


def test_a_dynamic_tree_has_the_best_products(target, features):
    """Of all paths of three tokens or fewer, the eight with the highest products."""
    medusa = make_medusa(target)
    config = ej.TreeConfig(nodes=9, depth=5, top_k=8)
    for row, found in enumerate(proposed(target, medusa, config, features)):
        log_q = np.log(probabilities(medusa, features[row, [1, 0][row]]))
        products = {
            path: sum(log_q[level, token] for level, token in enumerate(path))
            for depth in (1, 2, 3)
            for path in itertools.product(range(16), repeat=depth)
        }
        best = sorted(products, key=products.__getitem__, reverse=True)[:8]
        assert found == pytest.approx({(): 0.0} | {path: products[path] for path in best}, abs=1e-4)


def test_above_temperature_0_a_levels_best_token_is_best_with_the_noise_of_its_place(target, features):
    medusa = make_medusa(target, vocabulary=VOCABULARY)
    drawn = [ej.SamplingConfig(temperature=temperature) for temperature in (1.0, 0.5)]
    sampler = sampling.Sampler(
        processors=sampling.processors_for(drawn),
        params=sampling.params_for(drawn, 16),
        keys=sampling.row_keys(1, 2),
        index=jnp.asarray([4, 9]),
    )
    chain = ej.TreeConfig(kind="chain", nodes=4, depth=3)
    for row, found in enumerate(proposed(target, medusa, chain, features, sampler)):
        log_q, path = np.log(probabilities(medusa, features[row, [1, 0][row]])), []
        for level in range(3):
            key = jax.random.fold_in(sampler.keys[row], sampler.index[row] + level)
            noise = drawn[row].temperature * jax.random.gumbel(key, (16,))[VOCABULARY]
            path.append(int(VOCABULARY[np.argmax(log_q[level] + noise)]))
            assert tuple(path) in found


def test_the_published_default_tree():
    """63 nodes below the root in 4 levels, none without its parent or its better sisters."""
    assert [sum(len(path) == depth for path in MEDUSA_CHOICES) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert len(set(MEDUSA_CHOICES)) == 63
    ej.TreeConfig(kind="static", choices=MEDUSA_CHOICES)  # refuses a node without its parent
    assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in MEDUSA_CHOICES for path in MEDUSA_CHOICES)


MIXED = [ej.SamplingConfig(temperature=float(row % 2)) for row in range(6)]


@pytest.fixture(scope="module")
def plain(target):
    return ids(ej.generate(target, None, PROMPTS, max_new_tokens=24, sampling=MIXED, seed=list(range(6))))


@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_medusa_changes_no_token(target, plain, kind):
    """Greedy rows and drawn ones, prompts from one token on."""
    shape = {"choices": CHOICES} if kind == "static" else {"nodes": 30, "depth": 3, "top_k": 6}
    tree = ej.TreeConfig(kind=kind, **shape)
    options = {"max_new_tokens": 24, "sampling": MIXED, "seed": list(range(6)), "tree": tree}
    done = ej.generate(target, make_medusa(target), PROMPTS, **options)
    assert ids(done) == plain and mean_accepted(done) > 0.2
    if kind == "static":
        alone = ej.generate(target, make_medusa(target), PROMPTS[3], **(options | {"sampling": MIXED[3], "seed": [3]}))
        assert alone.token_ids == plain[3] and alone.accepted == done[3].accepted


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_broken_heads_still_draft_a_tree(target, features, kind):
    """Of distinct tokens below each node, parents first; all that it lacks is a chance."""
    medusa = make_medusa(target)
    graphdef, params = nnx.split(medusa.model)
    broken = dataclasses.replace(medusa, model=nnx.merge(graphdef, jax.tree.map(lambda x: x * jnp.nan, params)))
    for found in proposed(target, broken, ej.TreeConfig(kind=kind, nodes=8, depth=3, top_k=3), features):
        assert set(found.values()) == {0.0, -np.inf}


def test_a_tree_of_ranks_that_no_token_has_is_plain_decoding(target):
    medusa = make_medusa(target, vocabulary=VOCABULARY)
    drafter, _ = generation.bind(target, medusa, ej.TreeConfig(kind="static", choices=((11,),)))
    assert isinstance(drafter, draft.NoDraft)


# --- To disk and back -------------------------------------------------------------------------------------------------


def leaves(medusa):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(medusa.model))}


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "draft_vocabulary"])
def test_float32_round_trip_is_bitwise(target, tmp_path, vocabulary):
    medusa = make_medusa(target, vocabulary=vocabulary)
    ej.save_head(medusa, tmp_path, dtype=jnp.float32)
    for loaded in (ej.load_head(tmp_path, target), ej.load_medusa(tmp_path, target)):
        assert isinstance(loaded, ej.Medusa) and loaded.config == medusa.config
        before, after = leaves(medusa), leaves(loaded)
        assert before.keys() == after.keys()
        for path, value in before.items():
            np.testing.assert_array_equal(after[path], value)
        np.testing.assert_array_equal(loaded.ends.lm_head, medusa.ends.lm_head)


def refusal(load, *arguments):
    with pytest.raises(ValueError) as caught:
        load(*arguments)
    message = str(caught.value)
    assert "\n" not in message and message.endswith("."), message
    return message


def test_another_head_is_refused(target, tmp_path):
    ej.save_head(ej.Head.random(target), tmp_path)
    assert "is an autoregression head, not Medusa's heads" in refusal(ej.load_medusa, tmp_path, target)


def test_heads_of_another_target(target, tmp_path):
    medusa = make_medusa(target)
    ej.save_head(medusa, tmp_path)
    other = tiny_target(vocab_size=24)
    said = "vocab_size 16, but the target random has 24"
    assert said in refusal(ej.load_head, tmp_path, other)
    assert said in refusal(medusa.bind, other, ej.TreeConfig())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("medusa_num_heads", 0, "medusa_num_heads is 0"),
        ("medusa_num_heads", 4, "missing 3.0.linear.weight; missing 3.1.weight"),
        ("hidden_size", "64", "describes no Medusa heads"),
    ],
)
def test_a_configuration_that_the_weights_do_not_fit(target, tmp_path, field, value, said):
    ej.save_head(make_medusa(target), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: value}))
    message = refusal(ej.load_head, tmp_path, target)
    assert said in message and str(tmp_path) in message


def test_a_mesh_knows_where_the_parameters_lie():
    """And their moments, under Muon too; what a mesh axis does not divide would be repeated."""
    medusa = ej.Medusa.from_target(tiny_target(), heads=1)
    recipe = training.TrainConfig(optimizer="muon")
    state = jax.eval_shape(lambda params: training.init_state(params, recipe), nnx.split(medusa.model)[1])
    places = sharding.shardings_for(state, sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1]))
    leaves = jax.tree_util.tree_leaves_with_path(places)
    found = {jax.tree_util.keystr(path, simple=True, separator="."): place.spec for path, place in leaves}
    of_lm_heads = [spec for name, spec in found.items() if "lm_head" in name]
    assert of_lm_heads == [PartitionSpec("tensor", "fsdp")] * 3
    assert [spec for name, spec in found.items() if "linear" in name] == [PartitionSpec("fsdp", "tensor")] * 2
