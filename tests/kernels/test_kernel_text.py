"""The text of the kernels, read by a compiler that knows address spaces."""

import re
from dataclasses import replace

import mlx.core as mx
import pytest
import test_attention_kernel as attention
import test_matmul_kernel as matmul
from support.metal_emulator.lint import clang, lint

from mlx_dflash.kernels.attention import merge_call, partial_call, plan
from mlx_dflash.kernels.matmul import multiply_call

pytestmark = pytest.mark.skipif(clang() is None, reason="the address-space lint needs clang++")


def attention_calls(case):
    """The launches of both passes, the second on results that are all zero."""
    q, keys, sight, scale, sinks = attention.problem(case, 33)
    first = partial_call(q, keys, sight, scale, plan(q, keys, sight, 20))
    return first, merge_call(q, [mx.zeros(shape, dtype) for shape, dtype in first.outputs.values()], sinks)


def calls(case):
    """Every launch of a case of either kernel."""
    if isinstance(case, attention.Case):
        return attention_calls(case)
    return (multiply_call(*matmul.problem(case)),)


@pytest.mark.parametrize("case", attention.CASES + matmul.CASES, ids=str)
def test_kernel_text_keeps_address_spaces_apart(case):
    for call in calls(case):
        assert lint(call) == ""


@pytest.mark.parametrize("pointer", ("const device T* query", "const threadgroup T* key =", "device float* out"))
def test_lint_sees_a_pointer_without_its_address_space(pointer):
    call, _ = attention_calls(attention.CASES[0])
    bare = re.sub("device |threadgroup ", "", pointer)
    assert pointer in call.source
    assert "error" in lint(replace(call, source=call.source.replace(pointer, bare)))
