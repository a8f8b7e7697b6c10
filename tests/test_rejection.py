"""Sampled trees: what is drawn, the way down by recursive rejection, and the law of the text, with tables as models."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import (
    full_logits,
    ids,
    make_head,
    make_target,
    mean_accepted,
    p_value,
    random_prompts,
    reference_keep,
    reference_penalty,
    softmax,
)

import eagle_jax as ej
from eagle_jax import draft, rejection, sampling
from eagle_jax.tree import NO_PARENT, ROOT, Tree
from eagle_jax.verify import of_nodes, walk

SLOW = pytest.mark.slow
V, DRAWS, NEW, DEPTH = 8, 20_000, 3, 3
CHAIN = ((0,), (0, 0), (0, 0, 0))
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (0, 0, 0), (0, 0, 1))  # one rank left out

# The target says what follows a token, the draft says otherwise, and at each level something else.
random = np.random.default_rng(0)
TARGET = (random.normal(size=(V, V)) * 1.5).astype(np.float32)
DRAFT = (random.normal(size=(DEPTH, V, V)) * 1.5).astype(np.float32)
IDS = np.arange(V)
FEW = np.array([1, 2, 4, 5, 7])  # a draft vocabulary

WARM = ej.SamplingConfig(temperature=1.0)
FILTERS = ej.SamplingConfig(temperature=0.8, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.5)


def draft_tree(root, sampler, choices, vocabulary):
    width = len(vocabulary)
    drafts = jnp.asarray(DRAFT[:, :, vocabulary])

    def step(carry, frontier):
        return carry, drafts[frontier.depth][frontier.tokens], frontier.features

    def token_ids(index):
        return index if width == V else jnp.asarray(vocabulary)[index]

    start = draft.Start(drafts[0][root], jnp.zeros((root.shape[0], 1)))
    return draft.draft_static(step, None, start, root, token_ids, choices, sampler=sampler)


def sampler_for(configs, rows, index, seen=None):
    configs = configs * (rows // len(configs))
    return sampling.Sampler(
        processors=sampling.processors_for(configs),
        params=sampling.params_for(configs, V),
        keys=sampling.row_keys(5, rows),
        index=index,
        seen=seen,
    )


def texts(config, choices, vocabulary=IDS, rows=DRAWS):
    """The first tokens after a prompt of the token 0, i32[rows, NEW], in as many rounds as they take."""
    sampler = sampler_for([config], rows, jnp.ones(rows, jnp.int32))
    penalised = sampler.processors.repetition_penalty
    row, depth = jnp.arange(rows), max(map(len, choices))

    def one_round(_, state):
        tokens, count, accepted = state
        root = tokens[row, count - 1]
        seen = None
        if penalised:
            there = jnp.arange(tokens.shape[1]) < count[:, None]
            seen = jnp.zeros((rows, V), bool).at[row[:, None], jnp.where(there, tokens, V)].set(True, mode="drop")
        here = dataclasses.replace(sampler, index=count, seen=seen)
        tree = draft_tree(root, here, choices, vocabulary)
        logits = jnp.asarray(TARGET)[tree.tokens]
        running = count <= NEW
        found = walk(tree, of_nodes(logits), rejection.by_rejection(tree, here), depth, running, seen)
        place = jnp.arange(depth + 1)
        slots = jnp.where(place < found.count[:, None], count[:, None] + place, tokens.shape[1])
        tokens = tokens.at[row[:, None], slots].set(found.tokens, mode="drop")
        return tokens, count + found.count, accepted + jnp.sum(jnp.maximum(found.count - 1, 0))

    tokens = jnp.zeros((rows, 1 + NEW + depth), jnp.int32)
    start = tokens, jnp.ones(rows, jnp.int32), jnp.zeros((), jnp.int32)
    tokens, _, accepted = jax.jit(lambda: jax.lax.fori_loop(0, NEW, one_round, start))()
    return np.asarray(tokens)[:, 1 : 1 + NEW], int(accepted) / rows


def processed(logits, seen, config):
    """Probabilities f64[V], from the references."""
    logits = reference_penalty(logits.astype(np.float64), seen, config.repetition_penalty)
    return softmax(np.where(reference_keep(logits, config), logits / config.temperature, -np.inf))


def exact_law(config):
    law = np.zeros((V,) * NEW)
    for path in itertools.product(range(V), repeat=NEW):
        tokens = [0, *path]
        steps = [processed(TARGET[tokens[i]], tokens[: i + 1], config)[tokens[i + 1]] for i in range(NEW)]
        law[path] = np.prod(steps)
    return law


def p_value_of(config, choices, vocabulary=IDS):
    tokens, accepted = texts(config, choices, vocabulary)
    counts = np.zeros((V,) * NEW, np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    assert 0.3 < accepted < 3  # it is neither all rejection nor all acceptance
    return p_value(counts, exact_law(config))


# --- The law ----------------------------------------------------------------------------------------------------------


def test_the_draft_is_far_from_the_target():
    for draft_logits in DRAFT:
        p, q = softmax(TARGET), softmax(draft_logits)
        assert np.mean(np.abs(p - q).sum(axis=-1) / 2) > 0.4


@pytest.mark.parametrize("choices", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("config", "vocabulary"),
    [(WARM, IDS), pytest.param(WARM, FEW, marks=SLOW), pytest.param(FILTERS, FEW, marks=SLOW)],
    ids=["temperature", "few", "filters"],
)
def test_the_joint_law_of_three_tokens_is_the_targets(choices, config, vocabulary):
    assert p_value_of(config, choices, vocabulary) > 1e-3


def best_drawn_first(draw_children):
    """Orders the drawn children by how likely the draft holds them."""

    def draw(log_probs, level, count, sampler):
        scores, drawn = draw_children(log_probs, level, count, sampler)
        scores, order = jax.lax.top_k(scores, count)
        return scores, jnp.take_along_axis(drawn, order, axis=-1)

    return draw


def best_of_twice_as_many(draw_children):
    """Keeps those of the drawn children that the draft holds most likely, in the order of their draws."""

    def draw(log_probs, level, count, sampler):
        scores, drawn = draw_children(log_probs, level, 2 * count, sampler)
        kept = jnp.sort(jax.lax.top_k(scores, count)[1], axis=-1)
        return jnp.take_along_axis(scores, kept, axis=-1), jnp.take_along_axis(drawn, kept, axis=-1)

    return draw


@pytest.mark.parametrize("wrong", [best_drawn_first, pytest.param(best_of_twice_as_many, marks=SLOW)])
def test_the_law_is_lost_where_drawn_children_are_chosen_among(monkeypatch, wrong):
    monkeypatch.setattr(draft, "draw_children", wrong(draft.draw_children))
    assert p_value_of(WARM, TREE) < 1e-6


@SLOW
def test_the_law_is_lost_where_rounds_share_their_draws(monkeypatch):
    """Keys of the level alone, not of the token's index."""
    keys_for = sampling.Sampler.keys_for

    def of_level(self, tag, level):
        return keys_for(dataclasses.replace(self, index=jnp.zeros_like(self.index)), tag, level)

    monkeypatch.setattr(sampling.Sampler, "keys_for", of_level)
    assert p_value_of(WARM, CHAIN) < 1e-6


