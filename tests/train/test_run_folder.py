"""The folder of a run: what is the user's stays, and a damaged state is refused by the name of what is wrong in it."""

import re
import shutil

import mlx.core as mx
import pytest
from support.training import fit, losses

from mlx_dflash.train.folder import RunFolder


def refused(capsys, message, *arguments, **flags):
    """Fit, which must end with one line."""
    with pytest.raises(SystemExit) as end:
        fit(*arguments, **flags)
    told = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and told.startswith("error: ") and re.search(message, told), told


@pytest.mark.parametrize(
    "name", ["last/mine.txt", "best/mine.txt", "lessons/mine.txt", "mine.txt", ".last.old/mine.txt"]
)
def test_a_folder_of_something_else_is_refused_and_stays(place, tmp_path, name, capsys):
    mine = tmp_path / "foreign" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    refused(capsys, "foreign holds .* and is not the folder of a run", place, tmp_path / "foreign", steps=1)
    assert [path for path in (tmp_path / "foreign").rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_what_a_killed_run_began_is_no_other_folder(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / ".run.json.0123456789ab.part").touch()
    RunFolder(tmp_path, {}).close()
    RunFolder(tmp_path, {}).close()


@pytest.fixture(scope="module")
def half(place, tmp_path_factory):
    """A run that was interrupted after 4 of 8 updates."""
    folder = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch:
        original = RunFolder.save

        def stop(self, state, counters):
            original(self, state, counters)
            raise KeyboardInterrupt

        patch.setattr(RunFolder, "save", stop)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(place, folder, steps=8)
    return folder


def without(prefix):
    return lambda state: {name: value for name, value in state.items() if not name.startswith(prefix)}


def changed(name, change):
    return lambda state: state | {name: change(state[name])}


FC, SECOND = "draft.fc.weight", "optimizer.fc.weight.v"
STATES = {
    "no weights": (without("draft."), "tensors are missing, among them draft.fc.weight"),
    "one weight less": (without(FC), f"1 tensors are missing, among them {FC}"),
    "no optimizer": (without("optimizer."), "tensors are missing, among them optimizer."),
    "a tensor more": (lambda state: state | {"draft.x": mx.zeros(1)}, "not part of this run, among them draft.x"),
    "another shape": (changed(FC, mx.transpose), f"{FC} holds mlx.core.float32 .*, expected"),
    "whole numbers": (changed(FC, lambda x: x.astype(mx.int32)), f"{FC} holds mlx.core.int32"),
    "half as exact": (changed(FC, lambda x: x.astype(mx.float16)), f"{FC} holds mlx.core.float16"),
    "infinite": (changed(FC, lambda x: x * mx.inf), f"{FC} holds numbers that are not finite"),
    "negative squares": (changed(SECOND, lambda x: -x - 1), f"{SECOND} holds negative numbers"),
    "another update": (changed("optimizer.step", lambda x: x + 1), "optimizer.step is 5, expected 4"),
}


@pytest.mark.parametrize("what", STATES)
def test_a_damaged_state_is_refused_by_name(place, half, tmp_path, what, capsys):
    damage, message = STATES[what]
    shutil.copytree(half, tmp_path / "run")
    file = tmp_path / "run" / "checkpoint" / "state.safetensors"
    state = mx.load(str(file))
    mx.eval(state)
    mx.save_safetensors(str(file), damage(state), {"format": "pt"})
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused(capsys, f"state.safetensors: .*{message}", place, tmp_path / "run", steps=8)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_state_as_it_was_goes_on(place, half, tmp_path):
    shutil.copytree(half, tmp_path / "run")
    fit(place, tmp_path / "run", steps=8)
    fit(place, tmp_path / "whole", steps=8)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "counters", ['{"step": 0, "best": 1}', '{"step": 4}', '{"step": 9, "best": 1}', '{"step": "4", "best": 1}', "[4]"]
)
def test_damaged_counters_are_refused(place, half, tmp_path, counters, capsys):
    shutil.copytree(half, tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "counters.json").write_text(counters)
    refused(capsys, "counters.json|update 9, of 8", place, tmp_path / "run", steps=8)
