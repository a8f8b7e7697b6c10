"""Meshes: what lies where, and that eight devices, or two processes, compute what one does."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import gguf_rig
import jax
import jax.numpy as jnp
import mesh_rig
import numpy as np
import pytest
from flax import nnx
from gguf_rig import metadata_of, tensors_of
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from rig import random_weights, tiny_config
from test_repository import CONFIG as LLAMA
from test_repository import pickle_weights, write

import eagle_jax as ej
from eagle_jax import sharding, training
from eagle_jax.distributed import ProcessConfig, start
from eagle_jax.head import HeadModel, config_for
from eagle_jax.target import TargetModel

HERE = Path(__file__).parent


def launch(job, output, devices, **options):
    """Starts a job of `mesh_rig` with so many fake devices."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    return subprocess.Popen(
        [sys.executable, str(HERE / "mesh_rig.py"), job, str(output), json.dumps(options)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_address():
    """Where process 0 of several can be reached."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def arrays_of(*running):
    """What each of the jobs left behind."""
    printed = [process.communicate()[0] for process in running]
    for process, text in zip(running, printed, strict=True):
        assert process.returncode == 0, text
    return [dict(np.load(process.args[3])) for process in running]


def under(prefix, arrays):
    return {name.removeprefix(f"{prefix}/"): value for name, value in arrays.items() if name.startswith(f"{prefix}/")}


def leaves(model):
    return mesh_rig.flat(nnx.state(model))


# --- Rules ------------------------------------------------------------------------------------------------------------


def abstract_mesh(data, fsdp, tensor):
    return AbstractMesh((data, fsdp, tensor), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def specs(tree, sizes, **rules):
    """Partitions by dotted path."""
    mesh = abstract_mesh(*sizes)
    places = sharding.shardings_for(tree, mesh, sharding.ShardingRules(**rules))
    found = jax.tree_util.tree_flatten_with_path(places)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf.spec for path, leaf in found
    }


def shapes_of(make):
    return nnx.state(nnx.eval_shape(make))


def test_every_parameter_has_a_place():
    biased = dict(attention_bias=True, mlp_bias=True, qk_norm=True)
    config = tiny_config(num_attention_heads=8, **biased)
    found = specs(shapes_of(lambda: TargetModel(config, rngs=nnx.Rngs(0))), (2, 2, 2), key_dim=8)
    assert found["embed_tokens.embedding"] == found["lm_head.embedding"] == P("tensor", "fsdp")
    layer = {name.removeprefix("layers.1."): spec for name, spec in found.items() if name.startswith("layers.1.")}
    assert layer == {
        "input_layernorm.scale": P(None),
        "post_attention_layernorm.scale": P(None),
        "self_attn.q_proj.kernel": P("fsdp", "tensor"),
        "self_attn.q_proj.bias": P("tensor"),
        "self_attn.k_proj.kernel": P("fsdp", "tensor"),
        "self_attn.k_proj.bias": P("tensor"),
        "self_attn.v_proj.kernel": P("fsdp", "tensor"),
        "self_attn.v_proj.bias": P("tensor"),
        "self_attn.o_proj.kernel": P("tensor", "fsdp"),
        "self_attn.o_proj.bias": P(None),
        "self_attn.q_norm.scale": P(None),
        "self_attn.k_norm.scale": P(None),
        "mlp.gate_proj.kernel": P("fsdp", "tensor"),
        "mlp.gate_proj.bias": P("tensor"),
        "mlp.up_proj.kernel": P("fsdp", "tensor"),
        "mlp.up_proj.bias": P("tensor"),
        "mlp.down_proj.kernel": P("tensor", "fsdp"),
        "mlp.down_proj.bias": P(None),
    }
    head = specs(shapes_of(lambda: HeadModel(config_for(config), rngs=nnx.Rngs(0))), (2, 2, 2), key_dim=8)
    assert head["fc.kernel"] == P("fsdp", "tensor")
    mixture = tiny_config(num_local_experts=4, num_experts_per_tok=2)
    experts = specs(shapes_of(lambda: TargetModel(mixture, rngs=nnx.Rngs(0))), (1, 2, 2))
    assert experts["layers.0.mlp.router.kernel"] == P("fsdp", None)
    assert experts["layers.0.mlp.experts.3.down_proj.kernel"] == P("tensor", "fsdp")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizers_state_lies_where_its_parameter_does(optimizer):
    config = config_for(tiny_config())
    params = shapes_of(lambda: HeadModel(config, rngs=nnx.Rngs(0)))
    recipe = training.TrainConfig(optimizer=optimizer)
    state = jax.eval_shape(lambda head: training.init_state(head, recipe), params)
    parameters, moments = specs(params, (1, 2, 2)), specs(state, (1, 2, 2))
    for name, spec in parameters.items():
        kept = {path: found for path, found in moments.items() if path.endswith(f".{name}")}
        assert len(kept) >= 2 and set(kept.values()) == {spec}, name


def test_what_does_not_divide_is_repeated():
    config = tiny_config(vocab_size=15)  # 4 heads, 2 key-value heads of 16
    make = lambda: TargetModel(config, rngs=nnx.Rngs(0))  # noqa: E731
    found = specs(shapes_of(make), (1, 1, 4), key_dim=16)
    assert found["embed_tokens.embedding"] == P(None, "fsdp")
    # 32 columns divide by 4, but not without cutting a head.
    assert found["layers.0.self_attn.k_proj.kernel"] == P("fsdp", None)
    assert found["layers.0.self_attn.q_proj.kernel"] == P("fsdp", "tensor")
    assert specs(shapes_of(make), (1, 3, 1))["layers.0.mlp.up_proj.kernel"] == P(None, "tensor")


def test_a_matrix_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match=r"^No sharding is known for adapter\.kernel of 2 dimensions; add it .*\.$"):
        sharding.shardings_for({"adapter": {"kernel": jnp.zeros((2, 2))}}, abstract_mesh(1, 1, 1))


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((1, 2, 4), (1, 2, 4)),
        ((1, -1, 4), (1, 2, 4)),
        ((-1, 4, 2), (1, 4, 2)),
        ((2, 2, 1), r"\(data 2, fsdp 2, tensor 1\) needs 4 devices, but there are 8"),
        ((1, -1, 3), r"\(data 1, fsdp -1, tensor 3\) needs a multiple of 3 devices, but there are 8"),
        ((4, 4, 1), "needs 16 devices, but there are 8"),
        ((-1, -1, 1), "has 2 axes of -1"),
        ((0, 1, 1), "MeshConfig.data is 0"),
    ],
)
def test_a_mesh_has_all_devices_or_is_refused(monkeypatch, sizes, wanted):
    monkeypatch.setattr(jax, "make_mesh", lambda shape, names, *, axis_types, devices: shape)
    make = lambda: sharding.make_mesh(sharding.MeshConfig(**dict(zip(sharding.AXES, sizes))), [None] * 8)  # noqa: B905, E731
    if isinstance(wanted, tuple):
        assert make() == wanted
    else:
        with pytest.raises(ValueError, match=rf"^.*{wanted}.*\.$"):
            make()


def test_a_batch_that_does_not_divide_is_refused():
    mesh = sharding.make_mesh(sharding.MeshConfig())
    assert sharding.process_rows(mesh, 6) == slice(0, 6)
    monkey = abstract_mesh(2, 2, 1)
    with pytest.raises(ValueError, match=r"^A batch of 6 rows does not divide over data x fsdp = 4; .*\.$"):
        sharding.process_rows(monkey, 6)


def test_without_a_mesh_nothing_is_constrained():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, "batch", None) is x


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"coordinator": "a:1"}, "coordinator a:1, count None and index None; give all three"),
        ({"detect": True, "coordinator": "a:1", "count": 2, "index": 0}, "give one of the two"),
        ({"coordinator": "a:1", "count": 2, "index": 2}, "index is 2; it must be from 0 to below count, 2"),
    ],
)
def test_processes_are_stated_whole(fields, wanted):
    with pytest.raises(ValueError, match=rf"^ProcessConfig.*{wanted}.*\.$"):
        ProcessConfig(**fields)


def test_a_process_alone_joins_nobody(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: pytest.fail("not asked for"))
    start(ProcessConfig())


# --- One program on many devices --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    """The job `cube`, the head that it was given and the place of the one that it trained."""
    folder = tmp_path_factory.mktemp("cube")
    given = ej.Head.random(ej.Target.random(mesh_rig.CONFIG), seed=5)
    ej.save_head(given, folder / "given", dtype=jnp.float32)
    (arrays,) = arrays_of(
        launch("cube", folder / "cube.npz", 8, save=str(folder / "trained"), load=str(folder / "given"))
    )
    return arrays, given, folder / "trained"


@pytest.mark.slow
@pytest.mark.parametrize(("prefix", "tolerance"), [("", 1e-5), ("muon_", 1e-4)])
def test_eight_devices_train_as_one(cube, prefix, tolerance):
    one, eight = under(f"{prefix}one", cube[0]), under(f"{prefix}eight", cube[0])
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=0, atol=tolerance)
    gradients = [name for name in one if name.startswith("first/")]
    assert len(gradients) >= 9
    for name in gradients:
        assert np.linalg.norm(eight[name] - one[name]) <= 1e-4 * np.linalg.norm(one[name]), name
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.slow
def test_R5_saved_on_eight_devices_and_loaded_on_one_and_the_other_way(cube):
    arrays, given, trained = cube
    loaded = leaves(ej.load_head(trained, ej.Target.random(mesh_rig.CONFIG)).model)
    last = under("eight/last", arrays)
    assert loaded.keys() == last.keys()
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, last[name])
    for name, value in leaves(given.model).items():
        np.testing.assert_array_equal(arrays[f"loaded/{name}"], value)


@pytest.mark.slow
def test_the_embedded_targets_heads_lie_on_three_devices(tmp_path):
    (arrays,) = arrays_of(launch("embedded", tmp_path / "embedded.npz", 3))
    np.testing.assert_allclose(arrays["losses"], arrays["one"], rtol=0, atol=1e-4)


# --- Weights, shard by shard ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A target of 8 heads and 2 key-value heads in two files."""
    fields = {name: getattr(mesh_rig.CONFIG, name) for name in LLAMA if hasattr(mesh_rig.CONFIG, name)}
    return write(tmp_path_factory.mktemp("stored") / "a model", random_weights(mesh_rig.CONFIG), LLAMA | fields, 2)


def gguf_file(path):
    """The same target as a GGUF file, without a tokenizer."""
    config, weights = mesh_rig.CONFIG, random_weights(mesh_rig.CONFIG)
    metadata = {key: value for key, value in metadata_of(config).items() if not key.startswith("tokenizer.")}
    return gguf_rig.write(path, metadata, tensors_of(config, weights))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", ["safetensors", "gguf", "pickles"])
def test_every_form_is_read_onto_a_mesh(stored, tmp_path, form, dtype):
    path = stored
    if form == "gguf":
        path = gguf_file(tmp_path / "model.gguf")
    elif form == "pickles":
        path = tmp_path / "pickles"
        shutil.copytree(stored, path)
        pickle_weights(path)
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    wanted, found = (leaves(ej.load_target(path, dtype, mesh=place).model) for place in (None, mesh))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.slow
def test_a_target_is_read_by_parts(stored, tmp_path):
    """Each part of a tensor once, equal to the whole that one device reads; a device holds its part alone."""
    gguf = gguf_file(tmp_path / "model.gguf")
    (found,) = arrays_of(launch("load", tmp_path / "load.npz", 8, load=str(stored), gguf=str(gguf)))
    target = ej.load_target(stored)
    wanted, parameters, read = leaves(target.model), under("parameters", found), under("read", found)
    assert parameters.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(parameters[name], value)
    sizes = {name: value.nbytes for name, value in random_weights(mesh_rig.CONFIG).items()}
    assert {name: parts.sum() for name, parts in read.items()} == sizes
    matrices = [name for name, size in sizes.items() if size > 64 * 4]
    assert all(list(read[name]) == [sizes[name] / 4] * 4 for name in matrices)
    norms = sum(size for name, size in sizes.items() if name not in matrices)
    assert set(found["held"]) == {(sum(sizes.values()) - norms) / 4 + norms}
    np.testing.assert_allclose(found["mixture"], found["mixture_one"], rtol=0, atol=1e-5)
    for name, value in leaves(ej.load_target(gguf).model).items():
        np.testing.assert_array_equal(found[f"gguf/{name}"], value)
    assert found["text"].tolist() == ej.generate(target, None, [1, 2, 3], max_new_tokens=12).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"data": 2, "fsdp": 1}], ids=["fsdp", "data"])
def test_two_processes_train_as_one(stored, tmp_path, mesh):
    coordinator = free_address()
    running = [
        launch(
            "process",
            tmp_path / f"{index}.npz",
            1,
            mesh=mesh,
            load=str(stored),
            processes={"coordinator": coordinator, "count": 2, "index": index},
        )
        for index in range(2)
    ]
    *both, one = arrays_of(*running, launch("single", tmp_path / "one.npz", 1, load=str(stored)))
    # Each sample once, in one of the two.
    assert sorted(np.concatenate([process["ids"] for process in both])) == list(range(4 * mesh_rig.ROWS))
    for process in both:
        np.testing.assert_allclose(process["losses"], one["losses"], rtol=0, atol=1e-5)
        for name in (name for name in one if name.startswith("last/")):
            np.testing.assert_allclose(process[name], one[name], rtol=0, atol=1e-6)
    if "data" not in mesh:
        # No process reads more than its half, and the norms.
        whole = sum(value.nbytes for value in random_weights(mesh_rig.CONFIG).values())
        assert all(process["read"] < 0.51 * whole for process in both)
