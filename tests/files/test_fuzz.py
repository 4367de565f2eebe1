"""Damaged files, in every reader of files: each works with values that fit, or ends in one line that names the file.

Never another exception, a hang, a changed file, or memory of many times the file. `pytest tests/files/test_fuzz.py
--fuzz-cases 1000 --fuzz-seed 7 -s` tries as many as one likes and prints what came of them.
"""

import json
import random
import resource
import shutil
import signal
import time
from collections import Counter
from contextlib import contextmanager

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_dflash.convert.gguf_models import model_config
from support import gguf_files
from support.byte_tokenizer import byte_tokenizer
from support.draft_files import write_gguf_draft
from support.drafts import draft_config, draft_weights
from support.folders import save_draft
from support.mutations import damaged_bytes, damaged_json, damaged_lines, damaged_safetensors, damaged_zip
from support.runs import PROMPT, draft_run, make_draft
from support.targets import tiny_target
from support.torch_files import TorchTensor, save_torch

import mlx_dflash
from mlx_dflash.chat.files import load as load_conversation
from mlx_dflash.checkpoints.drafts import load_draft
from mlx_dflash.commands.prompt_files import read_prompts
from mlx_dflash.files.gguf import GGUFFile
from mlx_dflash.files.safetensors import read_mask_embedding, read_tensors
from mlx_dflash.kernels.record import Record, environment
from mlx_dflash.train.folder import RunFolder
from mlx_dflash.train.loss import Weighting
from mlx_dflash.train.text.corpus import CorpusWriter, Sample, read_corpus
from mlx_dflash.train.trainer import Head, Recipe, Trainer

SECONDS, MEGABYTES = 10, 64
CONFIG = draft_config()


def shapes(tensors):
    """What damage to numbers cannot change: names, shapes, and whether they are floating."""
    return {name: (x.shape, mx.issubdtype(x.dtype, mx.floating)) for name, x in tensors.items()}


# Readers: each makes a file in a folder, and reads it again. What it returns must be as from the whole file,
# unless it returns None, having checked it.


class DraftWeights:
    name, damage = "model.safetensors", staticmethod(damaged_safetensors)

    def make(self, folder):
        save_draft(folder, CONFIG, draft_weights(CONFIG))

    def read(self, folder):
        return shapes(dict(tree_flatten(load_draft(str(folder)).parameters())))


class DraftIndex(DraftWeights):
    name, damage = "model.safetensors.index.json", staticmethod(damaged_json)

    def make(self, folder):
        save_draft(folder, CONFIG, draft_weights(CONFIG), shards=3)

    def read(self, folder):
        assert (
            shapes(read_tensors(folder)).items()
            <= shapes({n: mx.array(w) for n, w in draft_weights(CONFIG).items()}).items()
        )


class DraftSettings(DraftWeights):
    name, damage = "config.json", staticmethod(damaged_json)

    def read(self, folder):
        draft = load_draft(str(folder))
        config = draft.config
        assert shapes(dict(tree_flatten(draft.parameters()))).keys() == draft_weights(CONFIG).keys()
        assert config.num_layers == 2 and config.hidden_size == 32 and 2 <= config.block_size <= 4096
        features = mx.ones((1, 3, 64))
        caches = draft.make_cache()
        draft.project_context(features, caches)
        hidden = draft(mx.ones((1, min(config.block_size, 16), 32)), caches)
        mx.eval(hidden)
        assert hidden.shape == (1, min(config.block_size, 16), 32)


class YarnSettings(DraftSettings):
    def make(self, folder):
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}
        config = draft_config(rope_scaling=scaling, layer_types=["sliding_attention", "full_attention"])
        save_draft(folder, config, draft_weights(config))


class GGUFDraft(DraftWeights):
    name, damage = "draft.gguf", staticmethod(damaged_bytes)

    def make(self, folder):
        write_gguf_draft(folder / self.name, CONFIG, draft_weights(CONFIG), gguf.GGMLQuantizationType.Q8_0)

    def read(self, folder):
        found = shapes(dict(tree_flatten(load_draft(str(folder / self.name)).parameters())))
        return {name: shape for name, shape in found.items() if name in draft_weights(CONFIG)}


