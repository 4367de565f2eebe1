"""`python -m mlx_dflash.server`: the flags, and the start and the end of the server.

Knows argparse; what the flags mean is known where they are used.
"""

import argparse
import logging
import signal
import sys
from typing import TYPE_CHECKING

from ..commands.errors import Parser, run_command
from ..commands.flags import add_filter_flags, add_model_flags
from ..commands.sampling import check_numbers
from ..files.json_text import parse_json

if TYPE_CHECKING:
    from .handler import Server
    from .worker import Worker

# Service managers kill a process about ten seconds after they asked it to end.
_GRACE_SECONDS = 6.0
_WRITING_SECONDS = 2.0  # for what was generated to reach the clients


def make_parser() -> argparse.ArgumentParser:
    """Make the parser: the flags of mlx_lm.server that have a meaning with a draft, and our own."""
    parser = Parser(
        prog="mlx_dflash.server",
        description="Serve the OpenAI API with a target and its draft; without --model, with the demo pair.",
    )
    add_model_flags(parser)
    add = parser.add_argument

    def number(flag: str, default: int, what: str) -> None:
        add(flag, type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)")

    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, for this machine only)")
    add("--port", type=int, default=8080, help="port to listen on (default: %(default)s)")
    add(
        "--allowed-origins",
        type=lambda text: text.split(","),
        default="*",
        metavar="ORIGIN,...",
        help="web pages from which a browser may ask, by their origins (default: all)",
    )
    add("--api-key", metavar="KEY", help="key that clients must send (default: clients need none)")
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    add("--log-level", default="INFO", choices=levels, help="least level of what is logged (default: %(default)s)")
    add("--chat-template", default="", help="chat template to use instead of the tokenizer's")
    add("--chat-template-args", type=_json_object, default={}, help="JSON object of options for the chat template")
    add_filter_flags(parser.add_argument_group("sampling", "for requests that do not say otherwise"))
    number("--max-tokens", 512, "length of an answer in tokens, for requests that do not say otherwise")
    number("--max-tokens-limit", 32768, "longest answer that a request may ask for, in tokens")
    number("--max-body-bytes", 8 << 20, "longest body of a request, in bytes")
    number("--max-queue", 64, "most requests that wait while one is being answered")
    number("--prefill-step-size", 2048, "number of prompt tokens that are processed at a time")
    number("--prompt-cache-size", 10, "most conversations that the prompt cache keeps")
    add(
        "--prompt-cache-bytes",
        type=int,
        default=1 << 63,
        metavar="N",
        help="most bytes that the prompt cache keeps (default: no limit)",
    )
    return parser


def _json_object(text: str) -> dict:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got text that is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value


def make_server(args: argparse.Namespace) -> tuple["Server", "Worker"]:
    """Open the port and load the pair. Returns the HTTP server, which does not serve yet, and the running worker.

    Raises ValueError or OSError for what is wrong with the flags or the pair.
    """
    from .generator import Generator
    from .handler import Server
    from .metrics import Metrics
    from .worker import Worker

    for name in ("max_tokens", "max_tokens_limit", "max_body_bytes", "prefill_step_size", "prompt_cache_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.max_queue < 0:
        raise ValueError(f"--max-queue must be at least 0, got {args.max_queue}")
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port must be a number from 0 to {(1 << 16) - 1}, got {args.port}")
    check_numbers({"--temp": args.temp, "--top-p": args.top_p, "--min-p": args.min_p, "--top-k": args.top_k})
    metrics = Metrics()
    worker = Worker(Generator(args, metrics), metrics, args.max_queue)
    try:
        httpd = Server(args, worker)
    except OSError as error:
        raise ValueError(f"cannot listen at {args.host}:{args.port}: {error}") from error
    try:
        worker.start()
    except BaseException:
        httpd.server_close()
        raise
    return httpd, worker


def main() -> None:
    """Serve until Ctrl-C, or until the system asks the process to end."""
    run_command(make_parser, _serve)


def _serve(args: argparse.Namespace) -> None:
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    httpd, worker = make_server(args)
    try:
        print(f"serving {worker.generator.provider.name} at {httpd.url}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        httpd.serve_forever()
    except KeyboardInterrupt:
        print("\nstopping", file=sys.stderr)
    finally:
        stop(httpd, worker, _GRACE_SECONDS)


def stop(httpd: "Server", worker: "Worker", grace: float) -> None:
    """Accept no more, and end what runs. grace: seconds that the running answer has left before it is an error."""
    httpd.server_close()
    worker.stop_and_join(grace)
    httpd.wait_until_idle(_WRITING_SECONDS)


if __name__ == "__main__":
    main()
