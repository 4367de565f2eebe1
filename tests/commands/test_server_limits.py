"""What the server lets a request ask for is what its target and its draft can do."""

import socket

import openai
import pytest
from support.byte_tokenizer import byte_tokenizer
from support.chat_fixtures import EOS_ID, SIZES, TEMPLATE, save_pair
from support.folders import save_target
from support.server_fixtures import our_server
from support.targets import build_target, target_config

from mlx_dflash.server.__main__ import make_parser, make_server

pytestmark = pytest.mark.process


def ask(client, text="hi", **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="default_model", messages=messages, max_tokens=12, extra_body=options)


def test_a_draft_that_samples_from_the_anchor_may_draft_a_whole_block(tmp_path):
    dflash = {"mask_token_id": SIZES["vocab_size"] - 1, "sample_from_anchor": True, "block_size": 6}
    with our_server(save_pair(tmp_path, dflash=dflash)) as (client, _):
        answers = {num: ask(client, num_draft_tokens=num) for num in (0, 5, 6)}
        assert len({answer.choices[0].message.content for answer in answers.values()}) == 1
        details = {num: answer.usage.completion_tokens_details for num, answer in answers.items()}
        drafted = {num: d.accepted_prediction_tokens + d.rejected_prediction_tokens for num, d in details.items()}
        assert 0 == drafted[0] < drafted[5] < drafted[6], drafted
        with pytest.raises(openai.BadRequestError, match="num_draft_tokens must be at most 6, got 7"):
            ask(client, num_draft_tokens=7)


def test_the_context_of_a_model_with_a_nested_config_is_a_limit(tmp_path):
    sizes = {**SIZES, "max_position_embeddings": 64}
    config = target_config("qwen3_5", eos_token_id=EOS_ID, **sizes)
    target = save_target(tmp_path, build_target(config), config, byte_tokenizer(chat_template=TEMPLATE))
    with our_server((target, "none")) as (client, _):
        prompt_tokens = ask(client).usage.prompt_tokens
        longest = ask(client, "x" * (65 - prompt_tokens), logit_bias={str(EOS_ID): -100})
        assert (longest.usage.prompt_tokens, longest.usage.completion_tokens) == (63, 1)
        with pytest.raises(openai.BadRequestError, match="the prompt has 100 tokens; the model's context has 64"):
            ask(client, "x" * (102 - prompt_tokens))


def test_a_missing_model_is_not_taken_for_a_port_in_use(pair, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = make_parser().parse_args(["--model", str(pair[0]), "--draft-model", "none", "--port", str(port)])
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}"):
            make_server(flags)
    (tmp_path / "config.json").mkdir()
    flags = make_parser().parse_args(["--model", str(tmp_path), "--draft-model", "none", "--port", "0"])
    with pytest.raises((OSError, ValueError)) as caught:
        make_server(flags)
    assert "listen" not in str(caught.value)
