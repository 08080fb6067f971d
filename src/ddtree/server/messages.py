"""Chats as clients send them, made into token ids by the model's own template."""

from __future__ import annotations

from typing import Any

from ddtree import prompts
from ddtree.server.http import ApiError
from ddtree.server.schemas import ChatMessage, ChatRequest, TokenizeRequest
from ddtree.server.unsupported import refuse_message, refuse_part, refuse_template_arguments


def encode_chat(tokenizer: Any, request: ChatRequest | TokenizeRequest) -> list[int]:
    """The prompt of a request that has messages.

    Raises:
        ApiError: something in it is no text.
        PromptError: as `prompts.encode`.
    """
    messages = request.messages or []
    if not messages:
        raise ApiError(400, "messages is empty: send at least one", param="messages", code="invalid_value")
    chat = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _rename_developers(tokenizer, chat)
    return prompts.encode(tokenizer, chat, template_kwargs=_variables(request))


def _variables(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What the template is given besides the messages."""
    given = dict(request.chat_template_kwargs or {})
    refuse_template_arguments(given)
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        given.setdefault("reasoning_effort", effort)
    for name in ("add_generation_prompt", "continue_final_message"):
        value = getattr(request, name)
        if value is not None:
            given[name] = value
    if given.get("continue_final_message") and getattr(request, "add_generation_prompt", None) is None:
        given["add_generation_prompt"] = False
    return given


def _message(message: ChatMessage, place: str) -> dict[str, Any]:
    refuse_message(message, place)
    more = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    return {**more, "role": message.role, "content": _text(message, place)}


def _text(message: ChatMessage, place: str) -> str:
    """The content as one text; parts stand on lines of their own."""
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            refuse_part(part.type, f"{place}.content[{i}]")
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def _rename_developers(tokenizer: Any, chat: list[dict[str, Any]]) -> None:
    """OpenAI's newer name of the system role, for templates that do not know it."""
    if "developer" not in str(getattr(tokenizer, "chat_template", None)):
        for message in chat:
            if message["role"] == "developer":
                message["role"] = "system"
