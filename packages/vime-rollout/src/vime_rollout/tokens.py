"""Text to token ids, once, and back for reading only.

A prompt is encoded exactly once, here; what the engine then samples is kept as ids. Responses are decoded so that
rewards and people can read them, and that text is never encoded again: decode and encode do not round-trip, and a
trainer that re-tokenises trains on tokens that nobody sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime_rollout.errors import DataError
from vime_rollout.sample import Message, Prompt

#: Tokens that are worth waking other cores for: of fewer, decoding takes less than their answer.
_WORTH_SHARING = 2048


class Encoder:
    """The tokenizer and chat template of a model folder.

    Args:
        model: Folder with the tokenizer's files (Hugging Face layout).
        template_options: Passed to the chat template (such as ``{"enable_thinking": False}``).

    Raises:
        DataError: When the folder holds no tokenizer.
    """

    def __init__(self, model: str | Path, *, template_options: Mapping[str, Any] | None = None) -> None:
        """Load the tokenizer from the folder; nothing is fetched from a network."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # deferred: they take seconds to import

        self.model = str(model)
        self._options = dict(template_options or {})
        self._plain: Any = PreTrainedTokenizerFast
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                "no tokenizer can be loaded",
                where=self.model,
                seen=str(error),
                expected="a model folder with a tokenizer",
            ) from error

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, ``None`` when the tokenizer names none."""
        token_id = self._tokenizer.eos_token_id
        return None if token_id is None else int(token_id)

    def encode(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its token ids; one that has them is returned as it is.

        Chat messages are rendered by the model's template with the generation prompt at the end. The template writes
        the special tokens itself, so none are added; to plain text the tokenizer adds its own (such as a BOS token).

        Raises:
            DataError: When there is no chat template for messages, it refuses them, or nothing comes out.
        """
        if prompt.tokens:
            return prompt
        text, add_special = prompt.text, True
        if prompt.messages:
            text, add_special = self.render(prompt.messages, where=f"prompt {prompt.id}"), False
        tokens = self._tokenizer(text, add_special_tokens=add_special)["input_ids"]
        if not tokens:
            raise DataError("prompt has no tokens", where=f"prompt {prompt.id}", seen=repr(text[:80]))
        return dataclasses.replace(prompt, tokens=tuple(int(t) for t in tokens))

    def render(self, messages: Sequence[Message], *, where: str = "") -> str:
        """Return chat messages as the template writes them, with the generation prompt at the end.

        Args:
            messages: In order.
            where: Whose they are, for errors.

        Raises:
            DataError: When there is no chat template, or it refuses the messages.
        """
        where = ", ".join(part for part in (where, f"model {self.model}") if part)
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                "model has no chat template", where=where, fix="use plain text prompts, or add a chat template"
            )
        from jinja2 import TemplateError  # what templates raise; transformers needs jinja2 for them anyway

        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **self._options
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError("chat template refuses the messages", where=where, seen=str(error)) from error
        return str(rendered)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that the template wrote; nothing is added to it."""
        return tuple(int(t) for t in self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return text for people and rewards.

        Args:
            tokens: Ids.
            special: Write special tokens as the template does, instead of leaving them out.
        """
        (text,) = self.decode_many([tokens], special=special)
        return text

    def decode_many(self, responses: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Return the texts of several token sequences, made side by side on the host's cores where that is worth it.

        Args:
            responses: Ids of each.
            special: As for ``decode``.
        """
        kind, plain = type(self._tokenizer), self._plain
        if issubclass(kind, plain) and (kind.decode, kind._decode) == (plain.decode, plain._decode):
            # What is behind it: all else that it does is to look at every id in turn.
            backend = self._tokenizer.backend_tokenizer
            if len(responses) == 1 or sum(map(len, responses)) < _WORTH_SHARING:
                return [str(backend.decode(list(r), skip_special_tokens=not special)) for r in responses]
            return list(backend.decode_batch([list(r) for r in responses], skip_special_tokens=not special))
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return [str(self._tokenizer.decode(list(response), **options)) for response in responses]
