"""Address spaces: clang reads the text that MLX would hand to Metal, with device, constant and threadgroup as types."""

import re
import shutil
import subprocess
from pathlib import Path

from .rewrite import SHARED
from .signature import signature, template_arguments

HERE = Path(__file__).parent
_VECTOR_MAKE = re.compile(r"(?<![\w:<.])((?:u?(?:int|short|char|long)|float|half|bfloat|bool)[234])\s*\((?=[^)*])")


def clang() -> str | None:
    """Return the path of this machine's clang++, or None."""
    return shutil.which("clang++")


def lint(call) -> str:
    """Return clang's complaints about a launch's text; the empty string if there are none."""
    text, function = signature(call)
    values = ", ".join(value for *_, value in template_arguments(call.template))
    body = SHARED.sub(lambda m: m[0].replace("threadgroup", "static threadgroup", 1), call.source)
    body = _VECTOR_MAKE.sub(r"metal::make<\1>(", body)
    text = re.sub(r"\[\[[^]]*\]\]", "", text)
    instance = f"auto instance = &{function}<{values}>;" if values else ""
    program = f'#include "lint.h"\nusing namespace metal;\n{text}\n#line 1 "body"\n{body}\n}}\n{instance}\n'
    warnings = ["-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-w"]
    command = [clang(), "-x", "c++", "-std=c++17", "-fsyntax-only", *warnings, f"-I{HERE}", "-"]
    return subprocess.run(command, input=program, capture_output=True, text=True).stderr
