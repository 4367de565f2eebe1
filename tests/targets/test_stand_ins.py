"""Stand-ins act in one thread and one scope; nothing of them stays behind, however the scope ends."""

import threading
from contextlib import nullcontext
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.targets import tiny_target

from mlx_dflash.kernels import Kernels
from mlx_dflash.models import stand_ins
from mlx_dflash.models.few_rows import by_kernels, quantized_linears
from mlx_dflash.models.rotations import shared_rotations
from mlx_dflash.models.stand_ins import Replacement, standing_in
from mlx_dflash.models.structure import Structure
from mlx_dflash.models.taps import tapped

CONTAINERS = {"list": [abs], "dict": {0: abs}, "globals": vars(ModuleType("made")) | {0: abs}}


def negative(original, x):
    return -original(x)


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_an_entry_is_replaced_inside_the_scope_only(container, is_failing):
    with pytest.raises(RuntimeError) if is_failing else nullcontext():
        with standing_in([Replacement(container, 0, negative)]):
            assert container[0](-3) == -3
            if is_failing:
                raise RuntimeError
    assert container[0] is abs


def test_a_layer_is_still_a_layer_of_its_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, parameters = model.layers[0], len(model.parameters()["layers"])
    with standing_in([Replacement(model.layers, 0, negative)]):
        stand_in = model.layers[0]
        assert stand_in is not first and isinstance(stand_in, nn.Linear) and stand_in.weight is first.weight
        assert mx.array_equal(stand_in(mx.ones((1, 2))), -first(mx.ones((1, 2))))
        assert len(model.parameters()["layers"]) == parameters and stand_in in model.modules()
    assert model.layers[0] is first


def test_another_thread_gets_the_original():
    container, results = [abs], []
    with standing_in([Replacement(container, 0, negative)]):
        in_thread(lambda: results.append(container[0](-3)))
    assert results == [3]


def test_a_later_replacement_of_an_entry_counts_and_the_entry_comes_back():
    container = [abs]
    with standing_in([Replacement(container, 0, negative), Replacement(container, 0, lambda original, x: "later")]):
        assert container[0](-3) == "later"
    assert container[0] is abs


def test_a_scope_inside_another_adds_to_it():
    container = [abs]
    with standing_in([Replacement(container, 0, negative)]):
        with standing_in([Replacement(container, 0, lambda inner, x: inner(x) * 2)]):
            assert container[0](-3) == -6
        assert container[0](-3) == -3
    assert container[0] is abs


def test_the_scope_of_another_thread_waits(monkeypatch):
    """The second thread must not take the stand-in that it would find for the original."""
    lock, refused, second_found = threading.RLock(), threading.Event(), []

    class Observed:
        def __enter__(self):
            if not lock.acquire(blocking=False):
                refused.set()
                lock.acquire()

        def __exit__(self, *error):
            lock.release()

    container = [abs]

    def keep(original, x):
        second_found.append(original)

    def second():
        with standing_in([Replacement(container, 0, keep)]):
            container[0](1)

    monkeypatch.setattr(stand_ins, "_scope", Observed())
    thread = threading.Thread(target=second)
    with standing_in([Replacement(container, 0, negative)]):
        thread.start()
        assert refused.wait(60), "the second thread did not find the scope taken"
        assert not second_found
    thread.join()
    assert second_found == [abs] and container[0] is abs


def quantized_target():
    model = tiny_target()
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    return model


SCOPES = {
    "taps of layers": (lambda model: tapped(Structure(model), [0, 3]), lambda model: model.layers[3]),
    "taps of entrances": (lambda model: tapped(by_entrances(model), [0]), lambda model: model.layers[1].mlp),
    "linears": (
        lambda model: by_kernels(quantized_linears(model), Kernels("off")),
        lambda model: model.layers[0].mlp.up_proj,
    ),
    "attention": (lambda model: by_kernels([], Kernels("off")), lambda model: mx.fast.scaled_dot_product_attention),
    "rotations": (lambda model: shared_rotations(), lambda model: mx.fast.rope),
}


def by_entrances(model):
    structure = Structure(model)
    assert structure.tap_entrances()
    return structure


@pytest.mark.parametrize("name", SCOPES)
def test_every_change_of_a_model_or_of_mlx_is_a_stand_in(name):
    """So what holds of stand-ins, above, holds of all of them."""
    scope, entry = SCOPES[name]
    if name == "rotations" and mx.default_device() != mx.cpu:
        pytest.skip("other devices have a kernel for RoPE")
    model = quantized_target()
    original = entry(model)
    with scope(model):
        assert type(entry(model)) is stand_ins.StandIn
    assert entry(model) is original
