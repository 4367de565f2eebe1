"""Watch the rounds themselves: what is proposed, kept and refused. Run: python examples/watch_rounds.py"""

from itertools import islice

import mlx.core as mx

from mlx_dflash import Pair, load, load_draft, open_session

model, tokenizer = load("demo")
draft = load_draft("demo")
prompt = mx.array(
    tokenizer.apply_chat_template([{"role": "user", "content": "Count from one to ten."}], add_generation_prompt=True)
)
session = open_session(Pair(model, draft), prompt, stop_tokens=tokenizer.eos_token_ids)

for number, done in enumerate(islice(session.rounds(prompt), 8)):
    kept = [tokenizer.decode([token]) for token in done.verdict.kept]
    print(
        f"round {number}: {len(done.drafts)} drafts, kept {kept}, "
        f"then the target's own {tokenizer.decode([done.verdict.next_token])!r}"
    )
    assert session.target.length == session.drafter.context_length
