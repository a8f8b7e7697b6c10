"""The autoregression head: its size, its arithmetic against NumPy, and its way to disk and back."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rig import tiny_config, tiny_target
from safetensors.numpy import load_file, save_file

from eagle_jax import Head, HeadConfig, ModelConfig, Target, TreeConfig, cache, generate, load_head, save_head
from eagle_jax.checkpoint import save_beta
from eagle_jax.head import HeadModel, config_for, frozen_ends
from eagle_jax.layers import causal_mask, parameter_count


@pytest.mark.parametrize(
    ("billions", "hidden", "inner", "heads", "kv_heads"),
    [
        (0.24, 4096, 11008, 32, 32),  # Vicuna 7B
        (0.37, 5120, 13824, 40, 40),  # Vicuna 13B
        (0.56, 6656, 17920, 52, 13),  # Vicuna 33B
        (0.99, 8192, 28672, 64, 8),  # LLaMA2-Chat 70B
        (0.28, 4096, 14336, 32, 32),  # Mixtral 8x7B
    ],
    ids=["7B", "13B", "33B", "70B", "Mixtral"],
)
def test_published_parameter_counts(billions, hidden, inner, heads, kv_heads):
    """EAGLE, section 4: of what is trained, so without embedding and LM head."""
    config = HeadConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    head = nnx.eval_shape(lambda: HeadModel(config, rngs=nnx.Rngs(0)))
    assert round(parameter_count(nnx.state(head)) / 1e9, 2) == billions


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def reference(parameters, config, embeddings, features, positions):
    """The head in float64: fc, then a decoder layer without its input norm; one row, causal."""

    def linear(x, name):
        y = x @ parameters[f"{name}.kernel"]
        return y + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else y

    def heads(x):
        return x.reshape(len(x), -1, config.head_dim)

    def rotate(x):
        frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        turn = np.exp(1j * positions[:, None] * frequencies)[:, None]
        half = config.head_dim // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    read = {"token": [embeddings], "feature": [features]}.get(config.inputs, [embeddings, features])
    x = linear(np.concatenate(read, axis=-1), "fc")
    block = "layers.0.self_attn."
    queries, keys = (rotate(heads(linear(x, f"{block}{name}_proj"))) for name in "qk")
    values = heads(linear(x, block + "v_proj"))
    group = config.num_attention_heads // config.num_key_value_heads
    mixed = np.zeros_like(queries)
    for head in range(config.num_attention_heads):
        for i in range(len(x)):
            scores = keys[: i + 1, head // group] @ queries[i, head] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            mixed[i, head] = weights / weights.sum() @ values[: i + 1, head // group]
    x = x + linear(mixed.reshape(len(x), -1), block + "o_proj")
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    normed = normed * parameters["layers.0.post_attention_layernorm.scale"]
    gate = linear(normed, "layers.0.mlp.gate_proj")
    inner = gate / (1 + np.exp(-gate)) * linear(normed, "layers.0.mlp.up_proj")
    return x + linear(inner, "layers.0.mlp.down_proj")


def random_head_model(config, seed=0):
    """A head with weights large enough that attention is far from uniform, and its parameters in float64 by path."""
    rng = np.random.default_rng(seed)
    model = HeadModel(config, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    parameters, flat = {}, []
    for path, leaf in nnx.to_flat_state(state):
        name, shape = ".".join(map(str, path)), leaf[...].shape
        scale = 1.5 * shape[0] ** -0.5 if name.endswith("kernel") else 0.5
        value = (rng.normal(size=shape) * scale + name.endswith("scale")).astype(np.float32)
        parameters[name] = value.astype(np.float64)
        flat.append((path, leaf.replace(jnp.asarray(value))))
    return nnx.merge(graphdef, nnx.from_flat_state(flat)), parameters


SHAPES = {
    "plain": {"num_key_value_heads": 4},
    "grouped": {"rope_theta": 500000.0},
    "biases": {"attention_bias": True, "mlp_bias": True, "fc_bias": True},
    "head_dim": {"head_dim": 24, "rms_norm_eps": 1e-5},
    "token": {"inputs": "token"},
    "feature": {"inputs": "feature", "fc_bias": True},
}
POSITIONS = np.concatenate([np.arange(6), np.arange(200, 206)])


def check_head(overrides):
    fields = dataclasses.asdict(tiny_config()) | {"num_hidden_layers": 1}
    config = HeadConfig(**(fields | overrides))
    model, parameters = random_head_model(config)
    rng = np.random.default_rng(1)
    embeddings, features = rng.normal(size=(2, 1, len(POSITIONS), config.hidden_size)).astype(np.float32)
    wanted = reference(parameters, config, embeddings[0].astype(float), features[0].astype(float), POSITIONS)
    predicted, rows = jax.jit(model)(embeddings, features, POSITIONS[None], causal_mask(len(POSITIONS)))
    np.testing.assert_allclose(predicted[0], wanted, rtol=0, atol=1e-4)

    # The same by parts: 5 committed tokens, then levels of 3 and 4 tokens beside them.
    empty = cache.empty(
        layers=1, batch=1, capacity=8, kv_heads=config.kv_heads, key_dim=config.key_dim, dtype=jnp.float32
    )
    prefix = cache.commit(empty, rows, jnp.array([5]))
    mask = causal_mask(7)
    pieces, earlier = [], None
    for begin, end in ((5, 8), (8, 12)):
        part, earlier = jax.jit(model)(
            embeddings[:, begin:end],
            features[:, begin:end],
            POSITIONS[None, begin:end],
            mask[:, begin - 5 : end - 5, : end - 5],
            prefix,
            earlier,
        )
        pieces.append(part[0])
    np.testing.assert_allclose(np.concatenate(pieces), wanted[5:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "grouped", "biases", "token", "feature"])
def test_agrees_with_numpy(name):
    check_head(SHAPES[name])


def test_E3_head_with_head_dim_of_its_own():
    """head_dim 24, where hidden_size / num_attention_heads is 16."""
    check_head(SHAPES["head_dim"])


def test_draft_vocabulary_selects_rows_of_the_lm_head():
    target = tiny_target()
    vocabulary = np.array([1, 4, 11])
    ends = frozen_ends(target, vocabulary)
    matrix = target.model.lm_matrix()
    np.testing.assert_array_equal(ends.lm_head, np.asarray(matrix)[vocabulary])
    assert ends.token_ids(jnp.array([[2, 0]])).tolist() == [[11, 1]]
    everything = frozen_ends(target)
    assert everything.lm_head is matrix or (np.asarray(everything.lm_head) == np.asarray(matrix)).all()
    assert everything.token_ids(jnp.array([2])).tolist() == [2]


# --- To disk and back -------------------------------------------------------------------------------------------------


def leaves(head):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(head.model))}


def assert_same(head, other):
    assert other.config == head.config
    wanted, found = leaves(head), leaves(other)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert found[path].dtype == value.dtype
        np.testing.assert_array_equal(found[path], value)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def saved(target, tmp_path):
    """A directory with a whole head, for tests that alter it."""
    save_head(Head.random(target, seed=3), tmp_path / "head", dtype=jnp.float32)
    return tmp_path / "head"


def alter(directory, *, config=None, tensors=None, without=()):
    """Rewrites a head's configuration and tensors."""
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | (config or {})))
    content = load_file(directory / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in content.items() if name not in without}, directory / "model.safetensors")


