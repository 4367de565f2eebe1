"""Two turns of a chat that share one prompt cache: the second reads only its own tokens.

Run: python examples/chat_turns.py
"""

from mlx_dflash import load, load_draft, make_prompt_cache, stream_generate

model, tokenizer = load("demo")
draft = load_draft("demo")
cache = make_prompt_cache(model, draft)  # the target's caches, followed by the draft's

questions = ["My name is Ada. Say hello to me.", "What is my name?"]
for turn, question in enumerate(questions):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    if turn:
        # The template begins every conversation with a system message; this one goes on.
        text = "\n" + text[text.index("<|im_start|>user") :]
    prompt = tokenizer.encode(text, add_special_tokens=False)
    print(f"> {question}")
    for response in stream_generate(model, tokenizer, prompt, max_tokens=48, draft_model=draft, prompt_cache=cache):
        print(response.text, end="", flush=True)
    print(f"\n[read {response.prompt_tokens} tokens, the caches cover {cache[0].offset}]\n")
