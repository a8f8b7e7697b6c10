"""A draft model of its own: it proposes what its whole forward says, the text is the target's, and it can go back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import (
    Letters,
    full_logits,
    greedy_sampler,
    ids,
    in_bfloat16,
    loop_and_layer_bytes,
    make_target,
    mean_accepted,
    random_prompts,
)
from flax import nnx
from rig import tiny_target

import eagle_jax as ej
from eagle_jax import draft, generation
from eagle_jax.config import FULL, SLIDING
from eagle_jax.tree import ROOT

SLOW = pytest.mark.slow
CHAIN = ej.TreeConfig(kind="chain", nodes=4, depth=3)
TREES = {
    "chain": CHAIN,
    "static": ej.TreeConfig(kind="static", choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))),
    "dynamic": ej.TreeConfig(nodes=10, depth=3, top_k=3),
}
DEPTH = 3


@pytest.fixture(scope="module")
def small():
    """A smaller model of the target's vocabulary."""
    return make_target(seed=7, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2)


# --- Proposals --------------------------------------------------------------------------------------------------------

TOKENS = random_prompts(2, lengths=(16,), seed=9)


def committed(begins, counts, width):
    """Tokens from a place on, `counts` of them, padded with tokens of no meaning; features of no use to it."""
    runs = [
        [TOKENS[row][b + i] if i <= n else 3 for i in range(width + 1)]
        for row, (b, n) in enumerate(zip(begins, counts, strict=True))
    ]
    tokens = jnp.asarray(runs, jnp.int32)
    return draft.Committed(tokens[:, :-1], jnp.ones((2, width, 64)), tokens[:, 1:], jnp.asarray(counts, jnp.int32))


def check_tree(model, tree, lengths, kind):
    """Every node's score is that of its path in one whole forward; a chain is the model's own greedy text."""
    for row, length in enumerate(lengths):
        parents, tokens = np.asarray(tree.parents)[row], np.asarray(tree.tokens)[row]
        assert tokens[ROOT] == TOKENS[row][length - 1]
        paths = {ROOT: []}
        for node in range(1, len(tokens)):
            paths[node] = [*paths[parents[node]], int(tokens[node])]
        padded = [[*TOKENS[row][:length], *path, *[0] * (DEPTH - len(path))] for path in paths.values()]
        logits = full_logits(model, padded)[:, length - 1 :].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for node, path in paths.items():
            score = sum(log_probs[node, level, token] for level, token in enumerate(path))
            np.testing.assert_allclose(tree.log_scores[row, node], score, atol=1e-4)
        for node, path in paths.items():
            children = sorted((path[-1] for other, path in paths.items() if other and parents[other] == node))
            if kind != "dynamic" or node == ROOT:
                best = np.argsort(-log_probs[node, len(path)])[: len(children)]
                assert children == sorted(best.tolist())


@pytest.mark.parametrize("kind", ["dynamic", *(pytest.param(kind, marks=SLOW) for kind in ("chain", "static"))])
def test_proposals_are_those_of_the_models_whole_forward(small, kind):
    """After prompts of two lengths, one of a single token, and rounds that committed other numbers of tokens."""
    drafter, params = ej.DraftModel(small).bind(make_target(), TREES[kind])
    assert drafter.depth == DEPTH
    prefill, observe, propose = map(jax.jit, (drafter.prefill, drafter.observe, drafter.propose))
    lengths = [5, 1]
    state = prefill(params, drafter.init(params, 2, 32), committed([0, 0], [n - 1 for n in lengths], 8))
    for counts in ([1, 1], [3, 1], [4, 4], [1, 2]):
        state = observe(
            params, state, committed([n - 1 for n in lengths], counts, 1 if counts == [1, 1] else DEPTH + 1)
        )
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        root = jnp.asarray([TOKENS[row][length - 1] for row, length in enumerate(lengths)])
        tree, state = propose(params, state, root, greedy_sampler(2))
        check_tree(small, tree, lengths, kind)


def test_proposals_after_going_back(small):
    """One row forgets tokens that were in the cache, the other none."""
    drafter, params = ej.DraftModel(small).bind(make_target(), CHAIN)
    prefill, observe, propose, rewind = map(
        jax.jit, (drafter.prefill, drafter.observe, drafter.propose, drafter.rewind)
    )
    state = prefill(params, drafter.init(params, 2, 32), committed([0, 0], [4, 2], 8))
    state = observe(params, state, committed([4, 2], [1, 1], 1))
    _, state = propose(params, state, jnp.asarray([TOKENS[0][5], TOKENS[1][3]]), greedy_sampler(2))
    state = observe(params, state, committed([5, 3], [3, 2], DEPTH + 1))
    _, known = rewind(params, state, jnp.asarray([99, 99]))
    assert known.tolist() == [8, 5]
    state, known = rewind(params, state, jnp.asarray([8, 2]))
    assert known.tolist() == [8, 2]
    state = prefill(params, state, committed([8, 2], [2, 4], 8))
    state = observe(params, state, committed([10, 6], [1, 1], 1))
    tree, _ = propose(params, state, jnp.asarray([TOKENS[0][11], TOKENS[1][7]]), greedy_sampler(2))
    check_tree(small, tree, [12, 8], "chain")


# --- The text ---------------------------------------------------------------------------------------------------------

PROMPTS = random_prompts(6, lengths=(1, 3, 8, 21, 40), seed=13)
NEW = 32


