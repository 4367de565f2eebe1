"""Messages become prompts, and numbers become samplers, in one way for all commands."""

import mlx.core as mx
import pytest
from support.byte_tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, byte_tokenizer

from mlx_dflash.commands.sampling import sampler
from mlx_dflash.commands.templates import encode_messages, render

QUESTION = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]


def test_a_conversation_ends_where_the_answer_begins():
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    assert render(tokenizer, QUESTION) == "system: be\nuser: hi\nassistant: "
    assert encode_messages(tokenizer, QUESTION) == tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)


def test_an_answer_that_has_begun_is_continued():
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    begun = [*QUESTION, {"role": "assistant", "content": "So"}]
    assert render(tokenizer, begun) == "system: be\nuser: hi\nassistant: So"


def test_options_reach_the_template():
    tokenizer = byte_tokenizer(chat_template="{{ style }}{{ messages[0]['content'] }}")
    assert render(tokenizer, QUESTION, style="short: ") == "short: be"


def test_without_a_template_the_contents_are_the_prompt_and_the_tokenizer_adds_its_special_tokens():
    bare = byte_tokenizer(bos_in_prompt=True)
    assert render(bare, QUESTION) == "be\n\nhi"
    assert encode_messages(bare, QUESTION) == [BOS_ID, *b"be\n\nhi"]
    templated = byte_tokenizer(bos_in_prompt=True, chat_template=CHAT_TEMPLATE)
    assert encode_messages(templated, QUESTION) == [*b"system: be\nuser: hi\nassistant: "]


def test_xtc_never_removes_the_end_of_a_line_or_of_the_text():
    tokenizer = byte_tokenizer()
    newline, likely, unlikely = tokenizer.encode("\n")[-1], 65, 66
    probabilities = {newline: 0.4, EOS_ID: 0.3, likely: 0.2, unlikely: 0.1}
    logprobs = mx.log(mx.array([[probabilities.get(i, 0.0) for i in range(258)]]))
    xtc = sampler(tokenizer, temp=1.0, xtc_probability=1.0, xtc_threshold=0.05)
    mx.random.seed(0)
    assert {xtc(logprobs).item() for _ in range(200)} == {newline, EOS_ID, unlikely}


def test_a_number_that_no_sampler_has_is_refused():
    with pytest.raises(TypeError, match="got temperature"):
        sampler(byte_tokenizer(), temperature=1.0)


def test_a_template_that_fails_is_named_in_one_line():
    tokenizer = byte_tokenizer(chat_template="{{ raise_exception('roles\n must alternate') }}")
    with pytest.raises(ValueError, match="chat template of this tokenizer cannot render .* roles must alternate"):
        render(tokenizer, QUESTION)
