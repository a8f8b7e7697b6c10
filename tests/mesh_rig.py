"""What the tests of meshes run in processes of their own: `python mesh_rig.py JOB OUTPUT [options as JSON]`.

A job leaves its arrays in OUTPUT, a NumPy archive.
"""

import dataclasses
import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rig import tiny_config

from eagle_jax import (
    Head,
    Target,
    checkpoint,
    distributed,
    features,
    generate,
    load_target,
    pipeline,
    sharding,
    shards,
    training,
    weights,
)
from eagle_jax.features import features_of

CONFIG = tiny_config(vocab_size=64, num_attention_heads=8)  # 8 heads, 2 key-value heads
RULES = sharding.ShardingRules(key_dim=CONFIG.key_dim)
CUBE = sharding.MeshConfig(data=2, fsdp=2, tensor=2)
RECIPE = training.TrainConfig(steps=20, learning_rate=1e-3, warmup_steps=0, final_learning_rate=1.0)
# Where a gradient is nearly 0, Adam makes a whole step of its rounding: parameters are compared after smaller ones.
SMALL = dataclasses.replace(RECIPE, learning_rate=1e-4)
ROWS, LENGTH = 8, 24


def sample(index):
    """Row `index` of the data set: ids, and which of them the assistant wrote; padded at its end."""
    rng = np.random.default_rng(index)
    tokens = rng.integers(0, CONFIG.vocab_size, LENGTH).astype(np.int32)
    place = np.arange(LENGTH)
    return tokens, (place >= rng.integers(2, 8)) & (place < rng.integers(12, LENGTH + 1))


def batch_of(step, rows):
    """Some rows of a step's batch, and their ids in the data set."""
    ids = np.arange(step * ROWS, (step + 1) * ROWS)[rows]
    tokens, assistant = (np.stack(column) for column in zip(*map(sample, ids), strict=True))
    return ids, tokens, assistant