@SLOW
def test_the_law_is_lost_where_draws_and_residuals_share_their_noise(monkeypatch):
    monkeypatch.setattr(rejection, "RESIDUAL", sampling.DRAWN)
    assert p_value_of(WARM, CHAIN) < 1e-6


# --- Against slow versions --------------------------------------------------------------------------------------------

ROWS = 64
CONFIGS = [WARM, FILTERS, ej.SamplingConfig(temperature=2.0, top_k=2), ej.SamplingConfig(repetition_penalty=1.5)]


def before(row):
    """Some tokens of a row, its root the last."""
    return [row % V, (3 * row) % V, (row // 2) % V]


@pytest.fixture(scope="module", params=["chain", "tree", "few"])
def drawn(request):
    """A sampled tree, its sampler and its shape."""
    choices, vocabulary = (CHAIN if request.param == "chain" else TREE), (FEW if request.param == "few" else IDS)
    seen = np.zeros((ROWS, V), bool)
    for row in range(ROWS):
        seen[row, before(row)] = True
    sampler = sampler_for(CONFIGS, ROWS, jnp.arange(7, 7 + ROWS), jnp.asarray(seen))
    root = jnp.asarray([before(row)[-1] for row in range(ROWS)], jnp.int32)
    return jax.jit(lambda root: draft_tree(root, sampler, choices, vocabulary))(root), sampler, choices, vocabulary


def noise_for(sampler, tag, level, draw):
    return np.asarray(jax.vmap(draw)(sampler.keys_for(tag, level)))


def draft_probabilities(row, path, vocabulary):
    """f64[W] of the children of a path of tokens."""
    config = CONFIGS[row % len(CONFIGS)]
    tokens = [*before(row), *path]
    seen = [place for place, token in enumerate(vocabulary) if token in tokens]
    logits = DRAFT[len(path), tokens[-1]][vocabulary]
    if config.temperature == 0:
        return softmax(reference_penalty(logits.astype(np.float64), seen, config.repetition_penalty))
    config = dataclasses.replace(config, top_k=min(config.top_k, len(vocabulary)))
    return processed(logits, seen, config)


def test_children_are_the_gumbel_top_k(drawn):
    tree, sampler, choices, vocabulary = drawn
    ordered = [(), *sorted(choices, key=lambda path: (len(path), path))]
    children = {path: [i for i, one in enumerate(ordered) if one and one[:-1] == path] for path in ordered}
    gumbel = partial(jax.random.gumbel, shape=(len(vocabulary),))
    noise = [noise_for(sampler, sampling.DRAWN, level, gumbel) for level in range(DEPTH)]
    padded = 0
    for row in range(ROWS):
        warm = CONFIGS[row % len(CONFIGS)].temperature > 0
        paths, scores = {(): []}, {(): 0.0}
        for ranks, path_nodes in children.items():
            if not path_nodes or ranks not in paths:
                continue
            path = paths[ranks]
            q = draft_probabilities(row, path, vocabulary)
            stated = np.exp(np.asarray(tree.proposals)[row, int(tree.proposal_of[row, ordered.index(ranks)])])
            np.testing.assert_allclose(stated, q, atol=1e-5)
            with np.errstate(divide="ignore"):
                order = np.argsort(-(np.log(q) + warm * noise[len(path)][row]), kind="stable")
            for place, node in enumerate(path_nodes):
                pick = order[place]
                if q[pick] == 0:
                    padded += 1
                    assert int(tree.parents[row, node]) == NO_PARENT
                    continue
                assert int(tree.tokens[row, node]) == vocabulary[pick]
                assert int(tree.parents[row, node]) == ordered.index(ranks)
                paths[ordered[node]] = [*path, int(vocabulary[pick])]
                scores[ordered[node]] = scores[ranks] + np.log(q[pick])
                np.testing.assert_allclose(tree.log_scores[row, node], scores[ordered[node]], atol=1e-4)
    assert padded > 0 or choices == CHAIN
    assert (tree.vocabulary is None) == (len(vocabulary) == V)


def slow_descent(tree, row, node, p, uniforms, residual):
    """Recursive rejection with a list of probabilities: the token, and the node that carries it or None."""
    q = np.zeros(V)
    stated = np.exp(np.asarray(tree.proposals, np.float64)[row, int(tree.proposal_of[row, node])])
    q[IDS if tree.vocabulary is None else np.asarray(tree.vocabulary)] = stated
    for child in np.flatnonzero(np.asarray(tree.parents)[row] == node):
        token = int(tree.tokens[row, child])
        if q[token] > 0 and uniforms[child] < p[token] / q[token]:
            return token, int(child)
        p = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
        q[token] = 0
        q = q / (q.sum() or 1)
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(p) + residual)), None


