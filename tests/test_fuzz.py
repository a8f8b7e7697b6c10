"""2,000 damaged inputs, of four kinds: each loads, or is refused in one clear sentence."""

import copy
import json
import struct

import numpy as np
import pytest
from gguf_rig import MERGES, TOKENS, metadata_of, tensors_of
from gguf_rig import write as write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import random_weights, tiny_config
from safetensors.numpy import save_file

from eagle_jax import load_target
from eagle_jax.data import read_conversations, read_questions
from eagle_jax.families import config_from
from eagle_jax.repository import read_json

CONFIG = tiny_config(
    vocab_size=len(TOKENS),
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)
DESCRIPTION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": CONFIG.vocab_size,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": [2],
    "sliding_window": 8,
    "use_sliding_window": True,
    "layer_types": ["full_attention"],
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 8, 2**31, 2**63, 10**30]),
    st.sampled_from([0.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("nan")]),
    st.sampled_from(["", "8", "llama", "qwen3", "Qwen3ForCausalLM", "longrope", "dynamic", "default", "é\n"]),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


def loads_or_is_refused(load):
    """Whether it loads; if not, for a reason in one sentence, by an exception that was meant for the reader."""
    try:
        load()
    except (ValueError, OSError) as error:
        assert type(error) in (ValueError, OSError), repr(error)
        message = str(error)
        assert "\n" not in message and message.endswith("."), message
        return False
    return True


def changed(tree, data):
    """A JSON object with one to three of its entries replaced, removed or added, at any depth."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        branch = tree
        while True:
            inner = [key for key, value in branch.items() if isinstance(value, dict)]
            if not inner or data.draw(st.booleans()):
                break
            branch = branch[data.draw(st.sampled_from(inner))]
        keys = st.sampled_from(sorted(branch)) if branch else st.nothing()
        key = data.draw(keys | st.text(max_size=3))
        if data.draw(st.booleans()):
            branch.pop(key, None)
        else:
            branch[key] = data.draw(values)
    return tree


def damaged(content, data, within=None):
    """Bytes of which some are changed, removed or put in, among the first `within`."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, min(len(content), within or len(content)) - 1)))
        new = data.draw(st.binary(max_size=8))
        content[at : at + data.draw(st.integers(0, 8))] = new
    return bytes(content)


@pytest.fixture(scope="module")
def counts():
    """How many cases of each kind loaded and were refused: both must occur."""
    return {}


def count(counts, kind, loaded):
    counts.setdefault(kind, [0, 0])[loaded] += 1


@settings(max_examples=700)
@given(data=st.data())
def test_config_json(tmp_path_factory, counts, data):
    path = tmp_path_factory.getbasetemp() / "config.json"
    text = json.dumps(changed(DESCRIPTION, data)).encode()
    path.write_bytes(damaged(text, data) if data.draw(st.integers(0, 4)) == 0 else text)
    loaded = loads_or_is_refused(lambda: config_from(read_json(path), str(path)))
    count(counts, "config.json", loaded)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A whole model directory."""
    path = tmp_path_factory.mktemp("a model")
    (path / "config.json").write_text(json.dumps(DESCRIPTION | {"rope_scaling": None}))
    save_file(random_weights(CONFIG), path / "model.safetensors")
    load_target(path)
    return path


@settings(max_examples=500)
@given(data=st.data())
def test_safetensors_header(directory, counts, data):
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    if data.draw(st.booleans()):
        header = changed(json.loads(whole[8 : 8 + length]), data)
        text = json.dumps(header).encode()
        broken = struct.pack("<Q", len(text)) + text + whole[8 + length :]
    else:
        broken = damaged(whole, data, within=8 + length)
    try:
        path.write_bytes(broken)
        count(counts, "safetensors", loads_or_is_refused(lambda: load_target(directory)))
    finally:
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write_gguf(path, metadata_of(CONFIG), tensors_of(CONFIG, random_weights(CONFIG)))
    load_target(path)
    return path.read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_gguf_bytes(gguf_bytes, counts, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    numbers = sum(weight.nbytes for weight in random_weights(CONFIG).values())
    path.write_bytes(damaged(gguf_bytes, data, within=len(gguf_bytes) - numbers))
    count(counts, "gguf", loads_or_is_refused(lambda: load_target(path)))


METHODS = {
    "add_uint32": st.sampled_from([0, 1, 3, 2**31, 2**32 - 1]),
    "add_int32": st.sampled_from([-1, 0, 5]),
    "add_float32": st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 2.5]),
    "add_string": st.sampled_from(["", "llama", "gpt2", "linear", "qwen2", "é"]),
    "add_bool": st.booleans(),
    "add_array": st.sampled_from([[1], [2.5] * 3, ["a"], TOKENS[::-1], MERGES * 2, list(range(len(TOKENS)))]),
}


@settings(max_examples=200)
@given(data=st.data())
def test_gguf_metadata(counts, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "strange.gguf"
    metadata = metadata_of(CONFIG)
    optional = ("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count", "tokenizer.ggml.scores")
    for key in data.draw(st.lists(st.sampled_from([*metadata, *optional]), min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            metadata.pop(key, None)
        else:
            method = data.draw(st.sampled_from(sorted(METHODS)))
            metadata[key] = (method, data.draw(METHODS[method]))
    write_gguf(path, metadata, tensors_of(CONFIG, random_weights(CONFIG)))
    count(counts, "gguf", loads_or_is_refused(lambda: load_target(path)))


QUESTIONS = [{"question_id": 81, "category": "writing", "turns": ["Why?"]}, {"turns": ["Why?", "And then?"]}]
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
CONVERSATIONS = [{"messages": TURNS}, {"messages": [{"role": "system", "content": "Be brief."}, *TURNS], "id": 3}]
FORMS = {read_questions: QUESTIONS, read_conversations: CONVERSATIONS}


@settings(max_examples=300)
@given(data=st.data())
def test_lines_of_prompts(counts, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "prompts.jsonl"
    reader = data.draw(st.sampled_from([*FORMS]))
    lines = data.draw(st.lists(st.sampled_from(FORMS[reader]), min_size=1, max_size=3))
    lines.append(changed(data.draw(st.sampled_from(FORMS[reader])), data))
    content = "\n".join(map(json.dumps, lines)).encode()
    path.write_bytes(damaged(content, data) if data.draw(st.booleans()) else content)
    count(counts, reader.__name__, loads_or_is_refused(lambda: reader(path)))


def test_cases_of_both_outcomes_were_seen(counts):
    """Last: a run in which nothing loads, or nothing is refused, has tried nothing."""
    if len(counts) < 5:
        pytest.skip("needs the other tests of this file")
    assert all(np.min(outcomes) >= 10 for outcomes in counts.values()), counts
