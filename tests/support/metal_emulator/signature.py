"""The kernel signature that MLX generates around a body, and the value that the emulator gives each argument."""

import mlx.core as mx

_VECTOR = "uint3({0}[0], {0}[1], {0}[2])".format
ATTRIBUTES = {  # in the order in which MLX appends them: type, value
    "dispatch_threads_per_threadgroup": ("uint3", _VECTOR("emu::tg_nominal")),
    "grid_size": ("uint3", _VECTOR("emu::grid")),
    "simdgroup_index_in_threadgroup": ("uint", "emu::cur->sg"),
    "simdgroups_per_threadgroup": ("uint", "(emu::cur->size + 31) / 32"),
    "thread_execution_width": ("uint", "32u"),
    "thread_index_in_simdgroup": ("uint", "emu::cur->lane"),
    "thread_index_in_threadgroup": ("uint", "emu::cur->lid"),
    "thread_position_in_grid": ("uint3", _VECTOR("emu::cur->in_grid")),
    "thread_position_in_threadgroup": ("uint3", _VECTOR("emu::cur->in_tg")),
    "threadgroup_position_in_grid": ("uint3", _VECTOR("emu::cur->tg")),
    "threadgroups_per_grid": ("uint3", _VECTOR("emu::tg_count")),
    "threads_per_grid": ("uint3", _VECTOR("emu::grid")),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", _VECTOR("emu::cur->tg_size")),
}
METADATA = {"_shape": "int*", "_strides": "int64_t*", "_ndim": "int&"}


def c_type(dtype: mx.Dtype) -> str:
    """Spell a dtype as MLX does in Metal."""
    name = str(dtype).rsplit(".", 1)[-1].rstrip("_")
    return {"float32": "float", "bool": "bool"}.get(name, name + "_t")


def template_arguments(template: dict) -> list[tuple[str, str, str]]:
    """Return (kind, name, value) of each template parameter, as MLX writes them."""

    def one(name, value):
        if isinstance(value, mx.Dtype):
            return "typename", name, c_type(value)
        return "bool" if isinstance(value, bool) else "int", name, str(int(value))

    return [one(name, value) for name, value in template.items()]


def used_metadata(call, name: str) -> list[str]:
    """Return the suffixes (_shape, _strides, _ndim) of an input that the body mentions: only those are passed."""
    return [s for s in METADATA if call.inputs[name].ndim and name + s in call.source]


def signature(call) -> tuple[str, str]:
    """Return MLX's generated text up to the kernel body, and the kernel's mangled name."""
    params = template_arguments(call.template)
    function = f"custom_kernel_{call.name}"
    if params:
        function += "__" + "_".join(value for *_, value in params).replace("-", "_")
    arguments = []
    for name, array in call.inputs.items():
        function += f"_{c_type(array.dtype)}" + ("s" if array.ndim == 0 else "c" if array.size < 8 else "")
        space = "constant" if array.size < 8 else "device"
        arguments.append(f"const {space} {c_type(array.dtype)}{'*' if array.ndim else '&'} {name}")
        arguments += [f"const constant {METADATA[s]} {name}{s}" for s in used_metadata(call, name)]
    for name, (_, dtype) in call.outputs.items():
        function += f"_{c_type(dtype)}"
        arguments.append(f"device {c_type(dtype)}* {name}")
    lines = [f"  {argument} [[buffer({i})]]" for i, argument in enumerate(arguments)]
    lines += [f"  {kind} {name} [[{name}]]" for name, (kind, _) in ATTRIBUTES.items() if name in call.source]
    head = f"template <{', '.join(f'{kind} {name}' for kind, name, _ in params)}>\n" if params else ""
    return f"{head}[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n", function
