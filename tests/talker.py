"""A tiny chat model: a byte-level tokenizer with a template, and a random model with its vocabulary."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tiny

BOS, EOS, USER, BOT = 256, 257, 258, 259
VOCAB = 260
SPECIAL = ("<s>", "</s>", "<user>", "<bot>")
TEMPLATE = (
    "<s>{% if loud is defined and loud %}!{% endif %}"
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user, assistant') }}{% endif %}"
    "{{ '<bot>' if m['role'] == 'assistant' else '<user>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token a byte, <s> put before raw text, and four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=built,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<s>",
        extra_special_tokens=["<user>", "<bot>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def model(seed: int = 0, **changes: Any) -> Any:
    """A random Llama with the tokenizer's vocabulary, which ends a text now and then."""
    settings = {"vocab_size": VOCAB, "bos_token_id": BOS, "pad_token_id": BOS, "eos_token_id": EOS}
    return tiny.model("llama", seed, **{**settings, **changes})


def save(folder: Path, **changes: Any) -> Path:
    """A checkpoint folder with both."""
    model(**changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
