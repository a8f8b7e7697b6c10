"""Recipes by name, and the memory that each takes: `docs/recipes.md` is what this script writes.

    python train/recipes.py --output docs/recipes.md

Nothing is trained and no weights are needed: shapes are laid out over fake CPU devices and the compiler is asked what
it would hold. Expect a few minutes on two cores.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from eagle_jax import sharding, training
from eagle_jax.config import HeadConfig, ModelConfig, RopeScaling
from eagle_jax.features import features_of
from eagle_jax.head import FrozenEnds, HeadModel, config_for
from eagle_jax.layers import parameter_count
from eagle_jax.script import run
from eagle_jax.target import TargetModel

GIB = 2**30
COMMAND = """python train/train_head.py --target TARGET --data conversations.jsonl --output runs/head \\
    --online --draft-vocabulary 0 --max-length {length} --tokens-per-batch TOKENS OPTIONS"""
COMPILED_LAYERS = 2  # of a target: what a layer holds for a while is gone when the next needs room


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A head for one target, at the paper's settings (EAGLE section 4)."""

    target: str  # what `load_target` takes
    config: ModelConfig
    head_key_value_heads: int | None = None  # where the published head has not its target's
    tensor: int = 1
    chips: tuple[int, ...]  # fsdp is what `tensor` leaves of them
    length: int = 2048
    settings: training.TrainConfig = training.TrainConfig()

    @property
    def mesh(self) -> sharding.MeshConfig:
        return sharding.MeshConfig(fsdp=-1, tensor=self.tensor)

    @property
    def head(self) -> HeadConfig:
        return config_for(self.config, key_value_heads=self.head_key_value_heads)

    @property
    def options(self) -> str:
        """What `train/train_head.py` is told beside the target."""
        own = "" if self.head_key_value_heads is None else f" --head-key-value-heads {self.head_key_value_heads}"
        return f"--mesh.fsdp -1 --mesh.tensor {self.tensor}{own}"


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None = None, **others: Any) -> ModelConfig:
    fields: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5} | others
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **fields,
    )


VICUNA = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
LLAMA3 = RopeScaling(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)

