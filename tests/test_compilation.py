"""How often programs are compiled, what they hold in memory, and when the host waits."""

import collections

import jax
import jax.numpy as jnp
from engine_rig import compilations, ids, loop_and_layer_bytes, make_head, make_target, random_prompts
from flax import nnx
from rig import tiny_target

import eagle_jax as ej
from eagle_jax import decoding, generation, training
from eagle_jax.target import features_of

TREE = ej.TreeConfig(nodes=5, depth=2, top_k=2)  # no other test's, so that its programs are new
PROMPTS = random_prompts(4, seed=10)


def test_J1_prompt_lengths_compile_once_a_bucket(target, head):
    prompts = random_prompts(20, lengths=range(3, 123, 6), seed=11)
    buckets = {32, 64, 128}
    assert {generation.length_bucket(len(prompt)) for prompt in prompts} == buckets

    def run():
        with compilations() as compiled:
            for prompt in prompts:
                ej.generate(target, head, prompt, max_new_tokens=16, tree=TREE)
        return compiled

    counts = collections.Counter(run())
    for function in ("init_state", "first_token", "run_rounds"):
        assert sum(n for name, n in counts.items() if function in name) == len(buckets), function
    assert max(counts.values()) == len(buckets), counts
    assert run() == []


def test_settings_compile_nothing(target, head):
    """Temperatures, filters' values, seeds, end tokens and limits are traced."""

    def run(temperature, top_p, seed, ends, most):
        config = ej.SamplingConfig(temperature=temperature, top_p=top_p)
        options = {"max_new_tokens": most, "sampling": config, "seed": seed, "tree": TREE}
        ej.generate(make_target(eos=ends), head, PROMPTS, **options)

    run(1.0, 0.9, 0, (1,), 16)
    make_target(eos=(2,))
    with compilations() as compiled:
        run(0.3, 0.5, 7, (2,), 9)
    assert compiled == []


def test_the_host_waits_only_at_the_end(monkeypatch, target, head):
    """All rounds are one call, and it moves nothing between host and device."""
    calls = []
    run_rounds = decoding.run_rounds

    def guarded(*args, **kwargs):
        calls.append(kwargs)
        with jax.transfer_guard("disallow"):
            return run_rounds(*args, **kwargs)

    monkeypatch.setattr(decoding, "run_rounds", guarded)
    done = ej.generate(target, head, PROMPTS, max_new_tokens=24, tree=TREE)
    assert len(calls) == 1
    assert max(row.rounds for row in done) > 1


def test_a_round_copies_no_cache():
    """What the compiled loop needs beside its state is less than the keys and values of one layer."""
    slots = 8192
    target = tiny_target(
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=slots,
    )
    tree = ej.TreeConfig(nodes=6, depth=2, top_k=2)
    temporary, layer = loop_and_layer_bytes(target, ej.Head.random(target), tree, slots)
    assert temporary < layer


def test_J4_parameters_outlive_generations(target, head):
    first, second = (ids(ej.generate(target, head, PROMPTS, max_new_tokens=24, tree=TREE)) for _ in range(2))
    assert first == second


def test_J4_parameters_outlive_a_train_step():
    """A step, an evaluation and two generations: with the head as it was and as it became."""
    target = make_target()
    head = make_head(target)
    before = ids(ej.generate(target, head, PROMPTS, max_new_tokens=24, tree=TREE))
    tokens = jnp.asarray(random_prompts(2, lengths=(12,)), jnp.int32)
    features = features_of(*nnx.split(target.model), tokens)
    batch = training.Batch(tokens=tokens, assistant=jnp.ones(tokens.shape, bool), features=features)
    graphdef, params = nnx.split(head.model)
    config = training.TrainConfig(steps=2, warmup_steps=0)
    state = training.init_state(params, config)
    for _ in range(2):
        state, metrics = training.train_step(state, head.ends, batch, graphdef=graphdef, config=config)
        [sums] = training.evaluate_step(state.head, head.ends, batch, graphdef=graphdef)
        assert jnp.isfinite(metrics["loss"]) and sums.count == metrics["pairs"]
    trained = ej.Head(config=head.config, model=nnx.merge(graphdef, state.head), ends=head.ends)
    for each in (head, trained):
        assert ids(ej.generate(target, each, PROMPTS, max_new_tokens=24, tree=TREE)) == before