@pytest.mark.parametrize("vocabulary", [None, np.array([0, 3, 7, 9], np.int32)], ids=["whole", "draft_vocabulary"])
def test_float32_round_trip_is_bitwise(target, tmp_path, vocabulary):
    head = Head.random(target, seed=3, vocabulary=vocabulary)
    save_head(head, tmp_path / "a head's directory", dtype=jnp.float32)
    loaded = load_head(tmp_path / "a head's directory", target)
    assert_same(head, loaded)
    np.testing.assert_array_equal(loaded.ends.lm_head, head.ends.lm_head)
    if vocabulary is None:
        assert loaded.ends.vocabulary is None
    else:
        np.testing.assert_array_equal(loaded.ends.vocabulary, vocabulary)
    assert sorted(path.name for path in (tmp_path / "a head's directory").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("inputs", ["token", "feature", "feature+token"])
def test_what_a_head_reads_is_stored_with_it(target, tmp_path, inputs):
    head = Head.random(target, seed=3, inputs=inputs)
    save_head(head, tmp_path, dtype=jnp.float32)
    assert_same(head, load_head(tmp_path, target))


def test_a_head_that_does_not_say_what_it_reads_is_eagles(target, saved):
    fields = json.loads((saved / "config.json").read_text())
    assert fields.pop("inputs") == "feature+shifted_token"
    (saved / "config.json").write_text(json.dumps(fields))
    assert_same(Head.random(target, seed=3), load_head(saved, target))


def test_bfloat16_round_trip_rounds_once(target, tmp_path):
    """bfloat16 is what is stored unless asked otherwise; the head is read in the target's dtype or in a given one."""
    head = Head.random(target, seed=3)
    save_head(head, tmp_path)
    loaded, narrow = load_head(tmp_path, target), load_head(str(tmp_path), target, dtype=jnp.bfloat16)
    for path, value in leaves(head).items():
        rounded = np.asarray(jnp.asarray(value).astype(jnp.bfloat16))
        assert leaves(narrow)[path].dtype == rounded.dtype
        np.testing.assert_array_equal(leaves(narrow)[path], rounded)
        np.testing.assert_array_equal(leaves(loaded)[path], rounded.astype(np.float32))


def test_tensors_bear_the_published_names_and_shapes(saved):
    shapes = {name: tensor.shape for name, tensor in load_file(saved / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": (64, 128),
        "layers.0.self_attn.q_proj.weight": (64, 64),
        "layers.0.self_attn.k_proj.weight": (32, 64),
        "layers.0.self_attn.v_proj.weight": (32, 64),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.mlp.gate_proj.weight": (128, 64),
        "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "layers.0.post_attention_layernorm.weight": (64,),
    }


def test_saving_again_replaces_the_head(target, saved):
    other = Head.random(target, seed=4)
    save_head(other, saved, dtype=jnp.float32)
    assert_same(other, load_head(saved, target))


@pytest.mark.parametrize("claimed", [True, False])
def test_E1_fc_bias_is_used_where_the_weights_hold_one(target, saved, claimed):
    """Whatever the configuration says of it."""
    bias = np.linspace(-1, 1, 64, dtype=np.float32)
    without = load_head(saved, target)
    alter(saved, config={"bias": claimed, "fc_bias": claimed}, tensors={"fc.bias": bias})
    loaded = load_head(saved, target)
    assert loaded.config.fc_bias
    ones = jnp.ones((1, 1, 64))
    shift = loaded.model.fc(jnp.ones((1, 1, 128))) - without.model.fc(jnp.ones((1, 1, 128)))
    np.testing.assert_allclose(shift[0, 0], bias, rtol=0, atol=1e-5)
    arguments = (ones, ones, jnp.zeros((1, 1), jnp.int32), causal_mask(1))
    assert np.abs(loaded.model(*arguments)[0] - without.model(*arguments)[0]).max() > 0.5
    save_head(loaded, saved / "again", dtype=jnp.float32)
    assert_same(loaded, load_head(saved / "again", target))


def test_E1_no_fc_bias_where_the_weights_hold_none(target, saved):
    alter(saved, config={"bias": True, "fc_bias": True})
    loaded = load_head(saved, target)
    assert not loaded.config.fc_bias and loaded.model.fc.bias is None


def test_copy_of_the_targets_embedding_is_left_aside(target, saved):
    """Published heads carry one."""
    alter(saved, tensors={"embed_tokens.weight": np.full((16, 64), 9, np.float32)})
    loaded = load_head(saved, target)
    np.testing.assert_array_equal(loaded.ends.embedding, target.model.embed_tokens.embedding[...])
    assert_same(Head.random(target, seed=3), loaded)


@pytest.mark.parametrize(("field", "own", "wanted"), [("vocab_size", 16, 24), ("hidden_size", 64, 32)])
def test_E9_head_of_another_target(saved, field, own, wanted):
    other = tiny_target(**{field: wanted})
    with pytest.raises(ValueError, match=rf"{field} {own}, but the target random has {wanted}; .*\.$"):
        load_head(saved, other)


@pytest.mark.parametrize(("field", "own", "wanted"), [("vocab_size", 24, 16), ("hidden_size", 32, 64)])
def test_E9_head_of_another_target_before_decoding(target, field, own, wanted):
    """A head that was made in memory is checked by generate."""
    head = Head.random(tiny_target(**{field: own}))
    with pytest.raises(ValueError, match=rf"{field}.* {own}\b.* {wanted}\b.*\.$"):
        generate(target, head, [1, 2, 3], max_new_tokens=2, tree=TreeConfig(kind="chain", depth=1))


def pickled(directory):
    """The head as EAGLE's authors published theirs: PyTorch's pickle, with a copy of the target's embedding."""
    torch = pytest.importorskip("torch")
    content = {name: torch.tensor(value) for name, value in load_file(directory / "model.safetensors").items()}
    content["embed_tokens.weight"] = content["lm_head.weight"] = torch.ones(16, 64, dtype=torch.bfloat16)
    content["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save(content, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": True, "rope_scaling": None}
    kept = json.loads((directory / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    fields |= {name: kept[name] for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    # Configurations were often the target's own.
    fields |= {"num_hidden_layers": 32, "layer_types": ["full_attention"] * 32}
    (directory / "config.json").write_text(json.dumps(fields))


def test_a_fitted_beta_is_kept_with_the_head(target, saved):
    """Heads that were written before there was one have 1; so do published ones, until one is fitted."""
    assert load_head(saved, target).config.ranking_beta == 1
    fields = json.loads((saved / "config.json").read_text())
    del fields["ranking_beta"]
    (saved / "config.json").write_text(json.dumps(fields))
    before = load_head(saved, target)
    assert before.config.ranking_beta == 1
    pickled(saved)
    assert load_head(saved, target).config.ranking_beta == 1
    save_beta(saved, 2.5)
    after = load_head(saved, target)
    assert after.config.ranking_beta == 2.5
    assert_same(before, dataclasses.replace(after, config=before.config))


@pytest.mark.parametrize("beta", [0, -1.0, float("nan"), float("inf"), "much"])
def test_a_beta_that_is_none_is_refused(target, saved, beta):
    alter(saved, config={"ranking_beta": beta})
    assert "describes no head" in refusal(saved, target)


def test_heads_are_read_as_they_were_published(target, saved):
    before = load_head(saved, target)
    pickled(saved)
    assert_same(before, load_head(saved, target))


def test_code_in_a_pickle_is_never_run(target, saved, tmp_path):
    pickled(saved)

    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    import torch

    torch.save({"fc.weight": Evil()}, saved / "pytorch_model.bin")
    assert "pytorch_model.bin is not a whole file of tensors" in refusal(saved, target)
    assert not (tmp_path / "ran").exists()


def test_E14_eagle3_heads_tables_of_ids(target, saved):
    """They are integers and booleans, and named before anything is said of that."""
    alter(saved, tensors={"d2t": np.zeros(16, np.int64), "t2d": np.zeros(16, bool)})
    assert "EAGLE-3" in refusal(saved, target)


def refusal(name, target):
    """The message a head is refused with: one line, one sentence."""
    with pytest.raises((ValueError, OSError)) as caught:
        load_head(name, target)
    message = str(caught.value)
    assert type(caught.value) in (ValueError, OSError), repr(caught.value)
    assert "\n" not in message and message.endswith("."), message
    return message


@pytest.mark.parametrize("name", ["no-such-head", ""])
def test_unknown_head(target, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert repr(name) in refusal(name, target)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_absent_file_is_named(target, saved, file):
    shutil.move(saved / file, saved / "elsewhere")
    assert file in refusal(saved, target)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -1])
def test_truncated_weights(target, saved, cut):
    content = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(content[:cut])
    assert str(saved) in refusal(saved, target)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}", b'"head"', b"null"])
def test_configuration_that_is_none(target, saved, content):
    (saved / "config.json").write_bytes(content)
    assert str(saved) in refusal(saved, target)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "64"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 2},
        {"head_dim": 15},
        {"inputs": "feelings"},
    ],
)
def test_senseless_configuration(target, saved, fields):
    alter(saved, config=fields)
    assert str(saved) in refusal(saved, target)


