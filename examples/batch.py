"""Answer the prompts of a file, one a line, and write JSON lines.

Run: python examples/batch.py [prompts.txt] > answers.jsonl
"""

import json
import sys

from mlx_dflash import load, load_draft, stream_generate

prompts = open(sys.argv[1]).read().splitlines() if len(sys.argv) > 1 else ["Name a colour.", "Name a river."]
model, tokenizer = load("demo")
draft = load_draft("demo")
for prompt in filter(None, prompts):
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, tokens, max_tokens=32, draft_model=draft))
    text, stats = "".join(r.text for r in responses), responses[-1].stats
    print(
        json.dumps(
            {"prompt": prompt, "answer": text, "tokens": len(responses), "acceptance_length": stats.acceptance_length}
        ),
        flush=True,
    )
