"""`python -m mlx_dflash.server`: flags, loading, serving."""

import argparse
import json
import logging
import sys
from http.server import ThreadingHTTPServer
from typing import Any

from ..commands.errors import user_errors
from ..commands.flags import add_filter_flags, add_model_flags, block_options


def make_parser() -> argparse.ArgumentParser:
    """The flags of mlx_lm.server that a draft leaves a meaning to, and ours."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash.server",
        description="Serve the OpenAI API with a target and its draft; the demo pair without --model.",
    )
    add_model_flags(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine only)")
    add("--port", type=int, default=8080, help="port to listen at (default: %(default)s)")
    add(
        "--allowed-origins",
        type=lambda text: text.split(","),
        default="*",
        help="origins that a browser may ask from (default: all)",
    )
    add("--api-key", help="key that clients must send (default: none needed)")
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
    add("--chat-template", default="", help="chat template instead of the tokenizer's")
    add("--chat-template-args", type=json.loads, default={}, help="JSON object of options for the chat template")
    add_filter_flags(parser.add_argument_group("sampling", "where a request does not say"))
    add(
        "--max-tokens",
        type=int,
        default=512,
        help="tokens of an answer where a request names no number (default: %(default)s)",
    )
    add(
        "--max-tokens-limit",
        type=int,
        default=32768,
        help="most tokens that a request may ask for (default: %(default)s)",
    )
    add("--max-body-bytes", type=int, default=8 << 20, help="longest body of a request (default: %(default)s)")
    add("--max-queue", type=int, default=64, help="most requests that wait for their turn (default: %(default)s)")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at a time (default: %(default)s)")
    add(
        "--prompt-cache-size",
        type=int,
        default=10,
        help="most conversations kept in the prompt cache (default: %(default)s)",
    )
    add("--prompt-cache-bytes", type=int, default=1 << 63, help="most bytes of the prompt cache (default: no limit)")
    # mlx-lm's pieces ask for these; there is nothing to choose.
    parser.set_defaults(pipeline=False, use_default_chat_template=False, kv_bits=None)
    return parser


def make_server(args: argparse.Namespace) -> tuple[ThreadingHTTPServer, Any]:
    """Load the pair and open the port. Returns the HTTP server, not serving yet, and what generates.

    Raises ValueError or OSError for what is wrong with the flags or the pair.
    """
    from mlx_lm.models.cache import LRUPromptCache
    from mlx_lm.server import get_system_fingerprint

    from .generator import Generator
    from .handler import Handler
    from .metrics import Metrics
    from .provider import Provider

    block_options(args)
    for name in ("max_tokens", "max_tokens_limit", "max_body_bytes", "prefill_step_size", "prompt_cache_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    fingerprint = get_system_fingerprint()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def finish_request(self, request, client_address):
            Handler(generator, request, client_address, self, system_fingerprint=fingerprint)

        def handle_error(self, request, client_address):
            logging.debug("a connection failed", exc_info=True)

    httpd = Server((args.host, args.port), Handler)
    generator = Generator(
        Provider(args), LRUPromptCache(args.prompt_cache_size, args.prompt_cache_bytes), Metrics(), args.max_queue
    )
    try:
        generator.loaded.result()
    except BaseException:
        httpd.server_close()
        generator.stop_and_join()
        raise
    return httpd, generator


def main() -> None:
    args = make_parser().parse_args()
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    with user_errors():
        try:
            httpd, generator = make_server(args)
        except OSError as error:
            raise ValueError(f"cannot listen at {args.host}:{args.port}: {error}") from error
        print(
            f"serving {generator.model_provider.name} at http://{args.host}:{httpd.server_port}/v1",
            file=sys.stderr,
            flush=True,
        )
        try:
            httpd.serve_forever()
        except KeyboardInterrupt:
            print("\nstopping", file=sys.stderr)
        finally:
            httpd.server_close()
            generator.stop_and_join()


if __name__ == "__main__":
    main()
