"""A client that leaves while its prompt is read frees its turn after a step, and what was read is kept."""

import http.client
import json
import time

import pytest
from support.byte_tokenizer import byte_tokenizer
from support.chat_fixtures import EOS_ID, TEMPLATE, chat_draft, chat_target, save_pair
from support.folders import save_target
from support.server_fixtures import our_server, wait_until

from mlx_dflash.pace import ReadingPace
from mlx_dflash.server.errors import ClientGone
from mlx_dflash.server.requests import read_request
from mlx_dflash.server.worker import Job

pytestmark = pytest.mark.process
TEXT = "a long prompt, " * 40
BODY = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "logit_bias": {str(EOS_ID): -100}}


def save(folder, family, has_draft):
    if family == "qwen3":
        target, draft = save_pair(folder)
        return target, draft if has_draft else "none"
    model, config = chat_target(family)
    target = save_target(
        folder / "target", model, {**config, "eos_token_id": EOS_ID}, byte_tokenizer(chat_template=TEMPLATE)
    )
    return target, chat_draft(folder / "draft", model, hidden_size=config["hidden_size"]) if has_draft else "none"


def steps_of(monkeypatch, size):
    monkeypatch.setattr(ReadingPace, "step", lambda self, most: min(most, size))


def ask(worker, leave_after=None):
    """Ask, and leave after so many parts of the prompt are told. Returns (start, tokens, numbers of tokens read)."""
    seen = []
    job = Job(
        read_request(BODY, True, worker.generator.provider),
        lambda: leave_after is not None and sum(isinstance(event, tuple) for event in seen) > leave_after,
    )
    tell = job.tell
    job.tell = lambda event: (seen.append(event), tell(event))
    worker.submit(job)
    try:
        list(job.events())
    except ClientGone:
        pass
    read = [event[0] for event in seen if isinstance(event, tuple)]
    start, *_ = (event for event in seen if hasattr(event, "num_cached"))
    return start, [event.id for event in seen if hasattr(event, "finish_reason")], read


@pytest.mark.parametrize("family", ["qwen3", "llama_sliding", "qwen3_5"])
@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "alone"])
def test_what_was_read_stays_for_the_next_try(tmp_path, monkeypatch, family, has_draft):
    steps_of(monkeypatch, 50)
    pair = save(tmp_path, family, has_draft)
    with our_server(pair) as (_, worker):
        start, fresh, read = ask(worker)
        assert start.num_cached == 0 and len(fresh) == 12
        assert read == [*range(0, start.num_prompt - 1, 50), start.num_prompt - 1]
    with our_server(pair) as (_, worker):
        for times in range(1, 3):
            start, tokens, read = ask(worker, leave_after=2)
            assert (start.num_cached, tokens, read) == (150 * (times - 1), [], [0, 50, 100])
        start, tokens, _ = ask(worker)
        assert (start.num_cached, tokens) == (300, fresh)


def test_a_client_that_leaves_a_long_prompt_frees_its_turn(pair, monkeypatch):
    """One step of reading takes a tenth of a second here, whatever the machine."""
    learn = ReadingPace.learn
    steps_of(monkeypatch, 10)
    monkeypatch.setattr(ReadingPace, "learn", lambda *a: (time.sleep(0.1), learn(*a)))
    with our_server(pair) as (client, worker):
        connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY))
        assert wait_until(lambda: worker.num_waiting == 1)
        time.sleep(0.5)
        connection.close()
        assert wait_until(lambda: not worker._admitted, 2), "the turn is still taken"


def test_steps_are_not_cut_where_they_change_what_a_cache_holds(monkeypatch):
    from mlx_lm.models.cache import RotatingKVCache

    from mlx_dflash.server.reading import Reader

    steps_of(monkeypatch, 3)
    model, _ = chat_target()
    for keep, expected in (0, [3, 6, 9, 10]), (4, [10]):
        done, caches = [], [RotatingKVCache(64, keep=keep) for _ in model.layers]
        Reader(model, None, 2048).read([1] * 10, caches, done.append)
        assert done == expected
