"""Metal text to C++ text, line numbers kept."""

import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TOKEN = re.compile(r"\"(?:\\.|[^\"\\])*\"|\.?\d(?:[eEpP][+-]|[\w.])*|[A-Za-z_]\w*|::|->|\s+|.", re.S)
_FLOAT = re.compile(r"((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)([fFhH]?)")
_NAME = r"\w+(?:\s*\[[^;{}]*?\])*"
SHARED = re.compile(
    r"(?:^|(?<=[;{}]))(\s*)(?:alignas\s*\(\w+\)\s*)?threadgroup\s+((?:unsigned\s+|metal::)?\w+(?:\s*<[^;{}]*?>)?)\s+"
    rf"({_NAME}(?:\s*,\s*{_NAME})*)\s*;",
    re.M,
)
_STILL_SHARED = re.compile(r"\bthreadgroup\b[^*&;,)]*[;,\[=][^\n]*")
_CAST = re.compile(
    r"(?<!\w)\(\s*(?:const\s+)?(?!(?:const|device|constant|threadgroup|thread)\b)\w+(?:\s*<[^()]*>)?\s*\*\s*\)"
)
_NOT_METAL = re.compile(r"(?<![\w.>])(double|goto|throw|try|catch|new|delete|virtual|std|printf)(?!\w)")


def to_cpp(text: str) -> str:
    """Translate a kernel body.

    Threadgroup variables become references into checked memory, 1.0 becomes 1.0f (Metal has no double), 1.0h a half,
    and v.xy becomes v.xy() or, where it is assigned to, v.xy_().
    Raises SyntaxError for what Metal would not accept or what cannot be translated.
    """
    text = _literals_and_swizzles(_COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text))
    if m := _CAST.search(text) or _NOT_METAL.search(re.sub(r'"[^"\n]*"', "", text)):
        raise SyntaxError(f"not Metal: {m[0]}")
    text = _threadgroup_variables(text)
    if m := _STILL_SHARED.search(text):  # left alone, it would silently become a private variable
        raise SyntaxError(f"threadgroup variable not understood: {m[0]}")
    return text


def _literals_and_swizzles(text: str) -> str:
    out, before, tokens = [], "", _TOKEN.findall(text)
    for i, token in enumerate(tokens):
        if m := _FLOAT.fullmatch(token):
            token = f"((half){m[1]}f)" if m[2] in ("h", "H") else m[1] + "f"
        elif before in (".", "->") and re.fullmatch("[xyzw]{2,4}", token):
            token += "_()" if re.match(r"\s*[-+*/%&|^]?=(?!=)", "".join(tokens[i + 1 : i + 5])) else "()"
        out.append(token)
        before = token if token.strip() else before
    return "".join(out)


def _threadgroup_variables(text: str) -> str:
    slot = 0

    def declare(m):
        nonlocal slot
        code = m[1] + "\n" * (m[0].count("\n") - m[1].count("\n"))
        for name, dims in re.findall(r"(\w+)((?:\s*\[[^;{}]*?\])*)\s*(?:,|$)", m[3]):
            dims = dims.replace("\n", " ")
            code += (
                f"using {name}_t_ = {m[2]} {dims}; {name}_t_& {name} = *({name}_t_*)emu::tg_var({slot}, "
                f'sizeof({name}_t_), sizeof(std::remove_all_extents_t<{name}_t_>), "{name}");'
            )
            slot += 1
        return code

    return SHARED.sub(declare, text)
