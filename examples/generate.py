"""Generate with the demo pair and print what the rounds did. Run: python examples/generate.py"""

from mlx_dflash import load, load_draft, stream_generate

model, tokenizer = load("demo")  # or any model of mlx-lm: a folder or a hub repository
draft = load_draft("demo")  # or its DFlash draft, as published

messages = [{"role": "user", "content": "Name three primary colours."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

for response in stream_generate(model, tokenizer, prompt, max_tokens=64, draft_model=draft):
    print(response.text, end="", flush=True)
print()
stats = response.stats
print(
    f"{response.generation_tokens} tokens in {stats.num_rounds} rounds, acceptance length {stats.acceptance_length:.2f}"
)
