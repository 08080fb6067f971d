"""Prompts become token ids: text, messages, ids; and each bad one is named."""

import pytest

import talker
from ddtree import prompts
from ddtree.errors import ConfigError, PromptError

MESSAGES = [{"role": "user", "content": "hi"}]


def encode(prompt, **options):
    return prompts.encode(talker.tokenizer(), prompt, **options)


def test_text_gets_the_tokenizers_own_special_tokens():
    assert encode("ab") == [talker.BOS, *talker.tokenizer().encode("ab", add_special_tokens=False)]


def test_text_that_begins_with_the_first_token_gets_no_second_one():
    assert encode("<s>ab") == encode("ab")


def test_a_template_writes_its_own_special_tokens_and_no_others_are_added():
    ids = encode(MESSAGES)
    assert ids.count(talker.BOS) == 1
    assert ids[:2] == [talker.BOS, talker.USER] and ids[-1] == talker.BOT


def test_text_as_chat_is_one_user_message():
    assert encode("hi", chat=True) == encode(MESSAGES)


def test_template_arguments_are_passed_on():
    loud = encode(MESSAGES, template_kwargs={"loud": True})
    assert talker.tokenizer().decode(loud) == "<s>!<user>hi<bot>"
    assert encode(MESSAGES, template_kwargs={"add_generation_prompt": False}) == encode(MESSAGES)[:-1]


def test_token_ids_are_taken_as_they_are():
    assert prompts.encode(None, [5, 6, 7]) == [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "batch"),
    [
        ("text", False),
        ([1, 2], False),
        (MESSAGES, False),
        ([], False),
        (["a", "b"], True),
        ([[1], [2]], True),
        ([MESSAGES], True),
    ],
)
def test_a_list_is_a_batch_unless_it_is_ids_or_messages(prompt, batch):
    assert prompts.is_batch(prompt) is batch


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, "a"], "token ids only, or messages only"),
        ([True], "token ids only, or messages only"),
        (7, "a prompt is text, token ids or messages, not int"),
        ([{"content": "hi"}], "lacks a part"),
        ([{"role": "user"}], "lacks a part"),
        (
            [{"role": "judge", "content": "hi"}],
            "the chat template refuses .* roles are system, user, assistant",
        ),
    ],
)
def test_a_bad_prompt_is_named(prompt, message):
    with pytest.raises(PromptError, match=message):
        encode(prompt)


def test_messages_without_a_template_and_text_without_a_tokenizer_are_refused():
    with pytest.raises(PromptError, match="no chat template: give the prompt as text"):
        prompts.encode(talker.tokenizer(template=None), MESSAGES)
    with pytest.raises(PromptError, match="no tokenizer: give token ids"):
        prompts.encode(None, "hi")


@pytest.mark.parametrize(
    "prompt",
    [
        "ab\ud800c",
        [{"role": "user", "content": "ab\udfff"}],
        [{"role": "user", "content": [{"type": "text", "text": "ab\ud800"}]}],
    ],
    ids=["text", "message", "part"],
)
def test_half_a_character_is_named(prompt):
    with pytest.raises(PromptError, match=r"the text holds half a character \(U\+D[8F][0F][0F] at 2\)"):
        encode(prompt)


def test_whole_characters_beyond_the_first_plane_are_taken():
    assert talker.tokenizer().decode(encode("🐎")) == "<s>🐎"


@pytest.mark.parametrize("prompt", ["hi", MESSAGES])
def test_template_arguments_that_are_no_mapping_are_named(prompt):
    with pytest.raises(ConfigError, match="chat_template_kwargs must map names to values, not 5"):
        encode(prompt, template_kwargs=5)
