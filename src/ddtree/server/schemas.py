"""Requests as clients write them: fields and types, refusals of what is not supported, and `SamplingParams`.

Unknown fields are ignored, unless they would change the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ddtree.engine.detokenizer import bad_word_ids
from ddtree.sampling.noise import MAX_SEED
from ddtree.sampling.params import MAX_TOKEN, SamplingParams
from ddtree.server.http import ApiError, invalid_value

MAX_BIASES = 4096
MAX_PROMPTS = 4096
MAX_LOGPROBS = 20
_MAX_CHARACTERS = 1024  # of a stop string or bad word
# Most entries of fields that cost time at every token.
_MAX_ENTRIES = {"stop": 64, "bad_words": 64, "stop_token_ids": 1024}
_FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAME_NAME = (
    *_FROM_MODEL, "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "stop_token_ids", "stop",
    "ignore_eos", "skip_special_tokens",
)  # fmt: skip

T = TypeVar("T")
# Only the first complaint is reported: to list one for each of a million entries would block other answers for seconds.
Many = Annotated[list[T], Field(fail_fast=True)]
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries: at most {MAX_BIASES}")
    return value


class StrictModel(BaseModel):
    """A request or a part of one. Strict: a string is no number and true is no 1. Null means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(StrictModel):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = Field(None, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk carries the usage so far.")


class GenerationFields(StrictModel):
    """The fields that chats and completions share."""

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
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_size)] = Field(
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
        None, description="Report how each token was made, and the figures of each answer."
    )
    ddtree_timings: bool | None = Field(None, description="Report the figures of each answer.")


class ContentPart(StrictModel):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(StrictModel):
    """A message of a chat."""

    role: str
    content: str | Many[ContentPart] | None = None


