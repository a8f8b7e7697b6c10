"""The training step against PyTorch's autograd and optimizer, from the same weights on the same batches."""

import dataclasses

import numpy as np
import pytest
from flax import nnx
from rig import tiny_target

import eagle_jax as ej
from eagle_jax import training

RECIPE = training.TrainConfig(
    steps=100, learning_rate=3e-3, warmup_steps=2, final_learning_rate=1.0, noise=0.0, weight_decay=0.01
)


@pytest.mark.parametrize("vocabulary", [None, np.asarray([0, 3, 5, 8, 13], np.int32)])
def test_steps_are_pytorchs(vocabulary):
    pytest.importorskip("torch")
    from test_training import batch_of

    from eagle_jax.peer_training import TorchTraining, published_weights

    target = tiny_target()
    head = ej.Head.random(target, vocabulary=vocabulary)
    graphdef, params = nnx.split(head.model)
    state, peer = training.init_state(params, RECIPE), TorchTraining(head, RECIPE)
    for seed in range(4):
        batch = batch_of(target, seed=seed)
        state, metrics = training.train_step(state, head.ends, batch, graphdef=graphdef, config=RECIPE)
        np.testing.assert_allclose(metrics["loss"], peer(peer.batch(batch)), rtol=1e-5)
    trained = dataclasses.replace(head, model=nnx.merge(graphdef, state.head))
    for name, weight in published_weights(trained).items():
        np.testing.assert_allclose(weight, peer.parameters[name].detach().numpy(), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "other",
    [
        {"unroll": 2},
        {"accumulate": 2},
        {"labels": "hard"},
        {"optimizer": "muon"},
        {"noise": 0.1},
        {"final_learning_rate": 0.5},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_the_peer_does_not_know_is_refused(other):
    pytest.importorskip("torch")
    from eagle_jax.peer_training import TorchTraining

    with pytest.raises(ValueError, match=f"TrainConfig.{next(iter(other))} is .* knows"):
        TorchTraining(ej.Head.random(tiny_target()), dataclasses.replace(RECIPE, **other))


def test_the_peer_is_for_eagles_inputs():
    pytest.importorskip("torch")
    from eagle_jax.peer_training import TorchTraining

    with pytest.raises(ValueError, match="inputs; this head's are 'feature'"):
        TorchTraining(ej.Head.random(tiny_target(), inputs="feature"), RECIPE)
