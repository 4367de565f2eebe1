"""Ask a server through the openai package. Run: python examples/openai_client.py [http://127.0.0.1:8080/v1]

Without an address it starts a server of its own, with the demo pair.
"""

import sys
import threading

from openai import OpenAI


def start_server() -> str:
    from mlx_dflash.server.__main__ import make_parser, make_server

    httpd, generator = make_server(make_parser().parse_args(["--port", "0"]))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    stops.extend([httpd.shutdown, generator.stop_and_join])
    return f"http://127.0.0.1:{httpd.server_port}/v1"


stops = []
client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else start_server(), api_key="none")
chunks = client.chat.completions.create(
    model="default_model",
    messages=[{"role": "user", "content": "Name three rivers."}],
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in chunks:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
usage = chunk.usage
print(
    f"\n{usage.completion_tokens} tokens in {usage.completion_tokens_details.rounds} rounds, "
    f"{usage.prompt_tokens_details.cached_tokens} prompt tokens from the cache"
)
for stop in stops:
    stop()
