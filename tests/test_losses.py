"""The training loss against NumPy in float64, and what it leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import losses

B, P, E, W = 2, 7, 6, 11


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    predicted, wanted = (rng.normal(size=(B, P, E)).astype(np.float32) * 2 for _ in range(2))
    mask = rng.uniform(size=(B, P)) < 0.6
    head = rng.normal(size=(W, E)).astype(np.float32)
    return predicted, wanted, mask, head


def reference(predicted, wanted, mask, head):
    predicted, wanted, head = (x.astype(np.float64) for x in (predicted, wanted, head))
    total = np.zeros(5)
    for b, j in np.argwhere(mask):
        error = np.abs(predicted[b, j] - wanted[b, j])
        regression = np.where(error < 1, error**2 / 2, error - 0.5).mean()
        teacher, student = head @ wanted[b, j], head @ predicted[b, j]
        p = np.exp(teacher) / np.exp(teacher).sum()
        log_q = student - np.log(np.exp(student).sum())
        rank = np.argsort(-student).tolist().index(int(teacher.argmax()))
        total += [regression, -(p * log_q).sum(), rank < 1, rank < 3, 1]
    return total


@pytest.mark.parametrize("chunk", [1, 4, 14, 64])
def test_sums_equal_numpy_for_every_chunk_size(chunk):
    sums = losses.loss_sums(*map(jnp.asarray, inputs()), chunk=chunk)
    np.testing.assert_allclose(sums, reference(*inputs()), rtol=1e-5)


def test_gradient_equals_that_of_the_plain_formula():
    predicted, wanted, mask, head = map(jnp.asarray, inputs())

    def plain(predicted):
        error = jnp.abs(predicted - wanted)
        regression = jnp.where(error < 1, error**2 / 2, error - 0.5).mean(-1)
        log_q = jax.nn.log_softmax(predicted @ head.T)
        entropy = -jnp.sum(jax.nn.softmax(wanted @ head.T) * log_q, -1)
        return jnp.sum((regression + 0.3 * entropy) * mask)

    def ours(predicted):
        sums = losses.loss_sums(predicted, wanted, mask, head, chunk=4)
        return sums.regression + 0.3 * sums.cross_entropy

    np.testing.assert_allclose(jax.grad(ours)(predicted), jax.grad(plain)(predicted), atol=1e-5)


def test_no_gradient_flows_into_the_wanted_features_or_the_lm_head():
    predicted, wanted, mask, head = map(jnp.asarray, inputs())

    def total(wanted, head):
        sums = losses.loss_sums(predicted, wanted, mask, head)
        return sums.regression + sums.cross_entropy

    for gradient in jax.grad(total, argnums=(0, 1))(wanted, head):
        assert not np.any(gradient)


def test_T1_pair_mask_marks_the_pairs_whose_two_tokens_are_the_assistants():
    """Tokens 2..4 of six are the assistant's: pair 1 = (f1, t2) -> t3 and pair 2 = (f2, t3) -> t4 carry loss."""
    assistant = jnp.asarray([[False, False, True, True, True, False]])
    np.testing.assert_array_equal(losses.pair_mask(assistant), [[False, True, True, False, False]])


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_memory_does_not_grow_with_the_batch_and_the_vocabulary(labels):
    """4 arrays of a chunk's logits; of all pairs' logits a single one would be more."""
    pairs, vocabulary = 16384, 32768

    def entropy(predicted, wanted, mask, lm_head, labels):
        return losses.loss_sums(predicted, wanted, mask, lm_head, labels).cross_entropy

    shapes = [jax.ShapeDtypeStruct((1, pairs, 4), jnp.float32)] * 2
    shapes += [jax.ShapeDtypeStruct((1, pairs), bool), jax.ShapeDtypeStruct((vocabulary, 4), jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((1, pairs), jnp.int32) if labels == "hard" else None]
    temporary = jax.jit(jax.grad(entropy)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4.1 * losses.LOGITS_BYTES < 4 * pairs * vocabulary


# --- Heads with a matrix of their own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("chunk", [4, 64])
def test_a_matrix_of_the_heads_own_against_the_plain_formula(chunk, hard):
    """Sums and both gradients: that of what is multiplied, and the matrix's, which adds up over chunks."""
    hidden, wanted, mask, head = map(jnp.asarray, inputs())
    matrix = jnp.asarray(np.random.default_rng(1).normal(size=(W, E)), jnp.float32)
    labels = jnp.asarray(np.random.default_rng(2).integers(-1, W, (B, P))) if hard else None

    def plain(hidden, matrix):
        log_q = jax.nn.log_softmax(hidden @ matrix.T)
        if labels is None:
            return jnp.sum(-jnp.sum(jax.nn.softmax(wanted @ head.T) * log_q, -1) * mask)
        own = jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return jnp.sum(-own * mask * (labels >= 0))

    def ours(hidden, matrix):
        return losses.token_sums(hidden, matrix, wanted, mask, head, labels, chunk=chunk).cross_entropy

    sums = losses.token_sums(hidden, matrix, wanted, mask, head, labels, chunk=chunk)
    np.testing.assert_allclose(sums.cross_entropy, plain(hidden, matrix), rtol=1e-5)
    best = np.argmax(wanted @ head.T, -1) == np.argmax(hidden @ matrix.T, -1)
    assert (sums.top1, sums.count, sums.regression) == (np.sum(best & mask), np.sum(mask), 0)
    for one, two in zip(*(jax.grad(f, argnums=(0, 1))(hidden, matrix) for f in (ours, plain)), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_pairs_that_reach_further_need_more_of_the_assistants_tokens():
    """Tokens 1..4 of six are the assistant's; two steps on from token 0 are tokens 2 and 3, from token 1 3 and 4."""
    assistant = jnp.asarray([[False, True, True, True, True, False]])
    np.testing.assert_array_equal(losses.pair_mask(assistant, 2), [[True, True, False, False, False]])
    np.testing.assert_array_equal(losses.pair_mask(assistant, 9), [[False] * 5])
    np.testing.assert_array_equal(losses.ahead(jnp.arange(6)[None], 2), [[2, 3, 4, 5, 0]])
