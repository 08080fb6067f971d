"""The requests as their senders write them: names and types. Ranges are checked where the values are used.

Unknown fields are tolerated; those that would change the answer, and are not supported, are refused by `unsupported`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_BIASES = 4096
MAX_PROMPTS = 4096

T = TypeVar("T")
# One complaint is told: with one for each of a million entries, the others' answers would wait for seconds.
Many = Annotated[list[T], Field(fail_fast=True)]
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries: at most {MAX_BIASES}")
    return value


class Request(BaseModel):
    # Strict: a string is no number and true is no 1. Null means "not given" throughout.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Request):
    include_usage: bool | None = Field(None, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk carries the usage so far.")


class Generation(Request):
    """What chats and completions have in common."""

    model: str | None = Field(None, description="As in /v1/models; may be left out.")
    max_tokens: int | None = Field(None, description="Most tokens of each answer.")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    temperature: float | None = Field(None, description="0 always takes the likeliest token; up to 100.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: all.")
    min_p: float | None = None
    n: int | None = Field(None, description="Answers; each has a seed of its own.")
    seed: int | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few)] = Field(
        None, description="Token id to -100..100."
    )
    bad_words: Many[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ddtree: dict[str, Any] | None = Field(
        None, description="How to draft: method, depth, budget, drafter. Changes the time, never the text."
    )
    ddtree_details: bool | None = Field(
        None, description="Tell of each token how it came, and the figures of each answer."
    )
    ddtree_timings: bool | None = Field(None, description="Tell the figures of each answer.")


class ContentPart(Request):
    type: str
    text: str | None = None


class ChatMessage(Request):
    role: str
    content: str | Many[ContentPart] | None = None


class ChatRequest(Generation):
    messages: Many[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Generation):
    prompt: str | Many[int] | Prompts[str] | Prompts[Many[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeRequest(Request):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Request):
    model: str | None = None
    tokens: Many[int]


class DraftingRequest(Request):
    """Fields that are left out stay as they are."""

    method: str | None = None
    depth: int | None = None
    budget: int | str | None = None
    drafter: str | None = Field(None, description="Null: all that are loaded.")


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Error
