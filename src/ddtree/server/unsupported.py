"""Fields that clients send and this server cannot honour: refused by name, unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddtree.server.http import ApiError
from ddtree.server.schemas import ChatMessage, ChatRequest, Generation

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_TOOLS = "tool calls are not supported: leave it out, or send tool_choice none"
_GRAMMAR = "answers cannot be held to a grammar"
_SAMPLER = "there is no such way to sample: temperature, top_p, top_k and min_p are there"
_IDS = "use ddtree_details for token ids"

# Each with the reason, and the values that ask for nothing besides the empty ones.
_UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "functions": (_TOOLS, ()),
    "function_call": (_TOOLS, ("none", "auto")),
    "tool_choice": (_TOOLS, ("none", "auto")),
    "response_format": (_GRAMMAR, ({"type": "text"},)),
    "structured_outputs": (_GRAMMAR, ()),
    "guided_json": (_GRAMMAR, ()),
    "guided_regex": (_GRAMMAR, ()),
    "guided_choice": (_GRAMMAR, ()),
    "guided_grammar": (_GRAMMAR, ()),
    "grammar": (_GRAMMAR, ()),
    "json_schema": (_GRAMMAR, ()),
    "regex": (_GRAMMAR, ()),
    "ebnf": (_GRAMMAR, ()),
    "modalities": ("answers are text", (["text"],)),
    "audio": ("answers are text", ()),
    "web_search_options": ("there is no search", ()),
    "prompt_logprobs": ("completions tell them with echo and logprobs", (False,)),
    "use_beam_search": ("there is no beam search", (False,)),
    "length_penalty": ("there is no beam search", (0, 0.0, 1, 1.0)),
    "allowed_token_ids": ("use logit_bias", ()),
    "n_predict": ("use max_tokens", (-1,)),
    "max_new_tokens": ("use max_tokens", ()),
    "min_new_tokens": ("use min_tokens", (0,)),
    "repeat_penalty": ("use repetition_penalty", (1, 1.0)),
    "typical_p": (_SAMPLER, (1, 1.0)),
    "mirostat": (_SAMPLER, (0,)),
    "dynatemp_range": (_SAMPLER, (0, 0.0)),
    "xtc_probability": (_SAMPLER, (0, 0.0)),
    "dry_multiplier": (_SAMPLER, (0, 0.0)),
    "top_n_sigma": (_SAMPLER, (-1, -1.0, 0, 0.0)),
    "logits_processors": ("code of clients is not run", ()),
    "truncate_prompt_tokens": ("shorten the prompt before", ()),
    "spaces_between_special_tokens": ("special tokens are written as the tokenizer does", (True,)),
    "return_tokens_as_token_ids": (_IDS, (False,)),
    "return_token_ids": (_IDS, (False,)),
    "detokenize": (f"answers are text; {_IDS} besides", (True,)),
    "chat_template": ("the model's own template is used", ()),
    "documents": ("put them into the messages", ()),
    "mm_processor_kwargs": ("prompts are text", ()),
}
_BY_CHATS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "add_special_tokens": ("the chat template writes them", (False,)),
    "echo": ("only completions echo their prompt", (False,)),
    "best_of": ("only completions have it", (1,)),
}
_BY_COMPLETIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "add_special_tokens": ("send token ids as prompt", (True,)),
    "suffix": ("text cannot be filled in before a suffix", ()),
}

_TEMPLATE_ARGUMENTS = frozenset({
    "chat_template", "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "conversation", "messages", "return_assistant_tokens_mask", "tools", "documents", "self",
})  # fmt: skip


def refuse(request: Generation) -> None:
    """Raise ApiError for the first field that is not supported."""
    sent = request.model_extra or {}
    chat = isinstance(request, ChatRequest)
    if sent.get("tools") not in _EMPTY and sent.get("tool_choice") != "none":
        raise _refusal("tools", _TOOLS)
    if not chat and sent.get("best_of") not in (None, request.n or 1):
        raise _refusal("best_of", "it must equal n, as no answers are made and thrown away")
    for name, (reason, harmless) in (_UNSUPPORTED | (_BY_CHATS if chat else _BY_COMPLETIONS)).items():
        value = sent.get(name)
        if value in _EMPTY or any(type(value) is type(one) and value == one for one in harmless):
            continue
        raise _refusal(name, reason)


def refuse_template_arguments(names: Iterable[str]) -> None:
    """Raise ApiError for template variables that are arguments of the tokenizer's own, and not the template's."""
    for name in names:
        if name in _TEMPLATE_ARGUMENTS:
            raise ApiError(
                400,
                f"chat_template_kwargs: {name} is not for clients to set",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )


def refuse_message(message: ChatMessage, place: str) -> None:
    """Raise ApiError for what a message holds besides text."""
    sent = message.model_extra or {}
    for name in ("tool_calls", "function_call", "audio"):
        if sent.get(name) not in _EMPTY:
            reason = "audio is not supported" if name == "audio" else "tool calls are not supported"
            raise _refusal(f"{place}.{name}", reason)


def refuse_part(kind: str, place: str) -> None:
    """Raise ApiError for a part of a message that is not text."""
    if kind != "text":
        raise _refusal(f"{place}.type", f"{kind!r} is not supported: parts are text")


def _refusal(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
