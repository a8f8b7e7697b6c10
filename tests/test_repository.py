"""Targets from directories in Hugging Face's layout: families against transformers' PyTorch models, and bad files."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import sentencepiece
from flax import nnx
from rig import random_weights, tiny_config
from safetensors.numpy import load_file, save_file

import eagle_jax as ej
from eagle_jax import loading, repository
from eagle_jax.convert import tensor_for, transposed
from eagle_jax.generation import encode_prompt
from eagle_jax.layers import causal_mask
from eagle_jax.rope import attention_factor
from eagle_jax.target import TargetModel

TEXT = 210  # tokens, far past every window and pretraining length below
BASE = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
LONG = {"max_position_embeddings": 512}
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(factor=4.0, original_max_position_embeddings=64)
FAMILIES = {
    "llama": ("Llama", LONG),
    "llama-tied": ("Llama", LONG | {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", LONG | {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("Llama", LONG | {"rope_theta": 500000.0}),
    "llama-head_dim": ("Llama", LONG | {"head_dim": 12}),
    "llama-linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "llama-llama3": ("Llama", LONG | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "llama-yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", **YARN}}),
    "mistral": ("Mistral", LONG | {"sliding_window": 8}),
    "mistral-full": ("Mistral", LONG | {"sliding_window": None}),
    "mixtral": ("Mixtral", LONG | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", LONG | {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 8}),
    "qwen2": ("Qwen2", LONG),
    "qwen2-window": ("Qwen2", LONG | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 16.0, "attention_factor": 0.9}}),
    "qwen3": ("Qwen3", LONG | {"head_dim": 12}),
    "qwen3-biases": ("Qwen3", LONG | {"head_dim": 12, "attention_bias": True}),
}


class Reference:
    """A random model of transformers', saved as transformers saves it."""

    def __init__(self, name, directory):
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        family, overrides = FAMILIES[name]
        torch.manual_seed(sorted(FAMILIES).index(name))
        config = getattr(transformers, f"{family}Config")(**(BASE | overrides), attn_implementation="eager")
        self.model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter, weight in self.model.named_parameters():
            # Large enough that attention is far from uniform.
            weight.uniform_(0.5, 1.5) if "norm" in parameter else weight.normal_(std=0.25)
        self.model.save_pretrained(directory)
        self.directory = directory

    def logits(self, ids):
        import torch

        return self.model(torch.tensor([ids])).logits[0].numpy()

    def greedy(self, prompt, count):
        """Token ids and the log-probability of each, as `generate` with its cache finds them."""
        import torch

        self.logits([0])  # a short text resets what "dynamic" rope has kept of a longer one
        ids = torch.tensor([prompt])
        done = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = done.sequences[0, len(prompt) :]
        logits = torch.stack(done.logits, dim=1)[0].log_softmax(-1)
        return tokens.tolist(), logits[range(len(tokens)), tokens].numpy()


DECODED_QUICKLY = ("llama-dynamic", "mixtral", "qwen2-window")


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    return Reference(request.param, tmp_path_factory.mktemp("models") / "a model")


def logits_of(target, ids):
    """f32[T, V], of a text that comes in whole."""
    length = jnp.full((1, 1), len(ids))
    features, _ = target.model(jnp.asarray([ids]), jnp.arange(len(ids))[None], causal_mask(len(ids)), None, length)
    return np.asarray(target.model.logits(features))[0]


def random_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], count).tolist()


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_E2_E3_E6_E7_M4_logits_are_hugging_faces(family):
    """Biases, head_dim, rope scaling, theta and windows, at positions far past where they begin to matter."""
    ids = random_ids(TEXT)
    target = ej.load_target(family.directory)
    np.testing.assert_allclose(logits_of(target, ids), family.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in DECODED_QUICKLY else pytest.mark.slow) for name in FAMILIES],
    indirect=True,
)
def test_D5_M4_decoding_is_hugging_faces(family):
    """Prompts on both sides of windows and pretraining lengths; with a cache, and with drafts."""
    target = ej.load_target(family.directory)
    head = ej.Head.random(target, seed=1)
    prompts = [random_ids(length, seed=length) for length in (40, 80)]
    wanted = [family.greedy(prompt, 40) for prompt in prompts]
    tree = ej.TreeConfig(nodes=12, depth=3, top_k=8)
    for drafter in (None, head):
        for done, (ids, logprobs) in zip(
            ej.generate(target, drafter, prompts, max_new_tokens=40, tree=tree), wanted, strict=True
        ):
            assert done.token_ids == ids
            np.testing.assert_allclose(done.logprobs, logprobs, rtol=0, atol=1e-4)