def test_the_walk_is_recursive_rejection(drawn):
    tree, sampler, choices, _ = drawn
    depth, nodes = max(map(len, choices)), tree.tokens.shape[1]
    logits = jnp.asarray(TARGET)[tree.tokens]
    found = jax.jit(
        lambda tree: walk(tree, of_nodes(logits), rejection.by_rejection(tree, sampler), depth, seen=sampler.seen)
    )(tree)
    shapes = [(sampling.ACCEPTED, jax.random.uniform, nodes), (sampling.RESIDUAL, jax.random.gumbel, V)]
    uniforms, residuals = (
        [noise_for(sampler, tag, level, partial(make, shape=(size,))) for level in range(depth + 1)]
        for tag, make, size in shapes
    )
    counts = []
    for row in range(ROWS):
        config, node, tokens = CONFIGS[row % len(CONFIGS)], ROOT, []
        while node is not None:
            level, seen = len(tokens), [*before(row), *tokens]
            raw = TARGET[int(tree.tokens[row, node])]
            if config.temperature > 0:
                p = processed(raw, seen, config)
            else:
                p = np.eye(V)[np.argmax(reference_penalty(raw, seen, config.repetition_penalty))]
            assert int(found.path[row, level]) == node
            token, node = slow_descent(tree, row, node, p, uniforms[level][row], residuals[level][row])
            assert int(found.tokens[row, level]) == token
            np.testing.assert_allclose(found.logprobs[row, level], np.log(softmax(raw)[token]), rtol=1e-4)
            tokens.append(token)
        assert int(found.count[row]) == len(tokens)
        counts.append(len(tokens))
    assert len(set(counts)) > 2


