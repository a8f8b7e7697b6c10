"""Text in, text out: `generate` and `stream` over the compiled decoding loop.

The host prepares (tokenizes, pads to length buckets, checks every option before anything runs), the device decodes,
the host reads the result once at the end, or after each round for a stream.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jinja2 import TemplateError

from eagle_jax import decoding, draft, eagle
from eagle_jax import sampling as sampling_rows
from eagle_jax.completion import Chunk, Completion, Row
from eagle_jax.config import SamplingConfig, TreeConfig
from eagle_jax.head import Head, check_fit
from eagle_jax.paths import cache_directory
from eagle_jax.sharding import to_host
from eagle_jax.target import Target

Chat = Sequence[dict[str, str]]
Prompt = str | Sequence[int] | Chat

CHUNK = 512  # longest piece of a prompt that runs at once
SMALLEST_BUCKET = 32
UNBOUNDED = np.iinfo(np.int32).max
ROUNDS_BETWEEN_LOOKS = 8  # for stop strings, which only the host can see


class BindsDrafter(Protocol):
    """A drafting method with its weights, for use in place of a head."""

    def bind(self, target: Target, tree: TreeConfig) -> tuple[draft.Drafter, Any]:
        """The static drafter and its parameters (a pytree)."""
        ...


class Options(TypedDict, total=False):
    """`generate`'s options, for type checkers."""

    max_new_tokens: int
    sampling: SamplingConfig | Sequence[SamplingConfig]
    tree: TreeConfig
    seed: int | Sequence[int]
    max_length: int | None
    stop: str | Sequence[str] | None


@overload
def generate(
    target: Target, head: Head | BindsDrafter | None, prompts: Prompt, **options: Unpack[Options]
) -> Completion: ...
@overload
def generate(
    target: Target, head: Head | BindsDrafter | None, prompts: Sequence[Prompt], **options: Unpack[Options]
) -> list[Completion]: ...
def generate(
    target: Target, head: Head | BindsDrafter | None, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
) -> Completion | list[Completion]:
    """Decodes prompts; the text is the target's own, whatever drafts.

    A seed's text is the same whatever drafts, but where children are drawn (`tree.children` "sampled" at a temperature
    above 0): those leave the law of the text as it is, not the text.

    Args:
      target: the model whose text is wanted.
      head: drafts tokens for the target to check; None decodes plainly, one token a forward.
      prompts: a string, a flat list of token ids, a chat (list of {"role", "content"}, through the model's template),
        or a list of any of these.
      max_new_tokens: most tokens to emit for each prompt, 128 unless given; 0 is allowed.
      sampling: one for all rows, or one a row; the default is greedy.
      tree: the shape of the draft tree; `nodes=1` is plain decoding.
      seed: an int, 0 unless given (row i draws from fold_in(key(seed), i)), or one a row (each as if alone under it).
      max_length: most tokens of prompt and completion together; None is the model's limit.
      stop: strings that end a text; it is cut before the first one. The host looks for them every few rounds, in the
        text, which holds no markers such as <|im_end|>: those are the target's `eos_token_ids`.

    Returns:
      A `Completion` for one prompt, a list of them for a list.

    Raises:
      ValueError: an option out of range, an empty prompt, or one at or over the limit.
    """
    single = _is_single(prompts)
    rows: Any = [prompts] if single else prompts
    job = prepare(target, head, rows, **options)
    _, read = job.decode(job.start())
    completions = [row.completion() for row in read]
    return completions[0] if single else completions


def stream(
    target: Target, head: Head | BindsDrafter | None, prompt: Prompt, **options: Unpack[Options]
) -> Iterator[Chunk]:
    """Decodes one prompt and yields what each round commits, the first token first. Options are `generate`'s.

    A character whose bytes are spread over tokens is held back until it is whole, so that the chunks' texts join to
    the completion's.
    """
    if not _is_single(prompt):
        raise ValueError(f"stream takes one prompt, not a list of {len(prompt)}; use generate for lists.")
    return _stream(prepare(target, head, [prompt], **options))


def _stream(job: "Job") -> Iterator[Chunk]:
    state, rows = job.start(), job.rows()
    while True:
        [chunk] = job.look(state, rows, 1)
        yield chunk
        if chunk.finish_reason is not None:
            return
        state = job.run_rounds(state, 1)


# --- Host side --------------------------------------------------------------------------------------------------------


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) and not isinstance(prompts, np.ndarray):
        raise ValueError(
            f"A prompt is a string, a list of token ids or a chat, or a list of these; got a {type(prompts).__name__}."
        )
    return len(prompts) == 0 or isinstance(prompts[0], (int, np.integer, dict))


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict))