@pytest.mark.parametrize("kind", ["chain", *(pytest.param(kind, marks=SLOW) for kind in ("dynamic", "static"))])
def test_the_text_is_the_targets(target, small, kind):
    """Half the rows greedy, half drawn; a row is its single run."""
    sampling = [ej.SamplingConfig(temperature=float(row % 2)) for row in range(len(PROMPTS))]
    options = {"max_new_tokens": NEW, "tree": TREES[kind]}
    seeds = list(range(len(PROMPTS)))
    plain, done = (
        ej.generate(target, head, PROMPTS, sampling=sampling, seed=seeds, **options)
        for head in (None, ej.DraftModel(small))
    )
    assert ids(done) == ids(plain)
    assert mean_accepted(done) > 0.05
    if kind == "chain":
        alone = ej.generate(target, ej.DraftModel(small), PROMPTS[3], sampling=sampling[3], seed=[3], **options)
        assert alone.token_ids == done[3].token_ids and alone.accepted == done[3].accepted


WINDOW = {"num_hidden_layers": 2, "sliding_window": 6, "layer_types": (FULL, SLIDING)}


@pytest.mark.parametrize(
    ("children", "temperature", "overrides"),
    [
        pytest.param("best", 0.0, {}, marks=SLOW),
        ("sampled", 1.0, {}),
        ("best", 1.0, WINDOW),
        pytest.param("sampled", 1.0, WINDOW, marks=SLOW),
    ],
    ids=["greedy", "sampled", "best_window", "sampled_window"],
)
def test_a_target_that_drafts_for_itself_accepts_everything(children, temperature, overrides):
    """Greedy, with the target's noise, and drawn: where draft and target agree no child is ever rejected."""
    target = make_target(**overrides)
    # Drawn children know of the penalty along their own path; ranked ones go without.
    penalty = 1.2 if children == "sampled" else 1.0
    sampling = ej.SamplingConfig(temperature=temperature, top_p=0.95, repetition_penalty=penalty)
    options = {"max_new_tokens": NEW, "sampling": sampling}
    done = ej.generate(
        target,
        ej.DraftModel(target),
        PROMPTS,
        tree=dataclasses.replace(CHAIN, children=children),
        **options,
    )
    assert all(n == DEPTH for row in done for n in row.accepted)
    if children == "best":
        assert ids(done) == ids(ej.generate(target, None, PROMPTS, **options))


def test_first_layers_draft(target):
    """The target's text, from its own first layer; that it shares its weights shows in the arrays."""
    drafts = ej.DraftModel.first_layers(target, 1)
    assert ids(ej.generate(target, drafts, PROMPTS, max_new_tokens=NEW, tree=CHAIN)) == ids(
        ej.generate(target, None, PROMPTS, max_new_tokens=NEW)
    )
    of_target = dict(nnx.to_flat_state(nnx.state(target.model)))
    shared = nnx.to_flat_state(nnx.state(drafts.model.model))
    assert all(leaf[...] is of_target[path][...] for path, leaf in shared)
    assert {path[1] for path, _ in shared if path[0] == "layers"} == {0}


def test_first_layers_are_what_they_say(target):
    """All of them are the target; the first ones are a model whose config says so."""
    tokens = random_prompts(1, lengths=(9,))
    every = ej.DraftModel.first_layers(target, 2).model
    np.testing.assert_array_equal(full_logits(every, tokens), full_logits(target, tokens))
    mixed = make_target(num_hidden_layers=3, sliding_window=4, layer_types=(FULL, SLIDING, FULL))
    first = ej.DraftModel.first_layers(mixed, 1).model
    assert first.config.windows == (None,) and first.config.num_hidden_layers == 1


def test_a_conversation_goes_on_from_what_the_draft_model_knows():
    target = dataclasses.replace(make_target(max_position_embeddings=128), tokenizer=Letters())
    drafts = ej.DraftModel.first_layers(target, 1)
    options = {"max_new_tokens": 12, "max_length": 64, "tree": CHAIN, "seed": 5}
    options["sampling"] = ej.SamplingConfig(temperature=1.2)
    talk = ej.Conversation(target, drafts, **options)
    for turn, message in enumerate(("abc", "l", "hgfed")):
        chat = [*talk.messages, {"role": "user", "content": message}]
        done = talk.ask(message)
        whole = ej.generate(target, drafts, chat, **options)
        assert (done.token_ids, done.accepted) == (whole.token_ids, whole.accepted)
        assert turn == 0 or talk.prefilled < len(generation.encode_prompt(target, chat))


def test_a_round_copies_no_cache_of_the_draft_models():
    slots = 8192
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 64}
    target = tiny_target(max_position_embeddings=slots, **sizes)
    drafts = ej.DraftModel.first_layers(target, 1)
    tree = ej.TreeConfig(kind="chain", nodes=3, depth=2)
    temporary, layer = loop_and_layer_bytes(target, drafts, tree, slots)
    assert temporary < layer


# --- What is refused --------------------------------------------------------------------------------------------------


def test_a_draft_model_fits_its_target(target, small):
    with pytest.raises(ValueError, match="a vocabulary of 16 tokens, but the target random one of 12"):
        ej.DraftModel(small).bind(tiny_target(vocab_size=12), CHAIN)
    with pytest.raises(ValueError, match="is in float32, but the target random in bfloat16"):
        ej.DraftModel(small).bind(in_bfloat16(target), CHAIN)


@pytest.mark.parametrize("n", [0, -1, 3])
def test_first_layers_are_layers_of_the_target(target, n):
    with pytest.raises(ValueError, match=f"asked for {n} layers of random; it has from 1 to 2"):
        ej.DraftModel.first_layers(target, n)