RECIPES = {
    "vicuna-7b": Recipe(target="lmsys/vicuna-7b-v1.3", config=llama(4096, 11008, 32, 32, **VICUNA), chips=(1, 8)),
    "vicuna-13b": Recipe(target="lmsys/vicuna-13b-v1.3", config=llama(5120, 13824, 40, 40, **VICUNA), chips=(1, 8)),
    "vicuna-33b": Recipe(
        target="lmsys/vicuna-33b-v1.3",
        config=llama(6656, 17920, 60, 52, **VICUNA),
        head_key_value_heads=13,
        tensor=2,
        chips=(8,),
    ),
    "llama-2-7b": Recipe(target="meta-llama/Llama-2-7b-chat-hf", config=llama(4096, 11008, 32, 32), chips=(1, 8)),
    "llama-2-13b": Recipe(target="meta-llama/Llama-2-13b-chat-hf", config=llama(5120, 13824, 40, 40), chips=(1, 8)),
    "llama-2-70b": Recipe(
        target="meta-llama/Llama-2-70b-chat-hf", config=llama(8192, 28672, 80, 64, 8), tensor=4, chips=(8, 16, 64)
    ),
    "llama-3.1-8b": Recipe(
        target="meta-llama/Llama-3.1-8B-Instruct",
        config=llama(
            *(4096, 14336, 32, 32, 8),
            vocab_size=128256,
            max_position_embeddings=131072,
            rope_theta=5e5,
            rope_scaling=LLAMA3,
        ),
        chips=(1, 8),
    ),
    "mixtral-8x7b": Recipe(
        target="mistralai/Mixtral-8x7B-Instruct-v0.1",
        config=llama(
            *(4096, 14336, 32, 32, 8),
            max_position_embeddings=32768,
            rope_theta=1e6,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        head_key_value_heads=32,
        tensor=2,
        chips=(8, 32),
    ),
}


# The embedded model's head, run after run; its card says what came of each.
EMBEDDED_DATA = (
    "python train/synthesize.py --prompts prompts.jsonl --exclude mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --rows 64 "
    "--output chats.jsonl",
    "python train/make_features.py --data chats.jsonl --output features",
)
EMBEDDED_SHARED = (
    "--data chats.jsonl --features features --held-out 0.0365 --recipe.optimizer muon --recipe.warmup-steps 10"
)
EMBEDDED_RUNS = (
    "--output runs/1 --recipe.steps 1800 --recipe.learning-rate 1e-3",
    "--output runs/2 --start runs/1 --recipe.steps 900 --recipe.learning-rate 5e-4 --recipe.muon-learning-rate 0.01 "
    "--recipe.noise 0.8 --recipe.seed 2",
    "--output runs/3 --start runs/2 --recipe.steps 1700 --recipe.learning-rate 5e-4 --recipe.muon-learning-rate 0.01 "
    "--recipe.unroll 2 --recipe.seed 4",
)


def embedded() -> str:
    """The commands that make the embedded model's head, on two CPU cores."""
    runs = [f"$train {run}" for run in EMBEDDED_RUNS]
    return "\n".join([*EMBEDDED_DATA, f'train="python train/train_head.py {EMBEDDED_SHARED}"', *runs])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one chip."""

    target: int  # parameters in bfloat16
    training: int  # the head's float32 parameters and the optimizer's moments
    forward: int  # what the target's forward holds for a while
    step: int  # what the training step holds for a while, its batch included

    @property
    def total(self) -> int:
        return self.target + self.training + max(self.forward, self.step)


def head_shapes(config: HeadConfig) -> tuple[nnx.GraphDef, Any]:
    return nnx.split(nnx.eval_shape(lambda: HeadModel(config, rngs=nnx.Rngs(0))))


def memory(recipe: Recipe, mesh: Mesh) -> Memory:
    """What a recipe takes of a chip, by its shapes' shardings and by what the compiler reports."""
    rules = sharding.ShardingRules(key_dim=recipe.config.key_dim)
    rows, hidden = sharding.row_multiple(mesh), recipe.config.hidden_size

    def placed(shapes: Any) -> Any:
        places = sharding.shardings_for(shapes, mesh, rules)
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
        )

    def of_batch(dtype: Any, *tail: int) -> Any:
        return jax.ShapeDtypeStruct((rows, recipe.length, *tail), dtype, sharding=sharding.batch_sharding(mesh))

    def bytes_of(tree: Any) -> int:
        shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree)]
        return sum(jax.ShapeDtypeStruct(shape, dtype).size * dtype.itemsize for shape, dtype in shards)

    def target_of(config: ModelConfig) -> tuple[nnx.GraphDef, Any]:
        graphdef, shapes = nnx.split(nnx.eval_shape(lambda: TargetModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
        return graphdef, placed(shapes)

    _, whole = target_of(recipe.config)
    _, shapes = head_shapes(recipe.head)
    graphdef = training.compute_graphdef(recipe.head, jnp.bfloat16)
    state = placed(jax.eval_shape(partial(training.init_state, config=recipe.settings), shapes))
    matrix: Any = jax.ShapeDtypeStruct((recipe.config.vocab_size, hidden), jnp.bfloat16)
    ends = placed(FrozenEnds(matrix, matrix, None))
    tokens, features = of_batch(jnp.int32), of_batch(jnp.bfloat16, hidden)
    with jax.set_mesh(mesh):
        few = target_of(dataclasses.replace(recipe.config, num_hidden_layers=COMPILED_LAYERS))
        forward: Any = features_of.lower(*few, tokens).compile().memory_analysis()
        step = sharding.in_place(partial(training.train_step, graphdef=graphdef, config=recipe.settings), state)
        batch = training.Batch(tokens, of_batch(jnp.bool_), features)
        trained: Any = step.lower(state, ends, batch).compile().memory_analysis()
    return Memory(
        target=bytes_of(whole),
        training=bytes_of({"head": state.head, "optimizer": state.optimizer}),
        forward=forward.temp_size_in_bytes + forward.output_size_in_bytes,
        step=trained.temp_size_in_bytes + bytes_of(batch),
    )


TEXT = """# Recipes

Written by `python train/recipes.py --output docs/recipes.md`. The recipes are in
[train/recipes.py](../train/recipes.py); how to start them on one GPU, several or a pod is in [scaling.md](scaling.md).

The head of each target with the paper's settings (AdamW, learning rate 3e-5, loss weights 1.0 and 0.1; EAGLE section
4). A batch is one row of {length:,} tokens for each part of `data` x `fsdp`, in the second table TOKENS a step; the
target's features are computed online, and the head drafts over the whole vocabulary.

```
{command}
```

| recipe | target | head's parameters | options |
| --- | --- | --- | --- |
{recipes}

## Memory of one chip, GiB

| recipe | chips | TOKENS a step | target | head and optimizer | target's forward | training step | sum |
| --- | --- | --- | --- | --- | --- | --- | --- |
{memory}

* target, head and optimizer: the shapes' bytes on one device under the sharding rules (`eval_shape`); the target in
  bfloat16, the head in float32 with AdamW's two moments. Exact.
* target's forward, training step: what comes and goes, by `jit(...).lower(shapes).compile().memory_analysis()` on as
  many fake CPU devices. Both compute in bfloat16, the step on float32 masters. A CPU has no bfloat16 products: the
  compiler widens operands to float32, which an accelerator does not. The target is compiled with {layers} of its
  layers. For more of them the CPU's schedule widens, and under `fsdp` gathers, weights long before they are used, up to
  a layer's parameters in float32 for each further layer; how many gathered layers an accelerator's schedule holds at
  once has not been measured.
* sum: the first two and the larger of the last two, which follow one another. An estimate to choose a mesh by.

## The head of the embedded model

`smollm2-135m` on two CPU cores, in float32. [Its card](../eagle_jax/heads/smollm2-135m/README.md) has the data, what
each run came to and what was measured. (The first of these runs was two: 300 steps, and 1,500 more from there with a
schedule of their own.)

```
{embedded}
```

`train/embedded_on_gpu.sh` writes conversations and trains such a head on a GPU in one command, by a recipe of its own.
"""


def document(devices: Sequence[Any]) -> str:
    described, measured = [], []
    for name, recipe in RECIPES.items():
        count = parameter_count(head_shapes(recipe.head)[1])
        described.append(f"| {name} | `{recipe.target}` | {count / 1e9:.2f} B | `{recipe.options}` |")
        for chips in recipe.chips:
            mesh = sharding.make_mesh(recipe.mesh, devices[:chips])
            found = memory(recipe, mesh)
            sizes = (found.target, found.training, found.forward, found.step, found.total)
            cells = " | ".join(f"{size / GIB:.1f}" for size in sizes)
            tokens = sharding.row_multiple(mesh) * recipe.length
            measured.append(f"| {name} | {chips} | {tokens:,} | {cells} |")
            print(measured[-1], flush=True)
    length = max(recipe.length for recipe in RECIPES.values())
    return TEXT.format(
        length=length,
        command=COMMAND.format(length=length),
        layers=COMPILED_LAYERS,
        recipes="\n".join(described),
        memory="\n".join(measured),
        embedded=embedded(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    output: Path  # a Markdown file


def main(options: Options) -> None:
    most = max(chips for recipe in RECIPES.values() for chips in recipe.chips)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", most)
    options.output.write_text(document(jax.devices()))


if __name__ == "__main__":
    run(main, Options, __doc__)