def test_a_residual_without_mass_is_the_target_itself():
    """The draft holds the target's token as certain to the last bit, and its one child carries another."""
    logits = jnp.asarray([[30.0, 0.0, 0.0]])
    tree = Tree(
        tokens=jnp.asarray([[0, 1]]),
        parents=jnp.asarray([[NO_PARENT, ROOT]]),
        depths=jnp.asarray([[0, 1]]),
        log_scores=jnp.zeros((1, 2)),
        proposals=jnp.asarray([[[0.0, -20.0, -jnp.inf]]]),
        proposal_of=jnp.zeros((1, 2), jnp.int32),
    )
    sampler = sampler_for([ej.SamplingConfig()], 1, jnp.ones(1, jnp.int32))
    found = walk(tree, of_nodes(jnp.stack([logits, logits], axis=1)), rejection.by_rejection(tree, sampler), depth=1)
    assert (found.count.tolist(), found.tokens[0, 0].tolist()) == ([1], 0)


# --- In the engine ----------------------------------------------------------------------------------------------------

PROMPTS = random_prompts(8, lengths=(1, 3, 8, 21), seed=12)
HALF_GREEDY = [
    ej.SamplingConfig(temperature=float(row % 2), repetition_penalty=1.1 if row % 4 > 1 else 1.0) for row in range(8)
]
SAMPLED = ej.TreeConfig(kind="static", choices=TREE, children="sampled")


@pytest.fixture(scope="module")
def narrow(target):
    """A head with a draft vocabulary."""
    return make_head(target, vocabulary=np.array([0, 1, 2, 3, 5, 8, 9, 12, 13]))


@pytest.fixture(scope="module")
def greedy_rows():
    return [row for row, config in enumerate(HALF_GREEDY) if config.temperature == 0]


@pytest.mark.parametrize("drafts", [pytest.param("head", marks=SLOW), "narrow"])
def test_greedy_rows_beside_drawn_ones_are_plain(target, greedy_rows, drafts, request):
    options = {"max_new_tokens": 32, "sampling": HALF_GREEDY, "seed": 3}
    plain, done = (
        ej.generate(target, h, PROMPTS, tree=SAMPLED, **options) for h in (None, request.getfixturevalue(drafts))
    )
    assert [done[row].token_ids for row in greedy_rows] == [plain[row].token_ids for row in greedy_rows]
    assert mean_accepted([done[row] for row in greedy_rows]) > 0.1
    assert mean_accepted(done) > 0.1
    assert all(len(row.token_ids) == 32 and np.isfinite(row.logprobs).all() for row in done)


def test_a_greedy_batch_is_that_of_best_children(target, head):
    plain, done, best = (
        ej.generate(target, h, PROMPTS, max_new_tokens=32, tree=tree)
        for h, tree in ((None, SAMPLED), (head, SAMPLED), (head, dataclasses.replace(SAMPLED, children="best")))
    )
    assert ids(done) == ids(plain)
    assert [row.accepted for row in done] == [row.accepted for row in best]


def test_a_drawn_row_is_its_single_run(target, narrow):
    """Draws, too, are a function of the row's own key."""
    options = {"max_new_tokens": 32, "tree": SAMPLED}
    rows = ej.generate(target, narrow, PROMPTS, seed=list(range(8)), sampling=HALF_GREEDY, **options)
    alone = ej.generate(target, narrow, PROMPTS[5], seed=[5], sampling=HALF_GREEDY[5], **options)
    assert rows[5].token_ids == alone.token_ids and rows[5].accepted == alone.accepted


@SLOW
@pytest.mark.parametrize("kind", ["chain", "static"])
def test_the_engines_law_is_the_targets(kind):
    """The prefill's token and those of the rounds after it, with a head that has learned nothing."""
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    target = make_target(seed=2, num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=32, **sizes)
    prompt = [0, 3, 5]
    tree = ej.TreeConfig(kind=kind, nodes=3, depth=2, children="sampled")
    seeds = list(range(DRAWS))
    done = ej.generate(
        target, make_head(target), [prompt] * DRAWS, max_new_tokens=3, sampling=WARM, tree=tree, seed=seeds
    )
    counts = np.zeros((V,) * 3, np.int64)
    np.add.at(counts, tuple(np.asarray(ids(done)).T), 1)
    pairs = list(itertools.product(range(V), repeat=2))
    laws = softmax(full_logits(target, [prompt + list(pair) for pair in pairs])[:, 2:].astype(np.float64))
    laws = laws.reshape(V, V, 3, V)
    law = laws[0, 0, 0][:, None, None] * laws[:, 0, 1][:, :, None] * laws[:, :, 2]
    assert mean_accepted(done) > 0.1
    assert p_value(counts, law) > 1e-3


# --- What is refused --------------------------------------------------------------------------------------------------


def test_a_dynamic_tree_is_not_sampled():
    with pytest.raises(ValueError, match="children is 'sampled', but kind is 'dynamic'"):
        ej.TreeConfig(children="sampled")


def test_children_are_best_or_sampled():
    with pytest.raises(ValueError, match="children is 'worst'"):
        ej.TreeConfig(kind="chain", children="worst")  # pyright: ignore[reportArgumentType]
