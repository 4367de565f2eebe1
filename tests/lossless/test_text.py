"""Text: prompts are encoded as mlx-lm encodes them, pieces add up to the decoded ids, stop strings end it anywhere."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from support.byte_tokenizer import BOS_CHAT_TEMPLATE, BOS_ID, BYTE_VOCAB_SIZE, CHAT_TEMPLATE, EOS_ID, byte_tokenizer
from support.drafts import draft_config
from support.runs import forced_drafter, make_draft
from support.targets import tiny_target

import mlx_dflash
from mlx_dflash.text import encode

TEXT = "a é 漢😀 b e\u0301"
PROMPT = list(b"say: ")


@pytest.fixture(scope="module")
def pair():
    model = tiny_target(vocab_size=BYTE_VOCAB_SIZE, num_hidden_layers=2)
    draft = make_draft(draft_config(dict(target_layer_ids=[0, 1]), vocab_size=BYTE_VOCAB_SIZE, num_target_layers=2))
    return model, draft


class Reciting:
    """A processor that makes the target say the given bytes, then EOS."""

    def __init__(self, said, prompt=PROMPT):
        self.said, self.start = [*said, EOS_ID], len(prompt)

    def __call__(self, tokens, logits):
        at = min(tokens.size - self.start, len(self.said) - 1)
        return logits.at[:, self.said[at]].add(1e4)


def recite(pair, said, monkeypatch, block_size=6, draft=True, tokenizer=None, accepts=(5, 2, 0, 3), **options):
    """All responses of a run whose text is `said`."""
    model, draft_model = pair
    said = list(said)
    if draft:
        monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, [*said, EOS_ID], list(accepts)))
        options |= dict(draft_model=draft_model, block_size=block_size)
    tokenizer = tokenizer or byte_tokenizer()
    return list(
        mlx_dflash.stream_generate(
            model, tokenizer, PROMPT, logits_processors=[Reciting(said)], **{"max_tokens": 60, **options}
        )
    )


@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_the_pieces_add_up_to_the_decoded_text(pair, block_size, monkeypatch):
    responses = recite(pair, TEXT.encode(), monkeypatch, block_size)
    pieces = [r.text for r in responses]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert [r.text for r in recite(pair, TEXT.encode(), monkeypatch, draft=False)] == pieces
    assert responses[-1].finish_reason == "stop" and responses[-1].token == EOS_ID


def test_a_cut_inside_a_character_shows_one_replacement_character_at_the_end(pair, monkeypatch):
    said = TEXT.encode()
    cut = TEXT.encode().index("😀".encode()) + 2
    pieces = [r.text for r in recite(pair, said, monkeypatch, max_tokens=cut)]
    assert "".join(pieces) == "a é 漢\ufffd"
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_invalid_bytes_are_text_too(pair, monkeypatch):
    ours = [r.text for r in recite(pair, b"a\xff b\x80", monkeypatch)]
    assert ours == [r.text for r in recite(pair, b"a\xff b\x80", monkeypatch, draft=False)]


def test_a_second_run_with_the_same_tokenizer_starts_clean(pair, monkeypatch):
    tokenizer = byte_tokenizer()
    recite(pair, TEXT.encode(), monkeypatch, tokenizer=tokenizer, max_tokens=3)
    assert "".join(r.text for r in recite(pair, b"xyz", monkeypatch, tokenizer=tokenizer)) == "xyz"


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("accepts", [(5,), (0,), (2, 4)], ids=str)
def test_a_stop_string_ends_the_text_wherever_blocks_end(pair, at, accepts, monkeypatch):
    said = b"abcdefgh"[:at] + b"STOP" + b"more text"
    responses = recite(pair, said, monkeypatch, accepts=accepts, stop_strings=["STOP"])
    assert "".join(r.text for r in responses) == "abcdefgh"[:at]
    assert responses[-1].finish_reason == "stop"
    assert [r.token for r in responses] == list(said[: at + 4])
    assert all(r.finish_reason is None for r in responses[:-1])


@pytest.mark.parametrize(
    "said, stops, text, reason",
    [
        ("abcSTOX STOP", "STOP", "abcSTOX ", "stop"),  # a beginning that is none is given back
        ("abcSTO", "STOP", "abcSTO", "stop"),  # EOS comes before the stop string is whole
        ("aab", "ab", "a", "stop"),
        ("xaaab", ["aab"], "xa", "stop"),
        ("one two", ["two", "ne"], "o", "stop"),  # the first in the text, not in the list
        ("ab", "b", "a", "stop"),
        (" abc", " ab", "", "stop"),  # the detokenizer drops the space that the text begins with
        (" abc", [" a", "abc"], "", "stop"),
        (" abc", "b", "a", "stop"),
        (" abX", " abc", "abX", "stop"),
        ("漢😀", "😀", "漢", "stop"),
        ("漢😀", [], "漢😀", "stop"),
        ("abcdef", "xyz", "abcd", "length"),
        ("abcdef", "de", "abcd", "length"),  # the cap comes first: what was held back is text
        ("abcdef", "cd", "ab", "stop"),  # both at the same token: the string was there
    ],
)
@pytest.mark.parametrize("draft", [True, False], ids=["draft", "plain"])
def test_stop_strings(pair, said, stops, text, reason, draft, monkeypatch):
    options = dict(max_tokens=4) if said == "abcdef" else {}
    responses = recite(pair, said.encode(), monkeypatch, draft=draft, stop_strings=stops, **options)
    assert "".join(r.text for r in responses) == text
    assert responses[-1].finish_reason == reason
    assert len(responses) <= 4 or not options


def test_a_stop_string_leaves_the_caches_at_the_yielded_tokens(pair, monkeypatch):
    cache = mlx_dflash.make_prompt_cache(*pair)
    responses = recite(pair, b"abSTOPmore", monkeypatch, stop_strings="STOP", prompt_cache=cache)
    assert len(responses) == 6
    assert {c.offset for c in cache} == {len(PROMPT) + 6}


def test_generate_returns_the_whole_text(pair, monkeypatch):
    model, draft = pair
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, [*TEXT.encode(), EOS_ID], [3]))
    text = mlx_dflash.generate(
        model, byte_tokenizer(), PROMPT, draft_model=draft, max_tokens=60, logits_processors=[Reciting(TEXT.encode())]
    )
    assert text == TEXT


@pytest.mark.parametrize(
    "options, prompt, ids",
    [
        (dict(bos_in_prompt=True), "hi", [BOS_ID, 104, 105]),
        (dict(bos_in_prompt=True), "<bos>hi", [BOS_ID, 104, 105]),
        (dict(bos=True), "hi", [104, 105]),
        (dict(), "hi", [104, 105]),
        (dict(bos_in_prompt=True), [104, 105], [104, 105]),
        (dict(bos_in_prompt=True), [BOS_ID, BOS_ID, 104], [BOS_ID, BOS_ID, 104]),
    ],
)
def test_prompts_are_encoded_as_mlx_lm_does(pair, options, prompt, ids, monkeypatch):
    tokenizer, seen = byte_tokenizer(**options), []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    assert encode(tokenizer, prompt).tolist() == ids
    list(mlx_lm.stream_generate(pair[0], tokenizer, prompt, max_tokens=1, logits_processors=[spy]))
    assert seen[0] == ids, "mlx-lm reads this prompt otherwise"
    list(
        mlx_dflash.stream_generate(
            pair[0], tokenizer, prompt, max_tokens=1, draft_model=pair[1], logits_processors=[spy]
        )
    )
    assert seen[-1] == ids


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, BOS_CHAT_TEMPLATE])
def test_a_template_gives_one_bos_with_and_without_the_draft(pair, template):
    tokenizer = byte_tokenizer(bos_in_prompt=True, chat_template=template)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert encode(tokenizer, text).tolist().count(BOS_ID) == 1
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert encode(tokenizer, ids).tolist() == list(ids)


@pytest.mark.parametrize("eos", [97, 98])
def test_every_eos_id_ends_the_text(pair, eos, monkeypatch):
    tokenizer = TokenizerWrapper(byte_tokenizer()._tokenizer, BPEStreamingDetokenizer, eos_token_ids=[97, 98, EOS_ID])
    responses = recite(pair, [120, 121, eos, 122], monkeypatch, tokenizer=tokenizer)
    assert [r.token for r in responses] == [120, 121, eos]
    assert "".join(r.text for r in responses) == "xy"


def test_an_eos_that_is_added_later_counts(pair, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.add_eos_token("z")
    assert [r.token for r in recite(pair, b"xyzw", monkeypatch, tokenizer=tokenizer)] == list(b"xyz")


def test_an_unwrapped_tokenizer_is_taken_too(pair):
    responses = [
        list(module.stream_generate(pair[0], byte_tokenizer()._tokenizer, PROMPT, max_tokens=5, **more))
        for module, more in ((mlx_lm, {}), (mlx_dflash, dict(draft_model=pair[1])))
    ]
    assert [[r.token for r in rs] for rs in responses[:1]] == [[r.token for r in rs] for rs in responses[1:]]
    assert [[r.text for r in rs] for rs in responses[:1]] == [[r.text for r in rs] for rs in responses[1:]]


def test_responses_count_and_time_as_mlx_lms_do(pair, monkeypatch):
    responses = recite(pair, b"hello there", monkeypatch)
    assert [r.generation_tokens for r in responses] == list(range(1, 13))
    assert {r.prompt_tokens for r in responses} == {len(PROMPT)}
    assert all(r.prompt_tps > 0 and r.generation_tps > 0 and r.peak_memory > 0 for r in responses)
    assert all(r.logprobs.shape == (BYTE_VOCAB_SIZE,) for r in responses)
    assert isinstance(responses[0], mlx_lm.generate.__globals__["GenerationResponse"])


def test_unknown_keywords_are_a_type_error(pair):
    with pytest.raises(TypeError, match="unexpected keyword arguments: temperature"):
        mlx_dflash.stream_generate(*pair[:1], byte_tokenizer(), PROMPT, draft_model=pair[1], temperature=0.7)


def test_an_mlx_lm_model_is_no_draft(pair):
    with pytest.raises(TypeError, match="DFlash draft from load_draft, got Model"):
        mlx_dflash.stream_generate(pair[0], byte_tokenizer(), PROMPT, draft_model=pair[0])


def test_without_a_draft_it_is_mlx_lms_own_path(pair):
    options = dict(max_tokens=7, max_kv_size=8)
    ours = list(mlx_dflash.stream_generate(pair[0], byte_tokenizer(), PROMPT, **options))
    plain = list(mlx_lm.stream_generate(pair[0], byte_tokenizer(), PROMPT, **options))
    assert [(r.token, r.text, r.finish_reason) for r in ours] == [(r.token, r.text, r.finish_reason) for r in plain]
    assert mx.array_equal(ours[-1].logprobs, plain[-1].logprobs)