class GGUFTarget:
    name, damage = "target.gguf", staticmethod(damaged_bytes)

    def make(self, folder):
        gguf_files.write_gguf(folder / self.name, gguf_files.random_tensors(gguf_files.Type.Q4_0))

    def read(self, folder):
        file = GGUFFile(folder / self.name)
        mx.eval(file.tensors)
        assert isinstance(model_config(file), dict)
        kept = {"attn", "ffn", "output_norm", "token_embd"}
        return None if {name.split(".")[0] for name in file.tensors} - kept - {"blk"} else len(file.tensors)


class KQuantTarget(GGUFTarget):
    """Read by the gguf package."""

    def make(self, folder):
        gguf_files.write_gguf(folder / self.name, gguf_files.random_tensors(gguf_files.Type.Q5_0))


class PromptCache:
    name, damage = "cache.safetensors", staticmethod(damaged_safetensors)

    def make(self, folder):
        model, draft = tiny_target(), make_draft()
        cache = mlx_dflash.make_prompt_cache(model, draft)
        draft_run(model, draft, PROMPT, max_tokens=5, prompt_cache=cache)
        mlx_dflash.save_prompt_cache(str(folder / self.name), cache, {"model": "tiny"})

    def read(self, folder):
        cache = mlx_dflash.load_prompt_cache(str(folder / self.name))
        mx.eval([entry.state for entry in cache])


class Conversation:
    """What chat.files needs of one."""

    def __init__(self):
        self.system, self.messages, self.drafting, self.pieces, self.caches = "be brief", [], True, [], []

    def reset(self):
        self.messages = []


class ChatText:
    name, damage = "chat.json", staticmethod(damaged_json)

    def make(self, folder):
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
        record = {"system": "be brief", "messages": messages, "drafting": True}
        (folder / self.name).write_text(json.dumps(record))

    def read(self, folder):
        conversation = Conversation()
        load_conversation(conversation, str(folder / self.name), {})
        for message in conversation.messages:
            assert isinstance(message["role"], str) and isinstance(message["content"], str)
        assert conversation.system is None or isinstance(conversation.system, str)


class ChatCaches(ChatText):
    name, damage = "chat.safetensors", staticmethod(damaged_safetensors)

    def make(self, folder):
        record = {"system": None, "messages": [{"role": "user", "content": "hello"}], "drafting": True}
        record["pieces"] = [["hello", [1, 2]], ["hi", [3]]]
        model = tiny_target()
        cache = mlx_dflash.make_prompt_cache(model)
        model(mx.array([[1, 2, 3]]), cache=cache)
        metadata = {"model": "tiny", "conversation": json.dumps(record)}
        mlx_dflash.save_prompt_cache(str(folder / self.name), cache, metadata)


class TrainingText:
    name, damage = "data.jsonl", staticmethod(damaged_lines)

    def make(self, folder):
        writer = CorpusWriter(folder / self.name, {"vocab_size": 97, "target": "tiny"})
        for i in range(5):
            writer.append(Sample([1, 2, 3, 4 + i], 2, i, "say", True))
        writer.close()

    def read(self, folder):
        for sample in read_corpus(folder / self.name):
            assert all(0 <= token for token in sample.tokens) and 1 <= sample.prompt_length <= len(sample.tokens)
            assert isinstance(sample.source, int) and isinstance(sample.kind, str)


