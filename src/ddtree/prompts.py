"""Prompts as users give them (text, chat messages or token ids), made into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddtree.errors import ConfigError, PromptError

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": ..., "content": ...}."""
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a chat."""


def is_batch(prompt: Any) -> bool:
    """Return whether this is a list of prompts rather than one: a list of neither token ids nor messages."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return not isinstance(prompt[0], int | Mapping)


def encode(
    tokenizer: Any, prompt: Any, *, chat: bool = False, template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of one prompt.

    Raw text gets the special tokens that the tokenizer adds by itself, unless it begins with the beginning-of-sequence
    token already; a chat template writes its own, so none are added to its text.

    Args:
        tokenizer: a Hugging Face tokenizer; may be None when the prompt is token ids.
        prompt: text, messages, or token ids, which are taken as they are.
        chat: text is one user message of a chat.
        template_kwargs: passed on to the chat template (`enable_thinking=False`, ...).

    Raises:
        PromptError: it is empty or malformed, or the tokenizer or template for it is missing.
        ConfigError: `template_kwargs` is no mapping.
    """
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise ConfigError(
            f"chat_template_kwargs must map names to values, not {template_kwargs!r}: leave it out, or give a dict"
        )
    if isinstance(prompt, str):
        check_text(prompt)
        if not prompt:
            raise PromptError("the prompt is empty: give at least one character")
        if chat:
            return _templated(tokenizer, [{"role": "user", "content": prompt}], template_kwargs or {})
        bos = getattr(_known(tokenizer), "bos_token", None)
        ids = tokenizer.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))
        return [int(token) for token in ids]
    if not isinstance(prompt, list | tuple):
        raise PromptError(f"a prompt is text, token ids or messages, not {type(prompt).__name__}")
    if not prompt:
        raise PromptError("the prompt is empty: give text, token ids or messages")
    if all(isinstance(part, Mapping) for part in prompt):
        return _templated(tokenizer, prompt, template_kwargs or {})
    if any(isinstance(part, bool) or not isinstance(part, int) for part in prompt):
        raise PromptError("a list as prompt holds token ids only, or messages only")
    return list(prompt)


def check_text(prompt: Any) -> None:
    """Raise PromptError for text with half of a surrogate pair in it, which no tokenizer can read."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            code = ord(prompt[error.start])
            raise PromptError(
                f"the text holds half a character (U+{code:04X} at {error.start}): give valid Unicode"
            ) from error
    elif isinstance(prompt, Mapping):
        for part in prompt.values():
            check_text(part)
    elif isinstance(prompt, list | tuple):
        for part in prompt:
            check_text(part)


def _templated(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
    """Return the token ids of messages in the tokenizer's chat template."""
    check_text(messages)
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise PromptError(
                f'message {dict(message)!r} lacks a part: write {{"role": ..., "content": ...}}'
            )
    if getattr(_known(tokenizer), "chat_template", None) is None:
        raise PromptError("the target's tokenizer has no chat template: give the prompt as text")
    settings = {"add_generation_prompt": True, **options, "tokenize": True, "return_dict": False}
    try:
        ids = tokenizer.apply_chat_template([dict(message) for message in messages], **settings)
    except Exception as error:
        # Templates raise whatever they like: jinja's errors, and their own through raise_exception.
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    return [int(token) for token in ids]


def _known(tokenizer: Any) -> Any:
    """Return the tokenizer; raise PromptError when there is none."""
    if tokenizer is None:
        raise PromptError("the target has no tokenizer: give token ids, or load it with tokenizer=...")
    return tokenizer
