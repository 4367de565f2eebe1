"""Text that must be JSON of a schema, drafted all the same. Run: python examples/structured_output.py"""

import json

from mlx_dflash import generate, load, load_draft
from mlx_dflash.grammars import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "capital": {"type": "string", "maxLength": 20},
        "is_island": {"type": "boolean"},
    },
    "required": ["name", "capital", "is_island"],
    "additionalProperties": False,
}
model, tokenizer = load("demo")
draft = load_draft("demo")
grammars = Grammars(tokenizer, model.args.vocab_size)
messages = [{"role": "user", "content": "Describe France as JSON with name, capital and is_island."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
text = generate(
    model, tokenizer, prompt, max_tokens=80, draft_model=draft, logits_processors=[grammars.json_schema(SCHEMA)]
)
print(json.dumps(json.loads(text), indent=2))