class Prompts:
    name, damage = "prompts.jsonl", staticmethod(damaged_lines)

    def make(self, folder):
        lines = [
            {"prompt": "say one", "class": "say"},
            {"messages": [{"role": "user", "content": "two"}]},
            {"text": "x"},
        ]
        (folder / self.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.tokenizer = byte_tokenizer()

    def read(self, folder):
        for prompt in read_prompts(folder / self.name, self.tokenizer):
            assert all(type(i) is int for i in prompt.ids) and 1 <= prompt.length <= len(prompt.ids)


class RunState:
    name, damage = "checkpoint/state.safetensors", staticmethod(damaged_safetensors)

    def make(self, folder):
        self.trainer = Trainer(make_draft(), Head(None, None, None), Recipe(steps=8), Weighting())
        mx.eval(self.trainer.state())
        run = RunFolder(folder, {"steps": 8})
        state = self.trainer.state()
        run.save(state | {"optimizer.step": mx.array(4, state["optimizer.step"].dtype)}, {"step": 4, "best": 2.5})
        run.note({"step": 4, "loss": 1.0})
        run.close()

    def read(self, folder):
        run = RunFolder(folder, {"steps": 8})
        try:
            state, counters = run.load()
            try:
                self.trainer.resume(state, counters["step"])
            except ValueError as error:  # the trainer knows no files
                raise ValueError(f"{folder}/checkpoint/state.safetensors: {error}") from error
            run.forget_after(counters["step"])
            assert all(line["step"] <= 8 for line in run.log())
        finally:
            run.close()
        return shapes(self.trainer.state())


class RunCounters(RunState):
    name, damage = "checkpoint/counters.json", staticmethod(damaged_json)


class RunSettings(RunState):
    name, damage = "run.json", staticmethod(damaged_json)


class RunLog(RunState):
    name, damage = "log.jsonl", staticmethod(damaged_lines)


class KernelRecord:
    name, damage = "kernels.json", staticmethod(damaged_json)

    def make(self, folder):
        (folder / self.name).write_text(
            json.dumps({environment(): {"a shape": {"refused": None, "ms": {"8": [1, 2]}}}})
        )

    def read(self, folder):
        found = Record(folder / self.name).find("a shape")
        assert found is None or isinstance(found, dict)


class MaskFile:
    name, damage = "mask_embedding.pt", staticmethod(damaged_zip)

    def make(self, folder):
        content = {"mask_token_id": 96, "embedding": TorchTensor(np.arange(32, dtype=np.float32) / 8)}
        with pytest.MonkeyPatch.context() as patch:
            save_torch(folder / self.name, content, patch)

    def read(self, folder):
        vector, token = read_mask_embedding(folder)
        assert vector.ndim == 1 and (token is None or isinstance(token, int))
        mx.eval(vector)


READERS = [
    *(DraftWeights, DraftIndex, DraftSettings, YarnSettings, GGUFDraft, GGUFTarget, KQuantTarget, PromptCache),
    *(ChatText, ChatCaches, TrainingText, Prompts, RunState, RunCounters, RunSettings, RunLog, KernelRecord, MaskFile),
]


@contextmanager
def limited():
    """Fail the case if it takes more than SECONDS."""

    def stop(*_):
        raise AssertionError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def outcome(reader, folder, whole):
    """Read once; return "works" or "refused". Raises whatever a reader must not do."""
    before, peak = contents(folder), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with limited():
            found = reader.read(folder)
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        assert reader.name.split("/")[-1] in text or str(folder) in text, f"names no file: {text[:300]}"
        assert "\n" not in text and len(text) < 1000, f"no line: {text[:300]}"
        assert contents(folder) == before, "files were changed"
        result = "refused"
    else:
        assert found == whole, f"{str(found)[:200]} where the whole file gives {str(whole)[:200]}"
        after = contents(folder)
        assert {p for p in before if p.name != "log.jsonl"} == {p for p in after if p.name != "log.jsonl"}
        result = "works"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    assert grown < MEGABYTES, f"{grown:.0f} MB"
    return result


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_damaged_files(kind, tmp_path, request):
    reader, folder, kept = kind(), tmp_path / "read", tmp_path / "kept"
    kept.mkdir()
    reader.make(kept)
    shutil.copytree(kept, folder)
    whole = reader.read(folder)
    counts, failures, began = Counter(), [], time.perf_counter()
    first = request.config.getoption("--fuzz-seed")
    data = (kept / reader.name).read_bytes()
    for seed in range(first, first + request.config.getoption("--fuzz-cases")):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        damaged = reader.damage(data, random.Random(seed))
        (folder / reader.name).write_bytes(damaged)
        try:
            counts[outcome(reader, folder, whole)] += 1
        except Exception as error:  # every case is told, with its seed
            counts["wrong"] += 1
            failures.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    print(f"{kind.__name__}: {dict(counts)} in {time.perf_counter() - began:.1f} s")
    assert not failures, "\n".join(failures[:20])
