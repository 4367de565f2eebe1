"""g++: which flags, and a cache of compiled kernels.

Kernels are compiled with -fsanitize=thread and parts of the undefined-behaviour sanitizer, but linked against
runtime.cpp instead of the sanitizers' libraries: every load and store becomes a call with its address.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"metal_emulator_{os.getuid()}"
FLAGS = """-std=gnu++17 -fPIC -fvisibility=hidden -g1 -mavx2 -mfma -mf16c -ffp-contract=off -fno-strict-aliasing
  -fexcess-precision=16 -ftrivial-auto-var-init=pattern -Wno-attributes""".split()
CHECKED = """-O1 -fsanitize=thread,bounds,alignment,null,shift-exponent,integer-divide-by-zero,float-cast-overflow
  -fsanitize=signed-integer-overflow,bool,object-size""".split()
UNCHECKED = ["-O2"]
METAL_HEADERS = ("metal_stdlib", "metal_simdgroup", "metal_simdgroup_matrix", "metal_math")


def why_unavailable() -> str | None:
    """The reason why kernels cannot be emulated on this machine, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the Metal emulator needs Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    if not shutil.which("g++"):
        return "the Metal emulator needs g++, which is not installed"
    if int(command("g++", "-dumpversion").split(".")[0]) < 12:
        return f"the Metal emulator needs g++ 12 or later, this is {command('g++', '-dumpversion').strip()}"
    return None


def command(*words) -> str:
    """Run a tool and return what it prints; RuntimeError with its message if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}\n{done.stderr[:4000]}")
    return done.stdout


@cache
def _fixed_parts() -> tuple[str, ...]:
    texts = [(HERE / name).read_text() for name in ("emu.h", "metal.h", "runtime.cpp")]
    return *texts, *FLAGS, command("g++", "--version")


def _cached(*parts: str) -> Path:
    return CACHE / hashlib.sha256("\0".join(_fixed_parts() + parts).encode()).hexdigest()[:24]


def build(cpp: str, checked: bool) -> Path:
    """Compile C++ to a shared library, or return the one compiled before from the same text, flags and runtime."""
    flags = CHECKED if checked else UNCHECKED
    library = _cached(*flags, cpp)
    if library.exists():
        return library
    runtime = _once("runtime.o", lambda out: command("g++", *FLAGS, "-O2", "-c", HERE / "runtime.cpp", "-o", out))
    headers = _once("headers_" + hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8], partial(_headers, flags))
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        Path(folder, "kernel.cpp").write_text(cpp)
        command(
            "g++", *FLAGS, *flags, f"-I{headers}", f"-I{HERE}", "-c", f"{folder}/kernel.cpp", "-o", f"{folder}/kernel.o"
        )
        command("g++", "-shared", "-Wl,-Bsymbolic", f"{folder}/kernel.o", runtime, "-o", f"{folder}/kernel.so", "-lm")
        os.replace(f"{folder}/kernel.so", library)
    return library


def _once(name: str, make) -> Path:
    """The cached file or folder of that name, made now if it is missing."""
    path = _cached(name)
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            make(Path(folder, "made"))
            try:
                os.replace(Path(folder, "made"), path)
            except OSError:  # a folder that another process made meanwhile
                if not path.exists():
                    raise
    return path


def _headers(flags: list[str], out: Path):
    """Empty stand-ins for Metal's own headers, and metal.h compiled ahead: a third of the time of every kernel."""
    out.mkdir()
    for header in METAL_HEADERS:
        (out / header).touch()
    command("g++", *FLAGS, *flags, "-x", "c++-header", HERE / "metal.h", "-o", out / "metal.h.gch")