def test_E14_eagle_3_head(target, saved):
    alter(saved, tensors={"midlayer.mlp.up_proj.weight": np.zeros((2, 2), np.float32)})
    assert "EAGLE-3" in refusal(saved, target)


def test_weights_of_something_else(target, saved):
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, saved / "model.safetensors")
    assert "no EAGLE head" in refusal(saved, target)


def test_faulty_tensors_are_listed_in_one_error(target, saved):
    alter(
        saved,
        tensors={
            "layers.0.mlp.up_proj.weight": np.zeros((127, 64), np.float32),
            "layers.0.input_layernorm.weight": np.zeros(64, np.float32),
        },
        without=("layers.0.mlp.down_proj.weight",),
    )
    message = refusal(saved, target)
    assert "missing layers.0.mlp.down_proj.weight" in message
    assert "unexpected layers.0.input_layernorm.weight" in message
    assert "layers.0.mlp.up_proj.weight" in message and "(64, 127)" in message and "(64, 128)" in message


@pytest.mark.parametrize("vocabulary", [[0, 3, 16], [-1, 3, 5], [3, 3, 5], []], ids=["over", "under", "twice", "empty"])
def test_draft_vocabulary_of_another_target(target, saved, vocabulary):
    """An id that is out of range would be read from somewhere else, silently."""
    alter(saved, tensors={"draft_vocabulary": np.array(vocabulary, np.int32)})
    assert "draft_vocab" in refusal(saved, target)


