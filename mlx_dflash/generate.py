"""The command `python -m mlx_dflash.generate`: one prompt in, the target's text out.

It takes the flags of mlx_lm.generate and a few of its own, writes the text to stdout and everything else to stderr.
The module can also be called: it is the function mlx_dflash.generate of api.py, which importing it would hide.
"""

import argparse
import sys
import time
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any

from .commands.errors import Parser, run_command
from .commands.flags import add_model_flags, add_prompt_flags, add_sampling_flags, block_options, read_message
from .commands.loading import load_pair
from .commands.progress import prefill_bar
from .commands.sampling import check_sampling, sampler_from
from .commands.templates import render_prompt
from .files.json_text import parse_json

# Flags that stream_generate takes under the same name.
_OPTIONS = (
    "max_tokens",
    "stop_strings",
    "prefill_step_size",
    "max_kv_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
)


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of the flags of mlx_lm.generate and of ours."""
    parser = Parser(
        prog="mlx_dflash.generate",
        description="Generate text with a target and its DFlash draft; the text is the target's own.",
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    add_sampling_flags(parser)
    add = parser.add_argument
    add("--verbose", type=_true_false, default=True, help="report speed and memory on stderr (default: true)")
    add("--stats", action="store_true", help="report rounds, kept drafts, and milliseconds of each part on stderr")
    add(
        "--compare",
        action="store_true",
        help="run plain mlx-lm as well, check that its tokens are the same, and print the ratio of the times",
    )
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens read at a time (default: %(default)s)")
    add("--json-schema", help="JSON schema that the text must follow: the schema itself, or a file that holds it")
    add("--prompt-cache-file", help="file of saved caches of a conversation that this prompt continues")
    add("--max-kv-size", type=int, help="most tokens that a key-value cache of the target keeps (default: all)")
    add("--kv-bits", type=int, help="bits of the target's key-value caches (default: they are not quantized)")
    add(
        "--kv-group-size",
        type=int,
        default=64,
        help="number of values that share a scale in a quantized key-value cache (default: %(default)s)",
    )
    add(
        "--quantized-kv-start",
        type=int,
        default=5000,
        help="number of tokens from which --kv-bits takes effect (default: %(default)s)",
    )
    return parser


def main() -> None:
    """Parse the command line, generate, and exit with 0, or 1 if --compare found other tokens."""
    run_command(make_parser, _run)


def _run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from .api import check_sizes, report, stream_generate
    from .caches.rollback import lengths
    from .caches.saved import load_prompt_cache

    check_sizes(args.max_tokens, args.prefill_step_size)
    check_sampling(args)
    drafting = block_options(args)
    message = read_message(args)
    prompt_cache, metadata = None, None
    if args.prompt_cache_file:
        prompt_cache, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
        if args.model and metadata.get("model") not in (None, args.model):
            raise ValueError(f"{args.prompt_cache_file} was made with {metadata['model']}, not with {args.model}")
    model, tokenizer, draft = load_pair(args, metadata)
    if args.compare and (draft is None or prompt_cache is not None):
        raise ValueError("--compare needs a draft, and a prompt of which no cache holds the beginning")
    prompt = render_prompt(args, tokenizer, message, continues=prompt_cache is not None)
    _check_context(args, model, len(prompt) + max(lengths(prompt_cache or []), default=0))
    options = {name: getattr(args, name) for name in _OPTIONS} | {"sampler": sampler_from(args, tokenizer)}
    make_processors = _processors_from(args, tokenizer, model)
    seed = time.time_ns() % 2**32 if args.seed is None else args.seed

    def run(**more: Any) -> Any:
        mx.random.seed(seed)
        return stream_generate(model, tokenizer, prompt, logits_processors=make_processors(), **options, **more)

    if draft is not None:
        drafting["draft_model"] = draft
    started = time.perf_counter()
    with prefill_bar() as progress:
        tokens, response = stream_text(run(prompt_cache=prompt_cache, prompt_progress_callback=progress, **drafting))
    seconds = time.perf_counter() - started
    if response is not None and (args.verbose or args.stats):
        print(report(response, with_rounds=args.stats), file=sys.stderr)
    if response is None or response.finish_reason is None:
        return 130
    return 0 if not args.compare or compare(run(), tokens, seconds) else 1


def _check_context(args: argparse.Namespace, model: Any, prompt_length: int) -> None:
    """Refuse a prompt that is longer than the model's context, and say so if --max-tokens would pass it."""
    from .models.context_length import context_length, refuse_overlong

    refuse_overlong(model, prompt_length)
    limit = context_length(model)
    if limit is not None and prompt_length + args.max_tokens > limit:
        print(
            f"note: the prompt has {prompt_length} tokens and --max-tokens is {args.max_tokens}; the model's context "
            f"has {limit}",
            file=sys.stderr,
        )


def stream_text(responses: Generator[Any, None, None]) -> tuple[list[int], Any]:
    """Print the text as it comes. Return the tokens and the last response, also after Ctrl-C."""
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
    """Run plain mlx-lm to its end and return whether its tokens are these; print this and the times to stderr.

    plain: responses of mlx-lm without a draft. tokens, seconds: of the run with the draft.
    """
    started = time.perf_counter()
    expected = [response.token for response in plain]
    plain_seconds = time.perf_counter() - started
    verdict = "the same tokens as plain mlx-lm"
    if expected != tokens:
        differing = [i for i, (a, b) in enumerate(zip(expected, tokens)) if a != b]
        first = differing[0] if differing else min(len(expected), len(tokens))
        verdict = f"DIFFERENT from plain mlx-lm from token {first} on"
    times = f"{plain_seconds:.2f} s plain, {seconds:.2f} s with the draft: {plain_seconds / seconds:.2f} x"
    print(f"Compare: {verdict}\nCompare: {times}", file=sys.stderr)
    return expected == tokens


def _processors_from(args: argparse.Namespace, tokenizer: Any, model: Any) -> Callable[[], list[Callable]]:
    """Return a function that makes the logits processors of one run, which --json-schema asks for."""
    if not args.json_schema:
        return list
    from .grammars import Grammars
    from .models.structure import Structure

    text = _schema_text(args.json_schema)
    grammars = Grammars(tokenizer, Structure(model).vocab_size)
    grammars.json_schema(text)
    return lambda: [grammars.json_schema(text)]


def _schema_text(text_or_file: str) -> str:
    """Return the text of a JSON schema, given itself or by the name of its file."""
    name, text = "--json-schema", text_or_file
    if not text.lstrip().startswith(("{", "[", '"')) and text.strip() not in ("true", "false", "null"):
        name = text_or_file
        with open(text_or_file, encoding="utf-8") as file:
            text = file.read()
    try:
        schema = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"{name} must be a JSON object, true or false; got {text.strip()[:60]}")
    return text


def _true_false(text: str) -> bool:
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in ("true", "t", "1")


class _FunctionModule(ModuleType):
    """A module that can be called, so that importing it does not hide the function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """Return the whole text; see mlx_dflash.api.generate."""
        from .api import generate

        return generate(*args, **kwargs)


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__].__class__ = _FunctionModule