def flat(tree):
    """Arrays on the host by dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(sharding.to_host(tree))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def train(mesh, steps=RECIPE.steps, recipe=RECIPE, target=None):
    """Steps from the same start on a mesh, or on one device: arrays by name, and the head."""
    target = Target.random(CONFIG) if target is None else target
    head = Head.random(target, seed=1)
    (target_graphdef, target_params), (graphdef, params) = nnx.split(target.model), nnx.split(head.model)
    ends, init, step = head.ends, partial(training.init_state, config=recipe), training.train_step
    if mesh is None:
        state = init(params)
        step = partial(step, graphdef=graphdef, config=recipe)
    else:
        target_params, ends, params = (sharding.shard(tree, mesh, RULES) for tree in (target_params, ends, params))
        state = sharding.create(init, params, mesh=mesh, rules=RULES)
        step = sharding.in_place(partial(step, graphdef=graphdef, config=recipe), state)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    losses, ids, found = [], [], {}
    for number in range(steps):
        rows = slice(0, ROWS) if mesh is None else sharding.process_rows(mesh, ROWS)
        own, *arrays = batch_of(number, rows)
        tokens, assistant = arrays if mesh is None else sharding.shard_batch(arrays, mesh, ROWS)
        batch = training.Batch(tokens, assistant, features_of(target_graphdef, target_params, tokens))
        state, metrics = step(state, ends, batch)
        losses.append(float(metrics["loss"]))
        ids.append(own)
        if number == 0:
            # After one step a moment is the gradient, clipped, times a constant.
            first = {f"first/{name}": leaf for name, leaf in flat(state.optimizer).items() if ".mu." in name}
    assert places == jax.tree.map(lambda leaf: leaf.sharding, state)
    found = first | {f"last/{name}": leaf for name, leaf in flat(state.head).items()}
    return found | {"losses": np.array(losses), "ids": np.concatenate(ids)}, state


def on(mesh, job, *args, **options):
    with jax.set_mesh(mesh):
        return job(mesh, *args, **options)


def named(prefix, arrays):
    return {f"{prefix}/{name}": value for name, value in arrays.items()}


def cube(output, options):
    """2 x 2 x 2 devices and one, AdamW and Muon; the head saved from the cube, and one saved elsewhere read back."""
    mesh = sharding.make_mesh(CUBE)
    one, _ = train(None)
    eight, state = on(mesh, train)
    kernel = state.head["layers"][0]["mlp"]["gate_proj"]["kernel"][...]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    head = Head.random(Target.random(CONFIG), seed=1)
    trained = dataclasses.replace(head, model=nnx.merge(nnx.graphdef(head.model), state.head))
    checkpoint.save_head(trained, options["save"], dtype=jnp.float32)
    muon = dataclasses.replace(RECIPE, optimizer="muon")
    found = named("one", one) | named("eight", eight)
    found |= named("muon_one", train(None, 4, muon)[0]) | named("muon_eight", on(mesh, train, 4, muon)[0])
    loaded = checkpoint.load_head(options["load"], Target.random(CONFIG), mesh=mesh)
    assert len(loaded.model.fc.kernel[...].sharding.device_set) == 8
    np.savez(output, **found, **named("loaded", flat(nnx.state(loaded.model))))


def counted_reads():
    """Bytes that are read of safetensors from here on: the bytes of every part, by tensor."""
    read, counts = weights.StoredTensor.read, {}

    def counting(tensor, index=None):
        part = read(tensor, index)
        counts.setdefault(tensor.name, []).append(part.nbytes)
        return part

    weights.StoredTensor.read = counting
    return counts


def load(output, options):
    """A target read onto the cube: its parameters, what was read of each tensor, what it decodes."""
    counts = counted_reads()
    mesh = sharding.make_mesh(CUBE)
    target = load_target(options["load"], mesh=mesh)
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(nnx.state(target.model)):
        for part in leaf.addressable_shards:
            held[part.device] += part.data.nbytes
    text = generate(target, Head.random(target), [1, 2, 3], max_new_tokens=12).token_ids
    read = {name: np.array(parts) for name, parts in counts.items()}
    facts = {"held": np.array(list(held.values())), "text": np.array(text)}
    graphdef, params = nnx.split(Target.random(tiny_config(num_local_experts=4, num_experts_per_tok=2)).model)
    tokens = np.random.default_rng(0).integers(0, 16, (8, 12))
    facts["mixture_one"] = np.array(features_of(graphdef, params, tokens))
    with jax.set_mesh(mesh):
        arrays = sharding.shard(params, mesh), sharding.shard_batch(tokens, mesh, 8)
        facts["mixture"] = sharding.to_host(features_of(graphdef, *arrays))
    dequantised = load_target(options["gguf"], mesh=mesh)
    facts |= named("gguf", flat(nnx.state(dequantised.model)))
    np.savez(output, **named("parameters", flat(nnx.state(target.model))), **named("read", read), **facts)


def process(output, options):
    """One of several processes, a device each: reads the target, trains on its share of the rows."""
    distributed.start(distributed.ProcessConfig(**options["processes"]))
    assert jax.process_count() == 2 and len(jax.local_devices()) == 1
    mesh = sharding.make_mesh(sharding.MeshConfig(**options["mesh"]))
    counts = counted_reads()
    target = load_target(options["load"], mesh=mesh)
    found, _ = on(mesh, train, 4, SMALL, target)
    np.savez(output, **found, read=np.array(sum(map(sum, counts.values()))))


def single(output, options):
    """What `process` does, by one process."""
    np.savez(output, **train(None, 4, SMALL, load_target(options["load"]))[0])


def script(output, options):
    """train_head.py as it is, with small shards: which rows were read by this process and what for."""
    read, identity, found, claims = pipeline.Pipeline._read, features._identity, [], []

    def reading(self, step):
        use = "features" if self._features is None else "training"
        found.extend(f"{use} {self._rows[index].tokens.tolist()}" for index in step.rows.flat if index >= 0)
        return read(self, step)

    pipeline.Pipeline._read = reading
    features._identity = lambda *args: claims.append(1) or identity(*args)
    shards.SHARD_TOKENS = options["shard_tokens"]
    features.LATE = 0.0
    if options["full"]:
        shards._save_array = lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    sys.argv = ["train_head.py", *options["arguments"]]
    runpy.run_path(str(Path(__file__).parents[1] / "train/train_head.py"), run_name="__main__")
    np.savez(output, read=np.array(found), claims=len(claims))


def embedded(output, options):
    """One step with the shapes of the embedded target, its 9 query and 3 key-value heads over 3 devices."""
    global CONFIG
    CONFIG = tiny_config(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    global RULES
    RULES = sharding.ShardingRules(key_dim=CONFIG.key_dim)
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=1, tensor=3))
    found, state = on(mesh, train, 1)
    keys = state.head["layers"][0]["self_attn"]["k_proj"]["kernel"][...]
    assert keys.addressable_shards[0].data.shape == (576, 64)
    np.savez(output, losses=found["losses"], one=train(None, 1)[0]["losses"])


if __name__ == "__main__":
    jobs = {job.__name__: job for job in (cube, load, process, single, script, embedded)}
    jobs[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