# --- Files that are whole ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arrays():
    """Tensors of a small Llama under Hugging Face's names."""
    return random_weights(tiny_config())


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
}


def write(directory, tensors, config=CONFIG, shards=None):
    """A model directory; with `shards` its tensors are dealt out over that many files and an index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards is None:
        save_file(tensors, directory / "model.safetensors")
        return directory
    places = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, directory / name)
        places |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def same(first, second):
    np.testing.assert_array_equal(logits_of(first, range(12)), logits_of(second, range(12)))


def test_E4_shards_are_one_file(arrays, tmp_path):
    """Other files beside the index are no part of the model."""
    whole = ej.load_target(write(tmp_path / "whole", arrays))
    sharded = write(tmp_path / "shards", arrays, shards=3)
    (sharded / "model-00001-of-00007.safetensors").write_bytes(b"an older download")
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, sharded / "consolidated.safetensors")
    same(whole, ej.load_target(sharded))


def test_E5_a_tied_lm_head_may_be_there_or_not(arrays, tmp_path):
    tied = CONFIG | {"tie_word_embeddings": True}
    absent = {name: value for name, value in arrays.items() if name != "lm_head.weight"}
    redundant = absent | {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    first = ej.load_target(write(tmp_path / "absent", absent, tied))
    assert first.model.lm_head is None
    same(first, ej.load_target(write(tmp_path / "redundant", redundant, tied)))
    assert "lm_head.weight" in refusal(write(tmp_path / "other", arrays, tied))
    assert "missing lm_head.weight" in refusal(write(tmp_path / "untied", absent))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_narrow_and_wide_tensors_are_read(arrays, tmp_path, dtype):
    stored = {name: value.astype(dtype) for name, value in arrays.items()}
    rounded = {name: value.astype(np.float32) for name, value in stored.items()}
    same(ej.load_target(write(tmp_path / "a", stored)), ej.load_target(write(tmp_path / "b", rounded)))


def test_dtype_is_that_of_the_parameters(arrays, tmp_path):
    target = ej.load_target(write(tmp_path / "model", arrays), dtype=jnp.bfloat16)
    assert target.dtype == jnp.bfloat16


def test_old_checkpoints_frequencies_are_left_aside(arrays, tmp_path):
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for i in range(2)}
    same(
        ej.load_target(write(tmp_path / "a", arrays)),
        ej.load_target(write(tmp_path / "b", arrays | frequencies, shards=2)),
    )


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        (3, None, (3,)),
        (3, 5, (3, 5)),
        ([3, 4], [4, 9], (3, 4, 9)),
        (None, [7], (7,)),
        (None, None, ()),
    ],
)
def test_A6_generation_config_adds_end_tokens(arrays, tmp_path, config, generation, wanted):
    directory = write(tmp_path / "model", arrays, CONFIG | {"eos_token_id": config})
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    target = ej.load_target(directory)
    assert target.eos_token_ids == wanted
    plain = ej.generate(dataclasses.replace(target, eos_token_ids=()), None, [1, 2], max_new_tokens=40).token_ids
    ends = [i for i, token in enumerate(plain) if token in wanted]
    done = ej.generate(target, None, [1, 2], max_new_tokens=40)
    assert done.token_ids == (plain[: ends[0] + 1] if ends else plain)
    assert done.finish_reason == ("stop" if ends else "length")


def test_tokenizer_and_template_are_the_directorys(arrays, tmp_path, smollm2):
    directory = write(tmp_path / "model", arrays)
    assert ej.load_target(directory).tokenizer is None
    smollm2.tokenizer.save_pretrained(directory)
    loaded = ej.load_target(directory).tokenizer
    chat = [{"role": "user", "content": "naïve café, 東京 🙂"}]
    assert loaded.apply_chat_template(chat) == smollm2.tokenizer.apply_chat_template(chat)


def test_a_target_is_described_without_its_weights(arrays, tmp_path, smollm2):
    directory = write(tmp_path / "model", arrays)
    smollm2.tokenizer.save_pretrained(directory)
    wanted = ej.load_target(directory).config
    (directory / "model.safetensors").unlink()
    config, tokenizer = loading.describe_target(directory)
    assert config == wanted and tokenizer.chat_template == smollm2.tokenizer.chat_template
    config, tokenizer = loading.describe_target("smollm2-135m")
    assert config == smollm2.config and tokenizer.get_vocab() == smollm2.tokenizer.get_vocab()
    with pytest.raises(ValueError, match="There is no target 'nowhere'"):
        loading.describe_target("nowhere")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that holds one repository, `someone/a-model`; what is fetched of it comes into `cache`."""
    source, cache = tmp_path / "source", tmp_path / "cache"
    cache.mkdir()

    def snapshot_download(name, allow_patterns):
        assert name == "someone/a-model"
        for pattern in allow_patterns:
            for path in source.glob(pattern):
                shutil.copy(path, cache)
        return str(cache)

    monkeypatch.setattr(repository.huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return source, cache


def test_hub_repositories_are_fetched_without_other_copies(arrays, hub):
    """By name: what the index lists, no consolidated file and no code."""
    source, cache = hub
    write(source, arrays, shards=2)
    for decoy in ("consolidated.safetensors", "pytorch_model.bin", "modeling.py", "model-00001-of-00009.safetensors"):
        (source / decoy).write_bytes(b"not wanted")
    assert loading.describe_target("someone/a-model").config.hidden_size == 64
    assert {path.name for path in cache.iterdir()} == {"config.json", "model.safetensors.index.json"}
    same(ej.load_target("someone/a-model"), ej.load_target(source))
    assert {path.name for path in cache.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def pickle_weights(directory):
    """Rewrites a directory's safetensors as PyTorch's pickles."""
    torch = pytest.importorskip("torch")
    for path in directory.glob("*.safetensors"):
        content = {name: torch.tensor(value) for name, value in load_file(path).items()}
        torch.save(content, directory / f"{path.stem.replace('model', 'pytorch_model')}.bin")
        path.unlink()
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (directory / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


@pytest.mark.parametrize("shards", [None, 2])
def test_E4_pickled_weights_are_read_where_there_are_no_others(arrays, hub, shards):
    source, cache = hub
    whole = ej.load_target(write(source, arrays))
    write(source, arrays, shards=shards)
    if shards:
        (source / "model.safetensors").unlink()
    pickle_weights(source)
    same(whole, ej.load_target(source))
    same(whole, ej.load_target("someone/a-model"))
    assert len(list(cache.glob("*.bin"))) == (shards or 1)


def test_hub_repository_without_weights(arrays, hub):
    source, _ = hub
    (write(source, arrays) / "model.safetensors").unlink()
    assert "The hub's 'someone/a-model' publishes neither" in refusal("someone/a-model")


def test_a_missing_gguf_file_is_no_hub_repository():
    assert refusal("models/missing.gguf").startswith("There is no target 'models/missing.gguf'")


def test_S1_tokenizers_of_a_sentencepiece_model_alone(arrays, tmp_path):
    """As old Llama repositories have it; ids are SentencePiece's own, after one BOS."""
    text = ["the quick brown fox jumps over the lazy dog", "why is the sky blue"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    fields = CONFIG | {"vocab_size": 320, "tie_word_embeddings": True}
    config = tiny_config(vocab_size=320, tie_word_embeddings=True)
    directory = write(tmp_path / "model", random_weights(config), fields)
    shutil.move(tmp_path / "tokenizer.model", directory)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False})
    )
    target = ej.load_target(directory)
    reference = sentencepiece.SentencePieceProcessor(str(directory / "tokenizer.model"))
    for prompt in ("the quick fox", "why é is"):
        assert encode_prompt(target, prompt) == [reference.bos_id(), *reference.encode(prompt)]


def test_hub_repository_without_a_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repository.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "'someone/no-such-model' is no directory here" in refusal("someone/no-such-model")


def test_code_of_a_repository_is_never_run(arrays, tmp_path):
    directory = write(tmp_path / "model", arrays, CONFIG | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
    )
    refusal(directory)
    assert not (tmp_path / "ran").exists()


PEAK = """
import sys
import jax
from flax import nnx
import eagle_jax as ej
from eagle_jax.measure import peak_memory
jax.numpy.zeros(8).block_until_ready()
before = peak_memory()
model = ej.load_target(sys.argv[1]).model
print(peak_memory() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))))
"""


@pytest.mark.slow
def test_loading_holds_one_tensor_at_a_time(tmp_path):
    """Peak memory beyond that of an idle process: 1.15 times the float32 weights."""
    config = tiny_config(vocab_size=8000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in shapes_of(config).items()
    }
    fields = {name: getattr(config, name) for name in CONFIG if hasattr(config, name)}
    directory = write(tmp_path / "model", tensors, CONFIG | fields, shards=2)
    del tensors
    # Arrays of up to 32 MB would go to glibc's heap, which keeps those freed, 100 MB at one time and none at another.
    each_mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, "-c", PEAK, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=each_mapped)
    peak, weights = map(int, done.stdout.split())
    assert peak > weights > 5e8
    assert peak < 1.15 * weights


