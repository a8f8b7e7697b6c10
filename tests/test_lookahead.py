"""Lookahead's trees, window and pool over many rounds, against a simulation with lists and dictionaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import greedy_sampler
from test_lookup import committed, seen
from test_trie import paths_of

import eagle_jax as ej
from eagle_jax.lookahead import LookaheadDrafter
from eagle_jax.tree import NO_PARENT

# So small that windows merge, buckets are shared and entries are replaced.
OPTIONS = ej.Lookahead(window=4, levels=3, guesses=2, buckets=3)
DRAFTER = LookaheadDrafter(options=OPTIONS)
NEXT = np.random.default_rng(3).integers(0, 6, (6, 6))  # the target: the next token follows from the last two
TEXTS = [[0, 3, 1, 5, 2], [2], [4, 4, 1]]
ROUNDS = 14


def best(text):
    return int(NEXT[text[-2] if len(text) > 1 else 0, text[-1]])


class Simulation:
    """One row."""

    def __init__(self, text):
        self.text = list(text)  # root included
        self.rows = [[None] * OPTIONS.window for _ in range(OPTIONS.levels)]
        self.pool = {bucket: [None] * OPTIONS.guesses for bucket in range(OPTIONS.buckets)}
        self.turn = dict.fromkeys(self.pool, 0)

    def paths(self):
        """All paths of the tree, the window's and the n-grams'."""
        drawn = np.random.default_rng(0).integers(0, 2**20, (OPTIONS.levels, OPTIONS.window))
        run = len(self.text) - 1
        for row, places in zip(self.rows, drawn, strict=True):
            for column, place in enumerate(places):
                if row[column] is None:
                    row[column] = self.text[(place + run) % run]
        found = {()}
        for column in range(OPTIONS.window):
            whole = self.column(column)
            found |= {whole[:length] for length in range(1, len(whole) + 1)}
        for gram in self.pool[self.text[-1] % OPTIONS.buckets]:
            if gram and gram[0] == self.text[-1]:
                found |= {gram[1 : length + 1] for length in range(1, OPTIONS.levels + 1)}
        return found

    def column(self, column):
        """The path to the bottom of a column."""
        return (*self.rows[0][: column + 1], *(row[column] for row in self.rows[1:]))

    def round(self, paths):
        """The target's round: gives the accepted tokens."""
        accepted = ()
        while (*accepted, token := best([*self.text, *accepted])) in paths:
            accepted = (*accepted, token)
        new = [best([*self.text, *self.column(column)]) for column in range(OPTIONS.window)]
        rows = [*self.rows, new]
        for column in range(OPTIONS.window):
            gram = tuple(row[column] for row in rows)
            bucket = gram[0] % OPTIONS.buckets
            if gram not in self.pool[bucket]:
                self.pool[bucket][self.turn[bucket]] = gram
                self.turn[bucket] = (self.turn[bucket] + 1) % OPTIONS.guesses
        self.rows = [row[len(accepted) :] + [None] * min(len(accepted), OPTIONS.window) for row in rows[1:]]
        self.text += [*accepted, token]
        return accepted


def choices_of(tree, texts):
    """The target's best token after every node."""
    choices = np.zeros(tree.tokens.shape, np.int32)
    for row, text in enumerate(texts):
        for path, node in paths_of(tree, row).items():
            choices[row, node] = best([*text, *path])
    return choices


@pytest.fixture(scope="module")
def played():
    """All rounds: trees against the simulation, and the state that comes of them."""
    texts = [[*text, best(text)] for text in TEXTS]
    rows = [Simulation(text) for text in texts]
    propose, observe = jax.jit(DRAFTER.propose), jax.jit(DRAFTER.observe)
    state, accepted, merged = seen(DRAFTER, (), texts, 4), [], 0
    for _ in range(ROUNDS):
        root = jnp.asarray([row.text[-1] for row in rows])
        tree, state = propose((), state, root, greedy_sampler(len(rows)))
        tree, expected = jax.device_get(tree), [row.paths() for row in rows]
        assert [set(paths_of(tree, i)) for i in range(len(rows))] == expected
        merged += np.count_nonzero(tree.parents[:, 1:] == NO_PARENT)
        choices = choices_of(tree, [row.text for row in rows])
        before = [row.text[-1] for row in rows]
        news = [row.round(paths) for row, paths in zip(rows, expected, strict=True)]
        tokens = [(first, *new) for first, new in zip(before, news, strict=True)]
        state = observe((), state, committed(tokens, DRAFTER.depth + 1, choices))
        accepted += map(len, news)
    return rows, state, accepted, merged


def test_trees_are_the_simulations(played):
    """Rounds accept nothing, an n-gram, and more than one holds, which only the window's row 0 can give."""
    _, _, accepted, merged = played
    assert {0, 1} <= set(accepted) and max(accepted) > OPTIONS.levels
    assert merged > 0


def test_the_pool_and_the_window_are_the_simulations(played):
    rows, state, _, _ = played
    state = jax.device_get(state)
    for i, row in enumerate(rows):
        assert state.history.tokens[i, : state.history.count[i]].tolist() == row.text[:-1]
        assert state.window[i].tolist() == [[-1 if token is None else token for token in each] for each in row.rows]
        for bucket, grams in row.pool.items():
            for entry, gram in enumerate(grams):
                held = (int(state.pool.keys[i, bucket, entry]), *state.pool.rests[i, bucket, entry].tolist())
                assert gram == held if gram else held[0] == -1


def test_a_text_becomes_plain(played):
    rows, *_ = played
    for text, row in zip(TEXTS, rows, strict=True):
        plain = [*text]
        while len(plain) < len(row.text):
            plain.append(best(plain))
        assert row.text == plain


def test_rewinding_forgets_what_was_guessed(played):
    rows, state, *_ = played
    length = jnp.asarray([3, 1, 99])
    kept, known = DRAFTER.rewind((), state, length)
    whole = len(rows[2].text) - 1
    assert known.tolist() == [3, 1, whole]
    texts = [row.text[: n + 1] for row, n in zip(rows, [3, 1, whole], strict=True)]
    root, propose = jnp.asarray([text[-1] for text in texts]), jax.jit(DRAFTER.propose)
    trees = [propose((), each, root, greedy_sampler(3))[0] for each in (kept, seen(DRAFTER, (), texts, 4))]
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.parametrize("name", ["window", "levels", "guesses", "buckets"])
def test_senseless_options_are_refused(name):
    with pytest.raises(ValueError, match=f"Lookahead.{name} is 0; it must be at least 1"):
        ej.Lookahead(**{name: 0})
