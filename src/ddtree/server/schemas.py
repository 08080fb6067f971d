"""Requests as clients write them: fields and types, refusals of what is not supported, and `SamplingParams`.

Unknown fields are ignored, unless they would change the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from ddtree.engine.detokenizer import bad_word_ids
from ddtree.sampling.noise import MAX_SEED
from ddtree.sampling.params import MAX_TOKEN, MODEL_FIELDS, SamplingParams
from ddtree.server.http import ApiError, invalid_value, unsupported

MAX_PROMPTS = 4096
MAX_LOGPROBS = 20
_MAX_CHARACTERS = 1024  # of a stop string or bad word
# Most entries of fields that cost time at every token.
_MAX_ENTRIES = {"stop": 64, "bad_words": 64, "stop_token_ids": 1024, "logit_bias": 4096}
_SAME_NAME = {
    *MODEL_FIELDS, "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "stop_token_ids", "stop",
    "ignore_eos", "skip_special_tokens",
}  # fmt: skip

T = TypeVar("T")
# Only the first complaint is reported: to list one for each of a million entries would block other answers for seconds.
Many = Annotated[list[T], Field(fail_fast=True)]
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]


def _no_logprobs(value: Any) -> Any:
    """Return None for false, which some clients send for no log-probabilities."""
    return None if value is False else value


# The number of tokens whose log-probabilities are reported.
TopTokens = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(_no_logprobs)]


# The most tokens of an answer. Clients of other servers send -1 for no limit of their own.
TokenLimit = Annotated[
    int | None,
    Field(ge=0, le=MAX_TOKEN),
    BeforeValidator(lambda value: None if value == -1 else value),
]


class StrictModel(BaseModel):
    """A request or a part of one. Strict: a string is no number and true is no 1. Null means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_whole(cls, value: Any) -> Any:
        """Return 6 for 6.0, also in a list: JSON has one kind of number, and a float field takes both."""
        if isinstance(value, list):
            return [cls._read_whole(item) if isinstance(item, float) else item for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value


class StreamOptions(StrictModel):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = Field(None, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk carries the usage so far.")


class GenerationFields(StrictModel):
    """The fields that chats and completions share."""

    model: str | None = Field(None, description="As in /v1/models; may be left out.")
    max_tokens: TokenLimit = Field(None, description="Most tokens of each answer; -1: not given.")
    max_completion_tokens: TokenLimit = Field(None, description="Newer name of max_tokens.")
    temperature: float | None = Field(None, description="0 always takes the likeliest token; up to 100.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: all.")
    min_p: float | None = None
    n: int | None = Field(None, description="Answers; each has a seed of its own.")
    seed: int | None = Field(None, description="-1: a fresh one.")
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id to -100..100.")
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

    @field_validator(*_MAX_ENTRIES, mode="before")
    @classmethod
    def _check_size(cls, value: Any, info: ValidationInfo) -> Any:
        entries = value if isinstance(value, list | dict) else [value]
        most = _MAX_ENTRIES[str(info.field_name)]
        if len(entries) > most:
            raise ValueError(f"has {len(entries)} entries: at most {most}")
        longest = max((len(entry) for entry in entries if isinstance(entry, str)), default=0)
        if longest > _MAX_CHARACTERS:
            raise ValueError(f"holds {longest} characters in one string: at most {_MAX_CHARACTERS}")
        return value

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens of an answer, by either name; None where the request does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ContentPart(StrictModel):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(StrictModel):
    """A message of a chat."""

    role: str
    content: str | Many[ContentPart] | None = None


class TemplateFields(StrictModel):
    """Variables of the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(GenerationFields, TemplateFields):
    """The body of `/v1/chat/completions`."""

    messages: Many[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: TopTokens = None
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`."""

    prompt: str | Many[int] | Prompts[str] | Prompts[Many[int]]
    echo: bool | None = None
    logprobs: TopTokens = None


class TokenizeRequest(TemplateFields):
    """The body of `/tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    add_special_tokens: bool | None = None
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
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values of any field that ask for nothing."""
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


def refuse_unsupported(request: GenerationFields) -> None:
    """Raise ApiError for the first field that is not supported."""
    sent = request.model_extra or {}
    chat = isinstance(request, ChatRequest)
    if sent.get("tools") not in EMPTY and sent.get("tool_choice") != "none":
        raise unsupported("tools", _TOOLS)
    if not chat and sent.get("best_of") not in (None, request.n or 1):
        raise unsupported("best_of", "it must equal n, as no answers are made and thrown away")
    refusals = _UNSUPPORTED | (_UNSUPPORTED_IN_CHATS if chat else _UNSUPPORTED_IN_COMPLETIONS)
    for name, (reason, harmless) in refusals.items():
        value = sent.get(name)
        # 1 == True in Python, but not in JSON.
        same = any(type(value) is type(one) and value == one for one in harmless)
        if not same and value not in EMPTY:
            raise unsupported(name, reason)


def sampling_params(
    request: GenerationFields, defaults: dict[str, Any], tokenizer: Any, max_tokens: int
) -> SamplingParams:
    """Return how to sample the first of a request's answers.

    Args:
        request: absent and null fields take `defaults`, then those of `SamplingParams`.
        defaults: see `read_generation_config`.
        tokenizer: encodes `bad_words`; may be None.
        max_tokens: used where neither the request nor `defaults` has any, as 512.

    Raises:
        ConfigError: a value is out of range; the message names the field.
        ApiError: no token is asked for, or a field needs a tokenizer that the model lacks.
    """
    logprobs, echo = requested_logprobs(request), getattr(request, "echo", None)
    asked = request.token_limit
    # With an echo, the prompt alone may be wanted; one token is made all the same.
    if asked == 0 and not echo:
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise invalid_value(name, f"{name} must be at least 1, not 0")
    for name in ("bad_words", "stop"):
        if tokenizer is None and getattr(request, name):
            raise ApiError(400, f"{name} needs a tokenizer, which this model lacks", param=name)
    fields = defaults | request.model_dump(include=_SAME_NAME, exclude_none=True)
    if request.include_stop_str_in_output is not None:
        fields["include_stop"] = request.include_stop_str_in_output
    if request.bad_words:
        fields["bad_words"] = (*fields.get("bad_words", ()), *bad_word_ids(tokenizer, request.bad_words))
    if request.seed not in (None, -1):
        # Clients send any 64-bit number.
        fields["seed"] = request.seed % MAX_SEED
    fields["max_tokens"] = fields.get("max_tokens", max_tokens) if asked is None else max(1, asked)
    return SamplingParams(logprobs=logprobs, prompt_logprobs=logprobs if echo else None, **fields)


def seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Return parameters for n answers to one prompt: the first has the given seed, the others those after it."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=(params.seed + i) % MAX_SEED) for i in range(n)]


def requested_logprobs(request: GenerationFields) -> int | None:
    """Return the number of likely tokens to report for each token; None for no log-probabilities.

    Raises:
        ApiError: a chat gives a number without `logprobs`.
    """
    if not isinstance(request, ChatRequest):
        count: int | None = getattr(request, "logprobs", None)
        return count
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true")
    return (request.top_logprobs or 0) if request.logprobs else None
