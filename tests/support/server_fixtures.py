"""Servers over the tiny pair, ours and mlx-lm's, each in threads of this process."""

import threading
import time
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator
from openai import OpenAI

from mlx_dflash.server.__main__ import make_parser, make_server


@contextmanager
def our_server(pair, *flags):
    """Yields (client, worker) for a pair of paths; "none" for the draft serves the target alone.

    The block size is fixed: a measured one would differ from run to run.
    """
    block = [] if str(pair[1]) == "none" else ["--block-size", "6"]
    args = make_parser().parse_args(
        ["--model", str(pair[0]), "--draft-model", str(pair[1]), "--port", "0", *block, *flags]
    )
    httpd, worker = make_server(args)
    with _served(httpd, worker):
        yield (
            OpenAI(
                base_url=f"http://127.0.0.1:{httpd.server_port}/v1",
                api_key=args.api_key or "none",
                max_retries=0,
                timeout=60,
            ),
            worker,
        )


@contextmanager
def mlx_lm_server(pair):
    """Yields a client of mlx-lm's own server, without a draft."""
    args = make_parser().parse_args(["--model", str(pair[0]), "--port", "0"])
    args.pipeline, args.use_default_chat_template, args.kv_bits = False, False, None
    args.num_draft_tokens, args.kv_group_size, args.quantized_kv_start = 3, 64, 5000
    args.decode_concurrency = args.prompt_concurrency = 1
    generator = ResponseGenerator(ModelProvider(args), LRUPromptCache(10))
    httpd = ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a, **k: APIHandler(generator, *a, system_fingerprint="fp", **k)
    )
    with _served(httpd, generator):
        yield OpenAI(base_url=f"http://127.0.0.1:{httpd.server_port}/v1", api_key="none", max_retries=0, timeout=60)


@contextmanager
def _served(httpd, generator):
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        httpd.shutdown()
        httpd.server_close()
        generator.stop_and_join()


def wait_until(condition, seconds=30):
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