class ChatRequest(GenerationFields):
    """The body of `/v1/chat/completions`."""

    messages: Many[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`."""

    prompt: str | Many[int] | Prompts[str] | Prompts[Many[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeRequest(StrictModel):
    """The body of `/tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Many[int]


class DraftingRequest(StrictModel):
    """The body of `/api/drafting`. Fields that are left out stay as they are."""

    method: str | None = None
    depth: int | None = None
    budget: int | str | None = None
    drafter: str | None = Field(None, description="Null: all that are loaded.")


class Error(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not 200."""

    error: Error


# Fields that clients send and this server does not support: the reason, and the values besides the empty ones that ask
# for nothing.
_Refusals = dict[str, tuple[str, tuple[Any, ...]]]
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_TOOLS = "tool calls are not supported: leave it out, or send tool_choice none"
_GRAMMAR = "answers cannot be held to a grammar"
_SAMPLER = "there is no such way to sample: temperature, top_p, top_k and min_p are there"
_IDS = "use ddtree_details for token ids"
_GRAMMARS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema",
    "regex", "ebnf",
)  # fmt: skip
_UNSUPPORTED: _Refusals = {
    "functions": (_TOOLS, ()),
    "function_call": (_TOOLS, ("none", "auto")),
    "tool_choice": (_TOOLS, ("none", "auto")),
    "response_format": (_GRAMMAR, ({"type": "text"},)),
    **dict.fromkeys(_GRAMMARS, (_GRAMMAR, ())),
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
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), (_SAMPLER, (0, 0.0))),
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
_UNSUPPORTED_IN_CHATS: _Refusals = {
    "add_special_tokens": ("the chat template writes them", (False,)),
    "echo": ("only completions echo their prompt", (False,)),
    "best_of": ("only completions have it", (1,)),
}
_UNSUPPORTED_IN_COMPLETIONS: _Refusals = {
    "add_special_tokens": ("send token ids as prompt", (True,)),
    "suffix": ("text cannot be filled in before a suffix", ()),
}
_TEMPLATE_ARGUMENTS = frozenset({
    "chat_template", "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "conversation", "messages", "return_assistant_tokens_mask", "tools", "documents", "self",
})  # fmt: skip


def refuse_unsupported(request: GenerationFields) -> None:
    """Raise ApiError for the first field that is not supported."""
    sent = request.model_extra or {}
    chat = isinstance(request, ChatRequest)
    if sent.get("tools") not in _EMPTY and sent.get("tool_choice") != "none":
        raise _unsupported("tools", _TOOLS)
    if not chat and sent.get("best_of") not in (None, request.n or 1):
        raise _unsupported("best_of", "it must equal n, as no answers are made and thrown away")
    refusals = _UNSUPPORTED | (_UNSUPPORTED_IN_CHATS if chat else _UNSUPPORTED_IN_COMPLETIONS)
    for name, (reason, harmless) in refusals.items():
        value = sent.get(name)
        # 1 == True in Python, but not in JSON.
        same = any(type(value) is type(one) and value == one for one in harmless)
        if not same and value not in _EMPTY:
            raise _unsupported(name, reason)


def refuse_template_arguments(names: Iterable[str]) -> None:
    """Raise ApiError for template variables that are arguments of the tokenizer and not of the template."""
    for name in names:
        if name in _TEMPLATE_ARGUMENTS:
            message = f"chat_template_kwargs: {name} is not for clients to set"
            raise ApiError(400, message, param="chat_template_kwargs", code="unsupported_parameter")


def refuse_unless_text(message: ChatMessage, place: str) -> None:
    """Raise ApiError for a message that holds something besides text.

    Args:
        message: of a chat.
        place: names the message in errors, as "messages[0]".
    """
    sent = message.model_extra or {}
    for name in ("tool_calls", "function_call", "audio"):
        if sent.get(name) not in _EMPTY:
            kind = "audio is" if name == "audio" else "tool calls are"
            raise _unsupported(f"{place}.{name}", f"{kind} not supported")
    for i, part in enumerate(message.content if isinstance(message.content, list) else []):
        if part.type != "text":
            reason = f"{part.type!r} is not supported: parts are text"
            raise _unsupported(f"{place}.content[{i}].type", reason)


def _unsupported(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")


def sampling_defaults(model: Any) -> dict[str, Any]:
    """Return the sampling fields that a transformers model's generation_config.json sets."""
    config = getattr(model, "generation_config", None)
    given = config.to_diff_dict() if config is not None else {}
    return {name: given[name] for name in _FROM_MODEL if given.get(name) is not None}


def sampling_params(
    request: GenerationFields, defaults: dict[str, Any], tokenizer: Any, max_tokens: int
) -> SamplingParams:
    """Return how to sample the first of a request's answers.

    Args:
        request: absent and null fields take `defaults`, then those of `SamplingParams`.
        defaults: see `sampling_defaults`.
        tokenizer: encodes `bad_words`; may be None.
        max_tokens: used where the request has none, as 512.

    Raises:
        ConfigError: a value is out of range; the message names the field.
        ApiError: a list, a string or a number is too large, or needs a tokenizer that the model lacks.
    """
    logprobs, echo = requested_logprobs(request), getattr(request, "echo", None)
    # With an echo, the prompt alone may be wanted; one token is made all the same.
    asked = requested_tokens(request, least=0 if echo else 1)
    fields = dict(defaults)
    for name, most in _MAX_ENTRIES.items():
        value = getattr(request, name)
        entries = value if isinstance(value, list) else [value]
        if len(entries) > most:
            raise invalid_value(name, f"{name} has {len(entries)} entries: at most {most}")
        longest = max((len(entry) for entry in entries if isinstance(entry, str)), default=0)
        if longest > _MAX_CHARACTERS:
            message = f"{name} holds {longest} characters in one string: at most {_MAX_CHARACTERS}"
            raise invalid_value(name, message)
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.include_stop_str_in_output is not None:
        fields["include_stop"] = request.include_stop_str_in_output
    if request.bad_words:
        if tokenizer is None:
            raise ApiError(400, "bad_words needs a tokenizer, which this model lacks", param="bad_words")
        fields["bad_words"] = bad_word_ids(tokenizer, request.bad_words)
    if request.stop and tokenizer is None:
        message = "stop needs a tokenizer, which this model lacks: use stop_token_ids"
        raise ApiError(400, message, param="stop")
    if request.seed is not None:
        # Clients send any 64-bit number.
        fields["seed"] = request.seed % MAX_SEED
    return SamplingParams(
        max_tokens=max_tokens if asked is None else max(1, asked),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        **fields,
    )


def requested_tokens(request: GenerationFields, least: int = 1) -> int | None:
    """Return the token limit that a request gives, by either name; None without one. Raises ApiError below `least`."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(request, name)
    if asked is not None and not least <= asked <= MAX_TOKEN:
        raise invalid_value(name, f"{name} must be from {least} to {MAX_TOKEN}, not {asked}")
    return asked


def requested_logprobs(request: GenerationFields) -> int | None:
    """Return the number of likely tokens to report for each token; None for no log-probabilities.

    Raises:
        ApiError: the number is outside 0 to 20, or a chat gives one without `logprobs`.
    """
    if isinstance(request, ChatRequest):
        name, count = "top_logprobs", request.top_logprobs
        if count is not None and not request.logprobs:
            raise invalid_value(name, "top_logprobs needs logprobs: true")
        count = (count or 0) if request.logprobs else None
    else:
        name, count = "logprobs", getattr(request, "logprobs", None)
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise invalid_value(name, f"{name} must be from 0 to {MAX_LOGPROBS}, not {count}")
    return count
