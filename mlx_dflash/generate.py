"""The command `python -m mlx_dflash.generate`: mlx-lm's flags, text on stdout, everything else on stderr.

The module can be called: it is the function mlx_dflash.generate of api.py, which its import would hide otherwise.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .api import generate
from .commands.errors import user_errors
from .commands.flags import add_model_flags, add_prompt_flags, add_sampling_flags, block_options, read_message
from .commands.loading import load_pair
from .commands.progress import prefill_bar
from .commands.sampling import sampler_from
from .commands.templates import render_prompt


def make_parser(prog: str = "mlx_dflash.generate", description: str | None = None) -> argparse.ArgumentParser:
    """The flags of mlx_lm.generate, and ours."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description or "Generate text with a target and its DFlash draft."
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    add_sampling_flags(parser)
    add = parser.add_argument
    add("--verbose", type=_true_false, default=True, help="report speed and memory on stderr (default: true)")
    add("--stats", action="store_true", help="report rounds, acceptance and times on stderr")
    add(
        "--compare",
        action="store_true",
        help="run plain mlx-lm too: check that the tokens are the same, print the speed ratio",
    )
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at a time (default: %(default)s)")
    add("--json-schema", help="let only JSON of this schema through: its text, or a file that holds it")
    add("--prompt-cache-file", help="saved caches to continue from")
    add("--max-kv-size", type=int, help="most rows of a key-value cache")
    add("--kv-bits", type=int, help="bits of a quantized key-value cache (default: not quantized)")
    add(
        "--kv-group-size", type=int, default=64, help="group size of a quantized key-value cache (default: %(default)s)"
    )
    add(
        "--quantized-kv-start",
        type=int,
        default=5000,
        help="with --kv-bits, quantize from this token on (default: %(default)s)",
    )
    return parser


def _true_false(text: str) -> bool:
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in ("true", "t", "1")


def processors_from(args: argparse.Namespace, tokenizer: Any, model: Any) -> Callable[[], list[Callable]]:
    """Makes the logits processors that --json-schema asks for, new ones for each run."""
    if not args.json_schema:
        return list
    from .grammars import Grammars
    from .target import Structure

    text = args.json_schema
    if not text.lstrip().startswith(("{", "true", "false")):
        with open(text) as file:
            text = file.read()
    grammars = Grammars(tokenizer, Structure(model).vocab_size)
    grammars.json_schema(text)
    return lambda: [grammars.json_schema(text)]


def stream_text(responses: Iterator[Any]) -> tuple[list[int], Any]:
    """Print the text as it comes. Returns the tokens and the last response, also after Ctrl-C."""
    tokens, response = [], None
    try:
        for response in responses:
            print(response.text, end="", flush=True)
            tokens.append(response.token)
    except KeyboardInterrupt:
        print("\n[interrupted]", file=sys.stderr, end="")
    finally:
        responses.close()
    print(flush=True)
    return tokens, response


def compare(plain: Iterator[Any], tokens: list[int], seconds: float) -> bool:
    """Run plain mlx-lm to the end; say on stderr whether its tokens are these, and how the times compare."""
    started = time.perf_counter()
    theirs = [response.token for response in plain]
    plain_seconds = time.perf_counter() - started
    differing = [i for i, (a, b) in enumerate(zip(theirs, tokens)) if a != b]
    if theirs == tokens:
        verdict = "the same tokens as plain mlx-lm"
    else:
        first = differing[0] if differing else min(len(theirs), len(tokens))
        verdict = f"DIFFERENT from plain mlx-lm from token {first} on"
    print(f"Compare: {verdict}", file=sys.stderr)
    print(
        f"Compare: {plain_seconds:.2f} s plain, {seconds:.2f} s with the draft: {plain_seconds / seconds:.2f} x",
        file=sys.stderr,
    )
    return theirs == tokens


def main() -> None:
    args = make_parser().parse_args()
    with user_errors():
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from .api import check_sizes, report, stream_generate
    from .caches.saved import load_prompt_cache

    check_sizes(args.max_tokens, args.prefill_step_size)
    drafting = block_options(args)
    message = read_message(args)
    prompt_cache, metadata = None, None
    if args.prompt_cache_file:
        prompt_cache, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
        if args.model and metadata.get("model") not in (None, args.model):
            raise ValueError(f"{args.prompt_cache_file} was made with {metadata['model']}, not with {args.model}")
    model, tokenizer, draft = load_pair(args, metadata)
    if args.compare and (draft is None or prompt_cache is not None):
        raise ValueError("--compare needs a draft, and a prompt that no cache has the beginning of")
    prompt = render_prompt(args, tokenizer, message, continues=prompt_cache is not None)
    options = dict(
        max_tokens=args.max_tokens,
        sampler=sampler_from(args, tokenizer),
        stop_strings=args.stop_strings,
        prefill_step_size=args.prefill_step_size,
        max_kv_size=args.max_kv_size,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
    )
    if draft is not None:
        drafting["draft_model"] = draft
    make_processors = processors_from(args, tokenizer, model)

    def run(**more: Any) -> Iterator[Any]:
        mx.random.seed(seed)
        return stream_generate(model, tokenizer, prompt, logits_processors=make_processors(), **options, **more)

    seed = time.time_ns() % 2**32 if args.seed is None else args.seed
    started = time.perf_counter()
    with prefill_bar() as progress:
        tokens, response = stream_text(run(prompt_cache=prompt_cache, prompt_progress_callback=progress, **drafting))
    seconds = time.perf_counter() - started
    if response is not None and (args.verbose or args.stats):
        print(report(response, with_rounds=args.stats), file=sys.stderr)
    if response is None or response.finish_reason is None:
        return 130
    return 0 if not args.compare or compare(run(), tokens, seconds) else 1


class _FunctionModule(ModuleType):
    """A module that can be called: importing it must not hide the function mlx_dflash.generate."""

    __call__ = staticmethod(generate)


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__].__class__ = _FunctionModule
