"""Log-probabilities name each token by its own bytes, whatever kind of tokenizer wrote it."""

import json

import pytest
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from support.byte_tokenizer import byte_tokenizer
from support.chat_fixtures import TEMPLATE, chat_target
from support.folders import save_target
from support.server_fixtures import our_server
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mlx_dflash.server.token_texts import Offsets, TokenTexts

pytestmark = pytest.mark.process
WORDS = ["\u2581", "\u2581true", "true", "\u2581é", "\u2581\u2581x", "Ġ", "b", "a", "\u4e16"]


def sentencepiece_tokenizer():
    """A tokenizer with byte tokens at 3 to 258, then WORDS, then an added token; 0 to 2 are unk, bos and eos."""
    vocabulary = ["<unk>", "<bos>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocabulary)}, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<bos>", "<eos>", "<\u2581mark>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    return TokenizerWrapper(fast, SPMStreamingDetokenizer)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A server of a target with the SentencePiece tokenizer."""
    model, config = chat_target()
    config = {**config, "eos_token_id": 2}
    target = save_target(tmp_path_factory.mktemp("target"), model, config, sentencepiece_tokenizer())
    with our_server((target, "none")) as (client, _):
        yield client


def ids_of(*tokens):
    tokenizer = sentencepiece_tokenizer()
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def test_bytes_of_sentencepiece_tokens():
    texts, ids = TokenTexts(sentencepiece_tokenizer()), ids_of(*WORDS, "<0xE4>", "<0x0A>", "<\u2581mark>", "<eos>")
    found = [texts.bytes_of(id) for id in ids]
    expected = [" ", " true", "true", " é", "  x", "Ġ", "b", "a", "\u4e16", b"\xe4", "\n", "<\u2581mark>", None]
    assert found == [e.encode() if isinstance(e, str) else e for e in expected]
    assert texts.name(ids[9]) == "bytes:\\xe4" and texts.name(ids[-1]) == "<eos>"


def test_bytes_of_byte_level_tokens():
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.add_tokens(["<\u2581mark>", "Ġé"], special_tokens=True)
    texts = TokenTexts(tokenizer)
    assert b"".join(texts.bytes_of(id) for id in range(256)) == bytes(range(256))
    assert [texts.bytes_of(id) for id in (256, 257, 258, 259)] == [
        b"<bos>",
        None,
        "<\u2581mark>".encode(),
        "Ġé".encode(),
    ]


def test_likeliest_tokens_do_not_collide(client):
    mark, plain = ids_of("\u2581true", "true")
    letter, byte = ids_of("a", "<0x61>")
    part, other = ids_of("<0xE4>", "<0xE5>")
    bias = {str(id): 1000.0 for id in (mark, plain, letter, byte, part, other)}
    choice = client.completions.create(
        model="default_model", prompt="a", max_tokens=1, logit_bias=bias, logprobs=6
    ).choices[0]
    names = choice.logprobs.top_logprobs[0]
    assert len(names) == 6 and {" true", "true", "a", "bytes:\\xe4", "bytes:\\xe5"} < set(names), names
    assert {f"token_id:{letter}", f"token_id:{byte}"} & set(names)


def test_bytes_and_offsets_are_those_of_the_text(client):
    """The grammar makes the model say byte tokens and words."""
    text = "true \u4e16x é."
    lark = {"response_format": {"type": "lark", "lark": f"start: {json.dumps(text, ensure_ascii=False)}"}}
    for prompt, path in ("a", client.completions), (None, client.chat.completions):
        asked = {"prompt": prompt, "logprobs": 2} if prompt else {"messages": [{"role": "user", "content": "a"}]}
        more = {} if prompt else {"logprobs": True, "top_logprobs": 2}
        choice = path.create(model="default_model", max_tokens=60, **asked, **more, extra_body=lark).choices[0]
        content = choice.logprobs.content
        data = [bytes(t["bytes"] or []) if prompt else bytes(t.bytes or []) for t in content]
        said = choice.text if prompt else choice.message.content
        assert b"".join(data).decode().removeprefix(" ") == said == text and max(map(len, data)) < len(text.encode())
        if prompt:
            begins, before = [], b""
            for piece in data:
                begins.append(len(before.decode("utf-8", "ignore").removeprefix(" ")))
                before += piece
            assert choice.logprobs.text_offset == begins and len(set(begins)) < len(begins)


def test_offsets_count_the_characters_in_front():
    offsets = Offsets()
    pieces = [b"Paris", b".", b"\xe4", b"\xb8", b"\x96", None, b"\xff", b"x"]
    assert [offsets.add(piece) for piece in pieces] == [0, 5, 6, 6, 6, 7, 7, 8]


def test_the_first_token_loses_its_space_in_the_text(client):
    mark = ids_of("\u2581true")[0]
    choice = client.completions.create(
        model="default_model", prompt="a", max_tokens=3, logit_bias={str(mark): 1000.0}, logprobs=1
    ).choices[0]
    assert choice.text == "true true true" and choice.logprobs.tokens == [" true"] * 3
    assert choice.logprobs.text_offset == [0, 4, 9]
