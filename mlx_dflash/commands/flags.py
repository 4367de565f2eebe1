"""The command line of mlx_dflash.generate: mlx-lm's flags, text on stdout, everything else on stderr."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROGRESS_FROM = 1024  # prompt tokens
NO_DRAFT = "none"


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


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="target: a folder or hub repository (default: the demo pair)")
    add(
        "--draft-model",
        help=f"DFlash draft of the target: a folder or hub repository; {NO_DRAFT!r} generates without one",
    )
    add(
        "--block-size",
        type=block_size,
        metavar="N",
        help="tokens of a block, anchor included, or 'auto' for what proves fastest (default)",
    )
    add("--num-draft-tokens", type=int, help="mlx-lm's way to say block size - 1")
    add("--adapter-path", help="LoRA adapters of the target")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
    add("--quantize-activations", "-qa", action="store_true", help="quantize the target's activations like its layers")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", "-p", default="hello", help="the message; '-' reads it from stdin")
    add("--prompt-file", help="read the message from this file")
    add("--system-prompt", help="system message for the chat template")
    add("--prefill-response", help="beginning of the answer")
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add("--use-default-chat-template", action="store_true", help="use the tokenizer's default chat template")
    add("--chat-template-config", type=json.loads, default={}, help="JSON object of options for the chat template")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        help="most tokens to generate, -1 for no limit (default: %(default)s)",
    )
    add_filter_flags(parser)
    add("--xtc-probability", type=float, default=0.0, help="how often to exclude top choices (default: never)")
    add("--xtc-threshold", type=float, default=0.0, help="probability from which on a token is a top choice")
    add("--min-tokens-to-keep", type=int, default=1, help="least tokens that min-p keeps (default: %(default)s)")
    add("--seed", type=int, help="seed of the random numbers (default: a new one each time)")
    add("--stop-strings", nargs="+", default=(), help="end the text before the first of these")


def add_filter_flags(parser: argparse._ActionsContainer) -> None:
    """What a server takes, too, for requests that do not say."""
    add = parser.add_argument
    add("--temp", type=float, default=0.0, help="temperature; 0 is greedy (default)")
    add("--top-p", type=float, default=1.0, help="nucleus sampling (default: off)")
    add("--min-p", type=float, default=0.0, help="least probability relative to the likeliest token (default: off)")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens (default: off)")


def block_size(text: str) -> int | str:
    """A number, or "auto"; ValueError otherwise."""
    return text if text == "auto" else int(text)


def block_options(args: argparse.Namespace) -> dict[str, Any]:
    """What --block-size and --num-draft-tokens ask of stream_generate; ValueError for both, or without a draft."""
    if args.draft_model == NO_DRAFT:
        if args.block_size is not None or args.num_draft_tokens is not None:
            raise ValueError("--block-size and --num-draft-tokens need a draft")
        return {}
    if args.num_draft_tokens is None:
        return {"block_size": "auto" if args.block_size is None else args.block_size}
    if args.block_size is not None:
        raise ValueError("give --block-size or --num-draft-tokens, not both")
    return {"num_draft_tokens": args.num_draft_tokens}


def _true_false(text: str) -> bool:
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in ("true", "t", "1")


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors of the user's into one line on stderr and exit status 2, Ctrl-C into status 130."""
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def load_pair(args: argparse.Namespace, metadata: dict[str, str] | None = None) -> tuple[Any, Any, Any]:
    """Load what --model and --draft-model name. Returns (model, tokenizer, draft or None)."""
    from ..checkpoints.drafts import load, load_draft
    from ..checkpoints.known_pairs import find_draft

    name = args.model or (metadata or {}).get("model") or "demo"
    draft_name = args.draft_model or find_draft(name)
    if draft_name is None:
        raise ValueError(
            f"no public DFlash draft is known for {name}; give --draft-model, or --draft-model {NO_DRAFT} to generate without one"
        )
    tokenizer_config = {
        "trust_remote_code": args.trust_remote_code,
        **json.loads((metadata or {}).get("tokenizer_config", "{}")),
    }
    model, tokenizer = load(
        name,
        tokenizer_config=tokenizer_config,
        model_config={"quantize_activations": args.quantize_activations},
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    return model, tokenizer, None if draft_name == NO_DRAFT else load_draft(draft_name)


def read_message(args: argparse.Namespace) -> str:
    """The prompt's text, from the argument, a file or stdin."""
    if args.prompt_file:
        with open(args.prompt_file) as file:
            return file.read()
    if args.prompt == "-":
        return sys.stdin.read()
    return args.prompt.replace("\\n", "\n").replace("\\t", "\t")


def render_prompt(args: argparse.Namespace, tokenizer: Any, message: str, continues: bool) -> list[int]:
    """The prompt's ids, through the chat template unless told otherwise.

    continues: the conversation's beginning is in a cache, so only what follows it is rendered.
    """
    if args.use_default_chat_template and not tokenizer.has_chat_template:
        raise ValueError("this tokenizer has no chat template, and this version of transformers no default one")
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        if args.system_prompt or args.prefill_response:
            raise ValueError("--system-prompt and --prefill-response need a chat template")
        return tokenizer.encode(message)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages.append({"role": "user", "content": message})
    if args.prefill_response:
        messages.append({"role": "assistant", "content": args.prefill_response})

    def render() -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=bool(args.prefill_response),
            add_generation_prompt=not args.prefill_response,
            **args.chat_template_config,
        )

    text = render()
    if continues:
        user = next(m for m in messages if m["role"] == "user")
        user["content"] = "<query>"
        text = text[render().index("<query>") :]
    return tokenizer.encode(text, add_special_tokens=False)


def sampler_from(args: argparse.Namespace, tokenizer: Any) -> Callable:
    """The sampler that the sampling flags ask for, as mlx_lm.generate makes it."""
    from mlx_lm.sample_utils import make_sampler

    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        args.top_k,
        args.xtc_probability,
        args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )


def processors_from(args: argparse.Namespace, tokenizer: Any, model: Any) -> Callable[[], list[Callable]]:
    """Makes the logits processors that --json-schema asks for, new ones for each run."""
    if not args.json_schema:
        return list
    from ..grammars import Grammars
    from ..target import Structure

    text = args.json_schema
    if not text.lstrip().startswith(("{", "true", "false")):
        with open(text) as file:
            text = file.read()
    grammars = Grammars(tokenizer, Structure(model).vocab_size)
    grammars.json_schema(text)
    return lambda: [grammars.json_schema(text)]


@contextmanager
def prefill_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress callback that draws a bar on stderr for long prompts, if somebody watches."""
    from tqdm import tqdm

    bar = None

    def progress(processed: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                total=total,
                desc="Reading the prompt",
                unit="token",
                leave=False,
                disable=total < PROGRESS_FROM or not sys.stderr.isatty(),
            )
        bar.update(processed - bar.n)
        if processed == total:
            bar.close()

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()


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

    from ..api import check_sizes, report, stream_generate
    from ..caches.saved import load_prompt_cache

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
