"""JSON of any depth and shape in every file that is read: one line that names the file, or the file is ignored."""

import json
from types import SimpleNamespace

import pytest
from support.byte_tokenizer import byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft

import mlx_dflash
from mlx_dflash.chat.files import load as load_conversation
from mlx_dflash.checkpoints.targets import load
from mlx_dflash.commands.prompt_files import read_prompts
from mlx_dflash.files.safetensors import read_tensors
from mlx_dflash.kernels.record import Record, environment
from mlx_dflash.train.folder import RunFolder
from mlx_dflash.train.text.corpus import CorpusWriter, Sample, read_corpus, read_header

DEEP = "[" * 100_000 + "]" * 100_000
LESS_DEEP = "[" * 900 + "]" * 900
READERS = {
    "config.json": lambda folder: mlx_dflash.load_draft(str(folder)),
    "config.json of a target": lambda folder: load(str(folder)),
    "model.safetensors.index.json": lambda folder: read_tensors(folder),
    "tokenizer.json": lambda folder: mlx_dflash.load_draft(str(folder)),
    "added_tokens.json": lambda folder: mlx_dflash.load_draft(str(folder)),
    "chat.json": lambda folder: load_conversation(SimpleNamespace(reset=lambda: None), str(folder / "chat.json"), {}),
    "prompts.jsonl": lambda folder: read_prompts(folder / "prompts.jsonl", byte_tokenizer()),
    "data.jsonl": lambda folder: read_header(folder / "data.jsonl"),
    "run.json": lambda folder: RunFolder(folder, {"a": 1}),
    "counters.json": lambda folder: RunFolder(folder, {"a": 1}).load(),
    "log.jsonl": lambda folder: RunFolder(folder, {"a": 1}).log(),
}


@pytest.fixture
def folder(tmp_path):
    """A draft whose mask token is to be looked up, and a run of training with a checkpoint."""
    config = draft_config({"mask_token_id": None, "mask_token": "<mask>"})
    save_draft(tmp_path, config, draft_weights(config))
    (tmp_path / "run.json").write_text('{"a": 1}')
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "counters.json").write_text('{"step": 1, "best": 1.0}')
    return tmp_path


@pytest.mark.parametrize("text", [DEEP, LESS_DEEP, '{"a":' * 900 + "1" + "}" * 900, "\udcff", "[1", "9" * 5000, "5"])
@pytest.mark.parametrize("reader", READERS)
def test_unusable_json_is_refused_in_one_line(folder, reader, text):
    name = reader.split()[0]
    place = folder / "checkpoint" if name == "counters.json" else folder
    (place / name).write_bytes((text + "\n" * name.endswith(".jsonl")).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=name) as caught:
        READERS[reader](folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("line", [DEEP, LESS_DEEP, "\udcff", "[1", "5", '{"tokens": "x", "prompt_length": 1}'])
def test_unusable_lines_of_training_text_are_named(tmp_path, line):
    writer = CorpusWriter(tmp_path / "data.jsonl", {"vocab_size": 9})
    writer.append(Sample([1, 2, 3], 1))
    writer.close()
    with (tmp_path / "data.jsonl").open("ab") as file:
        file.write((line + "\n").encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="data.jsonl, line 3"):
        list(read_corpus(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("text", [DEEP, LESS_DEEP, "[]", "null", "5", "\udcff", "{", '"text"'])
def test_an_unusable_record_of_kernels_is_ignored(tmp_path, text, key):
    """key: the text stands under this machine's name, not alone."""
    file = tmp_path / "kernels.json"
    whole = f"{{{json.dumps(environment())}: {text}}}" if key else text
    file.write_bytes(whole.encode(errors="surrogateescape"))
    record = Record(file)
    assert record.find("a shape") is None
    record.keep("a shape", {"uses_ours": True})
    assert record.find("a shape") == {"uses_ours": True}
