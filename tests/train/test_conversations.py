"""Templates and given user turns."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from ddtree.errors import ConfigError
from ddtree.train.conversations import ChatTemplate, encode_user_messages, read_user_messages


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {"<s>": 0, "<e>": 1, "w9": 2, "w7": 3} | {f"t{i}": 4 + i for i in range(20)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    inner.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>", bos_token="<s>")
    wrapped.chat_template = "{% for m in messages %}<s> w7 {{ m['content'] }} <e> {% endfor %}w9"
    return wrapped


def test_a_template_is_cut_around_the_users_text(tokenizer):
    assert ChatTemplate.of(tokenizer) == ChatTemplate(prefix=[0, 3], middle=[1, 2])


def test_a_tokenizer_without_chat_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate.of(object())


def test_messages_become_tokens_once_each(tokenizer):
    turns, left_out = encode_user_messages(
        tokenizer, ChatTemplate.of(tokenizer), ["t1 t2", "t3", "t1 t2", "t1 t2 t3 t4"], 3
    )
    assert turns == [[5, 6], [7]]
    assert left_out == {"duplicate turn": 1, "turn too long": 1}


def test_messages_that_merge_with_the_template_are_left_out(tokenizer):
    turns, left_out = encode_user_messages(tokenizer, ChatTemplate([0, 3], [1, 9]), ["t1"], 3)
    assert turns == []
    assert left_out == {"turn merges with the template": 1}


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_line_ends_of_unicode_inside_a_turn_do_not_end_its_line(tmp_path, end):
    path = tmp_path / "turns.jsonl"
    path.write_text(f'{{"prompt": "a{end}b"}}\r\n{{"prompt": "c"}}\n', encoding="utf-8-sig", newline="")
    assert read_user_messages(path) == [f"a{end}b", "c"]


def test_half_a_character_in_a_message_names_file_and_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b\\ud800"}\n')
    with pytest.raises(
        ConfigError, match=r"prompts\.jsonl, line 2: the text holds half a character .U.D800 at 1"
    ):
        read_user_messages(path)


def test_lines_of_every_kind_give_their_first_user_turn(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"turns": ["a", "b"]}\n\n{"prompt": "c"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]}\n'
    )
    assert read_user_messages(path) == ["a", "c", "d"]


@pytest.mark.parametrize(
    "line", ["[1]", '{"turns": []}', '{"prompt": ""}', '{"messages": [{"role": "system"}]}', '{"turns": [3]}']
)
def test_a_line_without_a_user_turn_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "c"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 2 has no user turn"):
        read_user_messages(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "line 1 is not JSON"), ("\n", "holds no prompt"), (None, "cannot be read")],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_user_messages(path)