def shapes_of(config):
    """Shapes of the stored tensors by name."""
    state = nnx.state(nnx.eval_shape(lambda: TargetModel(config, rngs=nnx.Rngs(0))))
    named = [(*tensor_for(path, repository.TARGET_TABLE), leaf.shape) for path, leaf in nnx.to_flat_state(state)]
    return {name: shape[::-1] if transform is transposed else shape for name, transform, shape in named}


# --- Files that are not -----------------------------------------------------------------------------------------------


def refusal(name):
    """The message a target is refused with: one line, one sentence."""
    with pytest.raises((ValueError, OSError)) as caught:
        ej.load_target(name)
    message = str(caught.value)
    assert type(caught.value) in (ValueError, OSError), repr(caught.value)
    assert "\n" not in message and message.endswith("."), message
    return message


def test_all_faults_are_in_one_error(arrays, tmp_path):
    tensors = dict(arrays)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((64, 60), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    message = refusal(write(tmp_path / "model", tensors))
    for fault in (
        "missing model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight gives (60, 64) where (64, 64) is needed",
        "unexpected model.layers.0.self_attn.q_proj.bias",
    ):
        assert fault in message


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "config.json is no JSON"),
        ("config.json", "[1]", "holds a list where an object is needed"),
        ("config.json", "[" * 100_000, "config.json is no JSON"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id '</s>'"),
        ("generation_config.json", '{"eos_token_id": 16}', "below 16"),
        ("model.safetensors.index.json", None, "has neither model.safetensors nor model.safetensors.index.json"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../secret.safetensors"}}',
            "no name of a file beside it",
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "gone.safetensors"}}',
            "gone.safetensors, which is not there",
        ),
        ("model-00001-of-00002.safetensors", None, "model-00001-of-00002.safetensors, which is not there"),
        ("model-00001-of-00002.safetensors", "short", "is not a whole safetensors file"),
        ("tokenizer.json", "{}", "The tokenizer in"),
    ],
)
def test_bad_files_are_named(arrays, tmp_path, name, content, wanted):
    directory = write(tmp_path / "model", arrays, shards=2)
    (directory / name).unlink() if content is None else (directory / name).write_text(content)
    assert wanted in refusal(directory)


