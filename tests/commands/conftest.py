"""Fixtures of the tests of commands: a tiny pair that chats, in memory and as folders."""

import pytest
from support.chat_fixtures import chat_draft, chat_target, save_pair

from mlx_dflash.checkpoints.drafts import load_draft


@pytest.fixture(scope="module")
def target():
    return chat_target()[0]


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return load_draft(str(chat_draft(tmp_path_factory.mktemp("draft"), target)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Paths of the target and the draft."""
    return save_pair(tmp_path_factory.mktemp("pair"))
