"""A chat in a few lines: type, read, Ctrl-D leaves. Each turn reads only what its caches lack.

Run: python examples/chat_loop.py
"""

import sys

from mlx_dflash import load, load_draft
from mlx_dflash.chat.conversation import Conversation
from mlx_dflash.chat.settings import Settings

model, tokenizer = load("demo")
conversation = Conversation(model, tokenizer, load_draft("demo"), settings=Settings(temp=0.7, max_tokens=200))

print("> ", end="", flush=True)
for line in sys.stdin:
    for _, text in conversation.ask(line.strip()):
        print(text, end="", flush=True)
    turn = conversation.turn
    print(
        f"\n[{turn.num_cached} tokens were in the caches, {turn.num_read} read, {len(turn.tokens)} written]\n> ",
        end="",
        flush=True,
    )
print()