def test_an_index_that_lies(arrays, tmp_path):
    directory = write(tmp_path / "model", arrays, shards=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    places = index["weight_map"]
    places["model.norm.weight"] = ({*places.values()} - {places["model.norm.weight"]}).pop()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lists model.norm.weight in" in refusal(directory)


def test_truncated_and_integer_tensors(arrays, tmp_path):
    directory = write(tmp_path / "model", arrays)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "is not a whole safetensors file" in refusal(directory)
    whole = dict(load_file(write(tmp_path / "other", arrays) / "model.safetensors"))
    quantized = write(tmp_path / "int", whole | {"model.norm.weight": np.zeros(64, np.int8)})
    assert "model.norm.weight as I8" in refusal(quantized)


def test_an_index_goes_before_a_single_file(arrays, tmp_path):
    """Whatever else lies beside the files that an index lists is not the model's."""
    directory = write(tmp_path / "model", arrays, shards=2)
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, directory / "model.safetensors")
    same(ej.load_target(directory), ej.load_target(write(tmp_path / "whole", arrays)))


def test_attention_factor_follows_from_yarns_mscales():
    scaling = ej.RopeScaling(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5)
    config = tiny_config(rope_scaling=scaling)
    # 0.1 * mscale * ln(4) + 1, over the same with mscale_all_dim.
    assert attention_factor(config) == pytest.approx((0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))
