"""Sums by reasoning-gym for a small chat model: each prompt shows two solved ones first, answered in a form that the
model follows often, but not always.

    python examples/smollm2/make_data.py --output-dir data

Writes `train.jsonl` and `eval.jsonl`, which share no problem. `metadata` is the library's entry, by which
`--rm-type reasoning_gym` scores a response.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EVAL, TRAIN, SHOTS = 16, 60, 2


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different sums of two digits."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=1000, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    sums = {entry["question"]: entry for entry in entries if "+" in entry["question"]}
    return list(sums.values())[:count]


def row(entry: dict[str, Any], shots: list[dict[str, Any]]) -> dict[str, Any]:
    messages = []
    for shot in shots:
        messages += [
            {"role": "user", "content": shot["question"]},
            {"role": "assistant", "content": f"{shot['metadata']['expression']} = <answer>{shot['answer']}</answer>"},
        ]
    return {
        "prompt": [*messages, {"role": "user", "content": entry["question"]}],
        "label": entry["answer"],
        "metadata": entry,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    entries = problems(SHOTS + EVAL + TRAIN, args.seed)
    shots, held_out, known = entries[:SHOTS], entries[SHOTS : SHOTS + EVAL], entries[SHOTS + EVAL :]
    for name, part in (("eval", held_out), ("train", known)):
        path = args.output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row(entry, shots)) + "\n" for entry in part))
        print(f"wrote {path}: {len(part)} problems")


if __name__ == "__main__":
    main()
