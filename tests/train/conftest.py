"""A target with a chat template, shared by the tests of training."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import tiny

EOS = 5
CHAT = (
    "{% for m in messages %}<s> w7 {{ m['content'] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}w9 w10{% endif %}"
)


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    words = {"<s>": 1, "<e>": EOS, "<mask>": 46, "<unused>": 47} | {
        f"w{i}": i for i in range(tiny.VOCAB) if i not in (1, EOS, 46, 47)
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", bos_token="<s>")
    wrapped.chat_template = CHAT
    wrapped.save_pretrained(folder)
    model = tiny.model(num_hidden_layers=4, eos_token_id=EOS, initializer_range=0.15)
    model.save_pretrained(folder)
    return folder