def encode_prompt(target: Target, prompt: Any) -> list[int]:
    """Token ids of a prompt, with exactly one BOS where the model uses one.

    Raises:
      ValueError: the prompt is empty, holds an id outside the vocabulary, or needs a tokenizer that is not there.
    """
    if _is_text(prompt):
        tokenizer = target.tokenizer
        if tokenizer is None:
            raise ValueError(f"The target {target.name} has no tokenizer; give prompts as lists of token ids.")
        text = prompt
        if not isinstance(prompt, str):
            for message in prompt:
                if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                    raise ValueError(f"A chat holds {message!r}; each message needs a role and a content.")
            try:
                text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
            except (ValueError, TemplateError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"The target {target.name} has no chat template that takes this chat ({reason[:120].rstrip('.')}); "
                    f"set target.tokenizer.chat_template, or give the prompt as a string."
                ) from error
        # A template may have written BOS already.
        already = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not already)["input_ids"] if text else []
        # Some tokenizers end every text with EOS; a prompt is to go on.
        end = getattr(tokenizer, "eos_token_id", None)
        if not already and end is not None and ids[-1:] == [end] and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]
    else:
        ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError("The prompt is empty; give at least one token.")
    vocab_size = target.config.vocab_size
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"The prompt holds token id {outside[0]}, but the vocabulary has {vocab_size} tokens.")
    return ids