def test_random_head_is_shaped_after_its_target():
    config = tiny_config(head_dim=8, rope_theta=1000.0, attention_bias=True)
    head = Head.random(Target.random(config))
    same = {field.name for field in dataclasses.fields(ModelConfig)} - {"num_hidden_layers"}
    assert all(getattr(head.config, name) == getattr(config, name) for name in same)
    assert head.config == config_for(config)


@pytest.mark.parametrize("key_value_heads", [1, 4])
def test_random_head_with_key_value_heads_of_its_own(target, tmp_path, key_value_heads):
    """As published for Vicuna-33B and Mixtral: fewer than the target's, or more."""
    head = Head.random(target, key_value_heads=key_value_heads)
    width = key_value_heads * target.config.key_dim
    assert target.config.kv_heads != key_value_heads
    assert {name: leaves(head)[("layers", 0, "self_attn", name, "kernel")].shape for name in ("k_proj", "v_proj")} == {
        name: (64, width) for name in ("k_proj", "v_proj")
    }
    save_head(head, tmp_path, dtype=jnp.float32)
    assert_same(head, load_head(tmp_path, target))
    plain = generate(target, None, [1, 2, 3], max_new_tokens=8)
    drafted = generate(target, head, [1, 2, 3], max_new_tokens=8, tree=TreeConfig(kind="chain", depth=2))
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("key_value_heads", [0, 3, 8])
def test_key_value_heads_that_do_not_divide_the_heads(target, key_value_heads):
    message = rf"{key_value_heads} key-value heads for its 4 attention heads; .* target's 2\."
    with pytest.raises(ValueError, match=message):
        Head.random(target, key_value_heads=key_value_heads)
