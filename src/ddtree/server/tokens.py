"""Chats as token ids, and single tokens as texts, bytes and log-probabilities in the forms of OpenAI's API."""

from __future__ import annotations

import codecs
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ddtree import prompts
from ddtree.sampling.sampler import TokenLogprobs
from ddtree.server.http import ApiError, unsupported
from ddtree.server.schemas import EMPTY, ChatMessage, ChatRequest, TokenizeRequest

_TEMPLATE_ARGUMENTS = frozenset({
    "chat_template", "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "conversation", "messages", "return_assistant_tokens_mask", "tools", "documents", "self",
})  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LOWEST = -9999.0
"""The value written for a log-probability of minus infinity, which JSON cannot hold."""


def encode_chat(tokenizer: Any, request: ChatRequest | TokenizeRequest) -> list[int]:
    """Return the token ids of a request's messages, through the model's chat template.

    Raises:
        ApiError: a message holds something besides text, or a variable is not one of the template's.
        PromptError: as `prompts.encode`.
    """
    messages = request.messages or []
    if not messages:
        raise ApiError(400, "messages is empty: send at least one", param="messages", code="invalid_value")
    chat = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    # OpenAI's newer name of the system role, for templates that do not know it.
    if "developer" not in str(getattr(tokenizer, "chat_template", None)):
        for message in chat:
            if message["role"] == "developer":
                message["role"] = "system"
    return prompts.encode(tokenizer, chat, template_kwargs=_template_variables(request))


def _template_variables(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    given = dict(request.chat_template_kwargs or {})
    for name in _TEMPLATE_ARGUMENTS & given.keys():
        message = f"chat_template_kwargs: {name} is not for clients to set"
        raise ApiError(400, message, param="chat_template_kwargs", code="unsupported_parameter")
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        given.setdefault("reasoning_effort", effort)
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(request, name) is not None:
            given[name] = getattr(request, name)
    if given.get("continue_final_message") and request.add_generation_prompt is None:
        given["add_generation_prompt"] = False
    return given


def _message(message: ChatMessage, place: str) -> dict[str, Any]:
    more = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    for name in ("tool_calls", "function_call", "audio"):
        if more.get(name) not in EMPTY:
            kind = "audio is" if name == "audio" else "tool calls are"
            raise unsupported(f"{place}.{name}", f"{kind} not supported")
    content = message.content or ""
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.type != "text":
                reason = f"{part.type!r} is not supported: parts are text"
                raise unsupported(f"{place}.content[{i}].type", reason)
        content = "\n".join(part.text or "" for part in content)
    return {**more, "role": message.role, "content": content}


def as_text(tokenizer: Any, prompt: str | list[int]) -> str:
    """Return a prompt as text, special tokens included; token ids are "" without a tokenizer."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        return ""
    return str(tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False))


# The byte of each character of byte-level vocabularies.
_BYTES = {char: byte for byte, char in bytes_to_unicode().items()}


class TokenTexts:
    """Texts of a tokenizer's tokens, each looked up once. Any thread may ask.

    Args:
        tokenizer: a Hugging Face tokenizer; without one a token's text is its id, and it has no bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """Return text and bytes of a token. Bytes that are no whole character have the text `bytes:\\xe2\\x82`."""
        if self._tokenizer is None:
            return str(token), b""
        if token not in self._known:
            data = self._bytes(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._known[token] = (text, data)
        return self._known[token]

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte and text != name:
            return bytes([int(byte[1], 16)])
        if "\ufffd" in text and all(char in _BYTES for char in name):
            return bytes(_BYTES[char] for char in name)
        # Decoders of sentencepiece vocabularies strip the space before the first word.
        if name.startswith("▁") and not text.startswith(" "):
            text = " " + text
        return str(text).encode(errors="replace")


def chat_logprobs(entries: list[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Return log-probabilities in the form of chats."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = texts(token)
        return {"token": text, "logprob": max(value, _LOWEST), "bytes": list(data)}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]}
        for one in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writes the log-probabilities of one answer in the older form of completions, piece by piece.

    Args:
        texts: texts of tokens.
        offset: characters before the answer's text, as those of an echoed prompt.
        hidden: tokens that the text leaves out.
    """

    def __init__(self, texts: TokenTexts, offset: int, hidden: frozenset[int] = frozenset()) -> None:
        self._texts = texts
        self._hidden = hidden
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        """Return the next piece."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            if entry.token not in self._hidden:
                self._offset += len(self._decoder.decode(self._texts(entry.token)[1]))
        return {
            "tokens": [self._texts(entry.token)[0] for entry in entries],
            "token_logprobs": [max(entry.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # The chosen token is among them even when others are likelier. Of two tokens with one text the likelier is
        # written, except for the chosen one.
        pairs = [*reversed(entry.top), (entry.token, entry.logprob)]
        return {self._texts(token)[0]: max(value, _LOWEST) for token, value in pairs}


def prompt_logprobs(first: int, entries: list[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Return a prompt's log-probabilities in the older form; its first token has none."""
    told = CompletionLogprobs(texts, 0)([TokenLogprobs(first, 0.0, ()), *entries])
    told["token_logprobs"][0] = told["top_logprobs"][0] = None
    return told
