"""train_head.py by two real processes on loopback: what one process does, features and live tau included."""

import collections
import json
import random

import mesh_rig
import numpy as np
import pytest
from rig import random_weights, word_tokenizer
from test_repository import CONFIG as LLAMA
from test_repository import write
from test_sharding import arrays_of, free_address, launch

import eagle_jax as ej

CHATS, HELD_OUT, STEPS, EVALUATE = 24, 6, 20, 10
SHARD_TOKENS = 128


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Arguments of train_head.py: a target with a tokenizer, and conversations that all differ."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    fields = {name: getattr(mesh_rig.CONFIG, name) for name in LLAMA if hasattr(mesh_rig.CONFIG, name)}
    target = write(folder / "a target", random_weights(mesh_rig.CONFIG), LLAMA | fields, 1)
    word_tokenizer().save_pretrained(target)
    lines = []
    for number in range(CHATS):
        asked, answered = (" ".join(draw.choices("abcdefgh", k=count)) for count in (6, 10 + number))
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--target", target, "--data", folder / "chats.jsonl", "--held-out", HELD_OUT / CHATS]
    arguments += ["--tokens-per-batch", 256, "--recipe.steps", STEPS, "--recipe.learning-rate", 5e-3]
    arguments += ["--evaluate-every", EVALUATE, "--save-every", 10, "--log-every", 1, "--tau-prompts", 4]
    arguments += ["--tau-tokens", 32, "--tree.nodes", 8, "--tree.depth", 3, "--tree.top-k", 4]
    return target, list(map(str, arguments))


def start(data, outputs, *arguments, full=None):
    """train_head.py by as many processes as there are outputs, together if several; the disk of one may be full."""
    together = ["--processes.coordinator", free_address(), "--processes.count", str(len(outputs))]
    running = []
    for index, output in enumerate(outputs):
        own = [*together, "--processes.index", str(index)] if len(outputs) > 1 else []
        options = {"arguments": [*data[1], "--output", str(output), *own, *arguments], "full": index == full}
        running.append(launch("script", f"{output}.{index}.npz", 1, shard_tokens=SHARD_TOKENS, **options))
    return running


def records(output):
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """What one process leaves."""
    output = tmp_path_factory.mktemp("one") / "run"
    arrays_of(*start(data, [output]))
    return output


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["--mesh.fsdp", "2"], ["--mesh.data", "2", "--mesh.fsdp", "1"]], ids=["fsdp", "data"])
def test_two_processes_make_features_train_and_decode_as_one(data, one, tmp_path, mesh):
    output = tmp_path / "run"
    both = arrays_of(*start(data, [output] * 2, *mesh))
    assert [process["claims"] for process in both] == [1, 1]

    # Each row's features once, each row once an epoch, each held-out row once an evaluation: in one of the two.
    counts = collections.Counter(np.concatenate([process["read"] for process in both]).tolist())
    made = {name.removeprefix("features "): count for name, count in counts.items() if name.startswith("features ")}
    trained = {name.removeprefix("training "): count for name, count in counts.items() if name.startswith("training ")}
    epochs = STEPS // 5
    assert len(made) == CHATS and set(made.values()) == {1}
    assert trained.keys() == made.keys()
    assert collections.Counter(trained.values()) == {epochs: CHATS - HELD_OUT, STEPS // EVALUATE: HELD_OUT}
    assert all(0 < len(process["read"]) < sum(counts.values()) for process in both)

    kept = [sorted((path / "features").glob("*.npy")) for path in (output, one)]
    assert len(kept[0]) == len(kept[1]) >= 4
    for here, there in zip(*kept, strict=True):
        # Kept in float16: of what rounds the other way, one unit in the last place.
        np.testing.assert_allclose(np.load(here), np.load(there), rtol=2**-10, atol=1e-5)

    several, single = records(output), records(one)
    assert [record["step"] for record in several if "tau" in record] == [10, 20]
    for here, there in zip(several, single, strict=True):
        assert here.keys() == there.keys()
        for name, value in here.items():
            assert value == pytest.approx(there[name], rel=1e-3, abs=1e-4), name
    assert several[-1]["tau"] > 1.2  # drafts were accepted
    head = ej.load_head(output, ej.load_target(data[0]))
    assert len(ej.generate(ej.load_target(data[0]), head, "a b", max_new_tokens=4).token_ids) > 0


@pytest.mark.slow
def test_a_directory_that_is_not_shared_is_one_sentence_in_each_process(data, tmp_path):
    """And before anything is computed."""
    running = start(data, [tmp_path / "here", tmp_path / "there"], "--mesh.data", "2", "--mesh.fsdp", "1")
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [1, 1]
    said = (
        f"Process 1 of 2 does not find manifest.json in {tmp_path}/there/features, though it has been written: the "
        "processes do not share that directory; give one that they share."
    )
    assert f"error: Process 1 of 2: {said}" in printed[0].splitlines()
    assert f"error: {said}" in printed[1].splitlines()
    assert not list(tmp_path.glob("*/features/shard*"))


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_is_one_sentence_in_each(data, tmp_path):
    """Whole shards stay, and the same command goes on from there."""
    running = start(data, [tmp_path / "run"] * 2, full=1)
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [1, 1]
    said = f"{tmp_path}/run/features/shard-00001.npy cannot be written (No space left on device); 1 of "
    assert any(line.startswith(f"error: Process 1 of 2: {said}") for line in printed[0].splitlines())
    assert any(line.startswith(f"error: {said}") for line in printed[1].splitlines())
    left = sorted(path.name for path in (tmp_path / "run" / "features").iterdir())
    assert left == ["manifest.json", "shard-00000.npy"]