def length_bucket(length: int) -> int:
    """Prompts are padded to powers of two up to CHUNK tokens and to whole chunks beyond."""
    if length > CHUNK:
        return -(-length // CHUNK) * CHUNK
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def capacity_for(prompt_bucket: int, max_new_tokens: int, limit: int) -> int:
    """Slots for a row: a power of two that holds prompt and completion, but no more than the limit asks for."""
    wanted = 1 << (prompt_bucket + max_new_tokens - 1).bit_length()
    return min(wanted, -(-limit // SMALLEST_BUCKET) * SMALLEST_BUCKET)


def use_compile_cache() -> None:
    """Keeps compiled programs in the user's cache, unless the user has chosen a place or switched it off."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and config.jax_enable_compilation_cache:
        config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts that have been checked, and the programs to run them with."""

    target: Target
    program: decoding.Program
    params: decoding.Params
    prompts: list[list[int]]
    settings: decoding.RowSettings
    keys: jax.Array
    capacity: int
    stop: tuple[str, ...]

    def empty(self) -> decoding.DecodeState:
        """A state that has seen none of the prompts."""
        return decoding.init_state(
            self.params,
            self.settings,
            self.keys,
            program=self.program,
            capacity=self.capacity,
            dtype=self.target.dtype,
        )

    def start(self, state: decoding.DecodeState | None = None, begin: int = 0) -> decoding.DecodeState:
        """Prefill and first token; from token `begin` on, where `state` (donated) has seen those before it."""
        if state is None:
            state = self.empty()
        lengths = np.asarray([len(prompt) for prompt in self.prompts], np.int32)
        longest = int(lengths.max())
        width = min(length_bucket(longest - begin), CHUNK)
        for place in range(begin, longest, width):
            tokens = np.zeros((len(self.prompts), width + 1), np.int32)
            for row, prompt in enumerate(self.prompts):
                piece = prompt[place : place + width + 1]
                tokens[row, : len(piece)] = piece
            count, pairs = (np.clip(lengths - place - less, 0, width) for less in (0, 1))
            chunk = jax.device_put((tokens, count, pairs, lengths))
            state = decoding.prefill(self.params, state, *chunk, program=self.program)
        return decoding.first_token(self.params, state, program=self.program)

    def run_rounds(self, state: decoding.DecodeState, limit: int) -> decoding.DecodeState:
        """At most `limit` rounds. `state` is donated."""
        return decoding.run_rounds(self.params, state, jax.device_put(np.int32(limit)), program=self.program)

    def decode(self, state: decoding.DecodeState) -> tuple[decoding.DecodeState, list[Row]]:
        """All rounds; between them the host waits for nothing, unless it has stop strings to look for.

        `state` is donated.
        """
        rows = self.rows()
        if not self.stop:
            state = self.run_rounds(state, UNBOUNDED)
            self.look(state, rows)
        while any(row.running for row in rows):
            state = self.run_rounds(state, ROUNDS_BETWEEN_LOOKS)
            self.look(state, rows, ROUNDS_BETWEEN_LOOKS)
            state = decoding.end_rows(state, jax.device_put(np.asarray([not row.running for row in rows])))
        return state, rows

    def rows(self) -> list[Row]:
        """The rows, nothing read yet."""
        return [Row(self.target.tokenizer, self.stop) for _ in self.prompts]

    def look(self, state: decoding.DecodeState, rows: list[Row], rounds: int | None = None) -> list[Chunk]:
        """Reads on in the rows that are running: what the last `rounds` rounds brought, or (None) all there is."""
        if rounds is None:
            news = decoding.all_news(state)
        else:
            # The first look finds the prefill's token as well.
            width = min(1 + rounds * (self.program.drafter.depth + 1), state.tokens.shape[1])
            read = [[len(row.token_ids) for row in rows], [len(row.accepted) for row in rows]]
            news = decoding.news_since(state, *jax.device_put(np.asarray(read, np.int32)), width=width)
        values = zip(*to_host(news), strict=True)
        return [row.take(*value) for row, value in zip(rows, values, strict=True) if row.running]


def prepare(
    target: Target,
    head: Head | BindsDrafter | None,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 128,
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),
    tree: TreeConfig = TreeConfig(),
    seed: int | Sequence[int] = 0,
    max_length: int | None = None,
    stop: str | Sequence[str] | None = None,
) -> Job:
    """Checks all options, then lays prompts and settings out as rows; for those who drive the rounds themselves."""
    check_lengths(max_new_tokens, max_length)
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in strings:
        raise ValueError("stop holds an empty string; give strings of at least one character.")
    if strings and target.tokenizer is None:
        raise ValueError(f"stop needs a tokenizer, but the target {target.name} has none; use eos_token_ids instead.")
    rows = len(prompts)
    configs = [sampling] * rows if isinstance(sampling, SamplingConfig) else list(sampling)
    seed = int(seed) if isinstance(seed, (int, np.integer)) else [int(one) for one in seed]
    seeds = [seed] * rows if isinstance(seed, int) else seed
    for one in seeds:
        if not -(2**63) <= one < 2**63:
            raise ValueError(f"A seed is {one}; it must fit into 64 bits.")
    for name, given in (("sampling", len(configs)), ("seed", len(seeds))):
        if given != rows:
            raise ValueError(f"{name} is a list of {given}, but there are {rows} prompts; give one for each.")
    limit = min(target.config.context_length, max_length or UNBOUNDED)
    encoded = [encode_prompt(target, prompt) for prompt in prompts]
    for ids in encoded:
        if len(ids) >= limit:
            raise ValueError(f"The prompt has {len(ids)} tokens, but the limit is {limit}; shorten it.")

    program, params = compose(target, head, tree, configs)
    stop_ids = jnp.asarray(target.eos_token_ids or (-1,), jnp.int32)
    room = np.asarray([limit - len(ids) for ids in encoded])
    return Job(
        target=target,
        program=program,
        params=params,
        prompts=encoded,
        settings=decoding.RowSettings(
            sampling=sampling_rows.params_for(configs, target.config.vocab_size),
            stop_ids=jnp.tile(stop_ids, (rows, 1)),
            limit=jnp.asarray(np.minimum(room, max_new_tokens), jnp.int32),
        ),
        keys=sampling_rows.row_keys(seed, rows),
        capacity=capacity_for(length_bucket(max(map(len, encoded))), min(max_new_tokens, limit), limit),
        stop=strings,
    )


# Equal programs as one object: what is compiled is looked up by it at each call, and comparing deep targets takes time.
_PROGRAMS: dict[decoding.Program, decoding.Program] = {}


def compose(
    target: Target, head: Head | BindsDrafter | None, tree: TreeConfig, sampling: Sequence[SamplingConfig]
) -> tuple[decoding.Program, decoding.Params]:
    """The program for rows of these settings, and its parameters; compiled programs are kept from here on."""
    use_compile_cache()
    drafter, drafter_params = bind(target, head, tree)
    graphdef, params = nnx.split(target.model)
    program = decoding.Program(
        target=graphdef,
        config=target.config,
        drafter=drafter,
        processors=sampling_rows.processors_for(sampling),
        logits_on_walk=jax.default_backend() == "cpu",
    )
    return _PROGRAMS.setdefault(program, program), decoding.Params(params, drafter_params)


def check_lengths(max_new_tokens: int, max_length: int | None) -> None:
    """Raises ValueError for lengths that make no sense for any prompt."""
    if not isinstance(max_new_tokens, (int, np.integer)) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}; it must be a whole number and not negative.")
    if max_length is not None and max_length <= 0:
        raise ValueError(f"max_length is {max_length}; it must be at least 1.")


def bind(target: Target, head: Head | BindsDrafter | None, tree: TreeConfig) -> tuple[draft.Drafter, Any]:
    """The drafter for a head and a tree, and its parameters."""
    if head is None or tree.nodes == 1:
        return draft.NoDraft(), ()
    if isinstance(head, Head):
        check_fit(head.config, target, "head")
        drafter, params = eagle.bind_head(head, tree)
    else:
        drafter, params = head.bind(target, tree)
    # Of a static tree the draft vocabulary may leave nothing but the root.
    return (drafter, params) if drafter.nodes > 1 else (draft.NoDraft(), ())
