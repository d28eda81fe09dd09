"""Does an exported model, in transformers, give the greedy answers that the engine gave with the same weights?

    python examples/smollm2/check_export.py --model HF --answers rollouts/eval_3.pt

`--answers` is a dump of an evaluation at temperature 0 (`--save-debug-rollout-data`). Exits with 1 if any differs.
"""

from __future__ import annotations

import argparse
from typing import Any


def greedy(model: Any, tokenizer: Any, prompt: list[int], count: int) -> list[int]:
    """The `count` most likely next tokens, or fewer if the model ends its turn."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def differing(model: Any, tokenizer: Any, samples: list[dict[str, Any]]) -> list[str]:
    """One line for each sample whose answer differs."""
    lines = []
    for sample in samples:
        length = sample["response_length"]
        prompt, answer = sample["tokens"][:-length], sample["tokens"][-length:]
        again = greedy(model, tokenizer, prompt, length)
        if again != answer:
            lines.append(f"engine {tokenizer.decode(answer)!r}, transformers {tokenizer.decode(again)!r}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--answers", required=True, help="dump of the engine's answers")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    samples = torch.load(args.answers, weights_only=False)["samples"]
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    lines = differing(model, AutoTokenizer.from_pretrained(args.model), samples)
    print(f"{len(samples) - len(lines)} of {len(samples)} greedy answers are the engine's, token for token")
    for line in lines:
        print(line)
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
