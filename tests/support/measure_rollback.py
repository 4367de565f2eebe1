"""Measure a round on a hybrid target that goes back by the recurrence, and one that puts kept tokens in front.

`python tests/measure_rollback.py` prints the setting, and one JSON line with milliseconds of CPU time a round.
"""

import json
import platform
import time

import mlx_dflash  # noqa: F401  loads a fast BLAS first

import mlx.core as mx  # isort: skip
from mlx_dflash.dice import Dice
from mlx_dflash.session import Session
from mlx_dflash.target import Target
from support import models
from support.oracle import OracleDrafter

SIZES = dict(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=8,
    linear_num_value_heads=8,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=8192,
    full_attention_interval=4,
    max_position_embeddings=4096,
)
PROMPT, NEW_TOKENS, BLOCK, REPEATS = 128, 48, 16, 3


def milliseconds_a_round(model, text, kept, way):
    """CPU and wall time of a round whose drafts are kept as the list says, without prefill and settling."""
    target = Target(model, [0], block_size=BLOCK)
    target._recurrences.works = way == "recurrence"
    drafter = OracleDrafter(text[:PROMPT], text[PROMPT:], kept, BLOCK - 1)
    session = Session(target, drafter, Dice(), max_tokens=NEW_TOKENS, settles=False)
    rounds = session.rounds(mx.array(text[:PROMPT]))
    next(rounds)
    wall, cpu = time.perf_counter(), time.process_time()
    found = [token for r in rounds for token in r.verdict.tokens]
    assert found == text[PROMPT + 1 : PROMPT + NEW_TOKENS], "the text is another"
    n = session.stats.num_rounds
    return 1e3 * (time.process_time() - cpu) / n, 1e3 * (time.perf_counter() - wall) / n


def main():
    model = models.build("qwen3_5", **SIZES)
    text = [(7 * i + i // 10) % 1000 for i in range(PROMPT)]
    target = Target(model, [0])
    target.prefill(mx.array(text[:-1]), lambda features: None)
    for _ in range(NEW_TOKENS + BLOCK):
        logits = target.verify(text[-1], mx.zeros((0,), mx.uint32)).logits
        target.commit(1)
        text.append(mx.argmax(logits[0]).item())
    result = {
        "machine": platform.processor() or platform.machine(),
        "mlx": mx.__version__,
        **SIZES,
        "block": BLOCK,
        "prompt": PROMPT,
    }
    for name, kept in (("keeps 3", [3]), ("keeps 0", [0]), ("keeps all or 5", [15, 5])):
        for way in ("recurrence", "replay"):
            times = sorted(milliseconds_a_round(model, text, kept, way) for _ in range(REPEATS))
            result[f"{name}, {way}"] = [round(cpu, 1) for cpu, _ in times]
            print(
                name,
                way,
                "CPU ms a round:",
                *(f"{cpu:.1f}" for cpu, _ in times),
                "wall:",
                *(f"{wall:.1f}" for _, wall in times),
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
