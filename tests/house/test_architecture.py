"""The house rules that a machine can check: layers, sizes, names, no hidden state, a quick import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mlx_dflash"
FILES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "convert").glob("*.py")])
TREES = {path: ast.parse(path.read_text()) for path in FILES}
FRONT_ENDS = {"generate", "chat", "server", "trace", "benchmark", "convert", "train", "doctor", "metalcheck"}

# A room is a folder, or a file at the top level. It imports from lower levels only, and from itself.
LEVELS = {
    "_version": 0,
    "blas": 0,
    "block_size": 0,
    "host": 0,
    "files": 0,
    "kernels": 1,
    "accept": 1,
    "dice": 1,
    "pace": 1,
    "demo": 2,
    "caches": 2,
    "grammars": 2,
    "draft": 3,
    "models": 3,
    "checkpoints": 4,
    "target": 4,
    "drafter": 4,
    "stats": 4,
    "pair": 5,
    "session": 5,
    "emission": 6,
    "text": 7,
    "api": 8,
    "commands": 9,
    **dict.fromkeys(FRONT_ENDS, 10),
    "__main__": 11,
}

# Functions with more than five parameters: the public API takes mlx-lm's options, constructors take options once, and
# attention has the signature of mlx.
MANY_PARAMETERS = {
    "stream_generate",
    "open_session",
    "load",
    "Conversation.__init__",
    "Session.__init__",
    "Drafter.__init__",
    "Target.__init__",
    "attend_metal",
    "Kernels.attend_block",
}

# Files that catch whatever was raised: where a program ends, and where a request must not end the server.
CATCH_ALL = {"mlx_dflash/commands/errors.py", "mlx_dflash/server/worker.py"}

# The file that asks where the system keeps caches.
ENVIRONMENT = {"mlx_dflash/files/places.py"}

# Words that the glossary replaces, as parts of identifiers.
NEVER = {"verifier", "speculator", "assistant", "noise", "ctx", "posterior", "crop", "epoch", "cycle", "bs", "restore"}


def name_of(path):
    """Dotted name inside the package; convert/ is a room of it."""
    parts = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(name):
    return name.partition(".")[0]


def level(name):
    assert room(name) in LEVELS, f"{name} has no place in the layers; give it one in LEVELS"
    return LEVELS[room(name)]


def imported(path):
    """Names inside the package that a file imports, wherever the import statement stands."""
    here = name_of(path).split(".")
    if path.name != "__init__.py":
        here = here[:-1]
    here = [part for part in here if part]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                is_module = (PACKAGE / (whole.replace(".", "/") + ".py")).exists() or (
                    PACKAGE / whole.replace(".", "/")
                ).is_dir()
                yield whole if is_module else ".".join(base)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_dflash":
            base = node.module.partition(".")[2]
            yield from (base or alias.name for alias in node.names if base or is_module_name(alias.name))


def is_module_name(name):
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


def functions(path):
    """(qualified name, node) of every function of a file."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield prefix + child.name, child
                yield from walk(child, prefix + child.name + ".")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, prefix + child.name + ".")
            else:
                yield from walk(child, prefix)

    return walk(TREES[path], "")


def each_file(paths=FILES):
    return pytest.mark.parametrize("path", paths, ids=[str(p.relative_to(ROOT)) for p in paths])


PACKAGE_FILES = [p for p in FILES if p != PACKAGE / "__init__.py"]


@each_file(PACKAGE_FILES)
def test_imports_point_down_only(path):
    name = name_of(path)
    for other in imported(path):
        is_allowed = room(other) == room(name) or level(other) < level(name)
        assert is_allowed, f"{name} (level {level(name)}) imports {other} (level {level(other)})"


@each_file(PACKAGE_FILES)
def test_target_and_draft_do_not_know_each_other(path):
    name, others = name_of(path), {room(other) for other in imported(path)}
    if room(name) in ("target", "models"):
        assert not others & {"draft", "drafter"}, f"{name} imports {others}"
    if room(name) in ("draft", "drafter"):
        assert not others & {"target", "models"}, f"{name} imports {others}"


@each_file()
def test_files_and_functions_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{lines} lines; at most 400"
    long = {
        name: node.end_lineno - node.lineno + 1 for name, node in functions(path) if node.end_lineno - node.lineno >= 50
    }
    assert not long, f"more than 50 lines: {long}"


@each_file()
def test_functions_take_few_parameters(path):
    for name, node in functions(path):
        count = len(
            [
                a
                for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if a.arg not in ("self", "cls")
            ]
        )
        assert count <= 5 or name in MANY_PARAMETERS, f"{name} has {count} parameters; a concept is missing"


@each_file()
def test_modules_classes_and_public_functions_are_documented(path):
    if not path.read_text().strip():
        return
    assert ast.get_docstring(TREES[path]), "the module has no docstring"
    if path.stem in FRONT_ENDS:
        return
    for node in TREES[path].body:
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            and node.name not in ("MLP", "DraftLayer")
        ):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@each_file()
def test_there_is_no_hidden_state(path):
    """No environment variables, no globals that change, no exception that is caught whatever it is."""
    for node in ast.walk(TREES[path]):
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        assert not reads or str(path.relative_to(ROOT)) in ENVIRONMENT, f"line {node.lineno}: environment"
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global statement"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            reraises = any(isinstance(n, ast.Raise) and n.exc is None for n in ast.walk(node))
            is_catch_all = caught == "Exception" and str(path.relative_to(ROOT)) in CATCH_ALL
            assert is_catch_all or caught not in ("", "Exception") and (caught != "BaseException" or reraises), (
                f"line {node.lineno}: catches {caught}"
            )
    for node in TREES[path].body:
        if isinstance(node, ast.Assign) and isinstance(
            node.value, (ast.List, ast.Dict, ast.Set, ast.Call, ast.ListComp, ast.DictComp)
        ):
            name = ast.unparse(node.targets[0])
            constant = name.strip("_").isupper() or name == "__all__"
            assert constant or name == "_scope", f"line {node.lineno}: {name} looks like module state"


@each_file()
def test_names_are_the_glossarys(path):
    for node in ast.walk(TREES[path]):
        names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
        for name in [n for n in names if isinstance(n, str)]:
            words = set(name.lower().strip("_").split("_"))
            assert not words & NEVER, f"line {getattr(node, 'lineno', '?')}: {name}"


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_import_is_light():
    heavy = run_python(
        "import sys, mlx_dflash\n"
        "print([n for n in ('mlx.core', 'mlx_lm', 'transformers', 'huggingface_hub', 'numpy') if n in sys.modules])"
    )
    assert heavy == "[]", f"import mlx_dflash also imports {heavy}"


def test_no_module_reaches_for_the_network_when_imported():
    modules = [f"mlx_dflash.{name_of(p)}".rstrip(".") for p in PACKAGE_FILES if p.name != "__main__.py"] + [
        "mlx_dflash"
    ]
    run_python(
        "import socket, importlib\n"
        "def refuse(*args): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        f"for name in {modules}: importlib.import_module(name)"
    )


def test_every_public_name_can_be_had():
    import mlx_dflash

    for name in mlx_dflash.__all__:
        assert getattr(mlx_dflash, name).__doc__, f"{name} has no docstring"
        assert name in dir(mlx_dflash)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mlx_dflash.nonsense  # noqa: B018
