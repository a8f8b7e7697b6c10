"""A chat whose earlier turns are not run again.

Each turn's text is `generate`'s for the messages so far: the noise of a token depends on the row's key and on the
token's place alone, and the caches hold nothing but committed tokens, so that a turn may go on from the longest
beginning that its prompt shares with the one before and what was said to that. What is kept changes speed alone.
"""

from collections.abc import Generator, Iterator
from functools import partial
from typing import Unpack

import jax
import numpy as np

from eagle_jax import decoding
from eagle_jax.completion import Chunk, Completion
from eagle_jax.generation import BindsDrafter, Job, Options, prepare
from eagle_jax.head import Head
from eagle_jax.target import Target

Message = dict[str, str]


class Conversation:
    """A chat with a target, turn by turn.

    Attributes:
      messages: the chat so far, as `generate` takes it. It may be edited between turns: the next one keeps what still
        holds.
      prefilled: how many tokens of the last turn's prompt were run; the others were there already.
      completion: what the last turn came to; None while it is going on, and if it was abandoned.
    """

    def __init__(
        self,
        target: Target,
        head: Head | BindsDrafter | None,
        *,
        system: str | None = None,
        **options: Unpack[Options],
    ):
        """Begins a chat.

        Args:
          target: answers; it needs a tokenizer with a chat template.
          head: drafts tokens for the target to check; None decodes plainly.
          system: a message that stands before the first turn; None leaves that to the template.
          options: `generate`'s, for every turn; lists of them hold one each.
        """
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.prefilled = 0
        self.completion: Completion | None = None
        self._target = target
        self._prepare = partial(prepare, target, head, **options)
        self._streamed: Generator[Chunk, None, None] | None = None
        # None whenever its buffers are given away, so that whatever interrupts a turn leaves nothing broken behind.
        self._state: decoding.DecodeState | None = None
        self._held: list[int] = []  # tokens the state holds; the last one may not have been run

    def say(self, message: str) -> Iterator[Chunk]:
        """Answers a message and yields what each round commits. Message and answer join `messages`.

        The caller may stop at any time: what has been yielded counts as the answer, and the next turn ends this one.

        Raises:
          ValueError: the chat has as many tokens as the limit or more. It is as it was before then.
        """
        if self._streamed is not None:
            self._streamed.close()
        user = {"role": "user", "content": message}
        self._streamed = self._stream(self._prepare([[*self.messages, user]]), user)
        return self._streamed

    def ask(self, message: str) -> Completion:
        """As `say`, the whole answer at once; one that is interrupted leaves the chat as it was."""
        if self._streamed is not None:
            self._streamed.close()
        user = {"role": "user", "content": message}
        job = self._prepare([[*self.messages, user]])
        state = self._start(job)
        self._state = None
        self._state, [row] = job.decode(state)
        self._held += row.token_ids
        self.completion = row.completion()
        self.messages += [user, {"role": "assistant", "content": self.completion.text}]
        return self.completion

    def _stream(self, job: Job, user: Message) -> Generator[Chunk, None, None]:
        state, rows = self._start(job), job.rows()
        answer = {"role": "assistant", "content": ""}
        self.messages += [user, answer]
        while True:
            [chunk] = job.look(state, rows, 1)
            self._held += chunk.token_ids
            answer["content"] += chunk.text
            if chunk.finish_reason is not None:
                self.completion = rows[0].completion()
            yield chunk
            if chunk.finish_reason is not None:
                return
            self._state = None
            state = self._state = job.run_rounds(state, 1)

    def _start(self, job: Job) -> decoding.DecodeState:
        """Prefill and first token, from as far on as the state allows."""
        [prompt] = job.prompts
        self.completion = None
        begin, state, self._state = 0, self._state, None
        if state is not None:
            if state.tokens.shape[1] < job.capacity:
                options = {"program": job.program, "capacity": job.capacity, "dtype": self._target.dtype}
                state = decoding.grow(job.params, state, **options)
            tokens, keep = np.zeros(state.tokens.shape, np.int32), self._common(prompt)
            tokens[0, :keep] = prompt[:keep]
            kept = jax.device_put((tokens, np.asarray([keep], np.int32)))
            state = decoding.rewind(job.params, state, job.settings, job.keys, *kept, program=job.program)
            begin = int(state.prompt_length[0])
        state = self._state = job.start(state, begin)
        self._held, self.prefilled = list(prompt), len(prompt) - begin
        return state

    def _common(self, prompt: list[int]) -> int:
        """How many tokens of a prompt need not be run again."""
        config, held = self._target.config, self._held
        scaling = config.rope_scaling
        dynamic = scaling is not None and scaling.rope_type == "dynamic"
        if dynamic and max(len(prompt), len(held)) > config.max_position_embeddings:
            return 0  # beyond the window a prompt's length turns all of its keys
        pairs = enumerate(zip(held, prompt, strict=False))
        same = next((i for i, (old, new) in pairs if old != new), min(len(held), len(prompt)))
        # The feature before the first new token is the drafter's to come, so the last common token is run again.
        return max(same - 1, 0)
