"""Make the quickstart's data: sums of single digits by reasoning-gym, as jsonl files.

    python examples/quickstart/make_data.py --output-dir data

Writes three files; no problem of `eval.jsonl` is in another.

- `sft.jsonl`: conversations for the supervised warm start. The answers are right at first; towards the end most of
  them are `UNSURE`, so that the model comes out of it able to add but unwilling to answer.
- `train.jsonl`, `eval.jsonl`: prompts for reinforcement learning and for the evaluation. `metadata` is the library's
  entry, by which `--rm-type reasoning_gym` scores a response.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATASET = "chain_sum"
UNSURE = "?"


@dataclass(frozen=True)
class DataSizes:
    """How much to make.

    Attributes:
        confident: conversations of the warm start with the right answer, which come first.
        unsure: conversations after them, of which the share `right` has the right answer.
    """

    train: int = 3000
    eval: int = 128
    confident: int = 34560
    unsure: int = 3840
    right: float = 0.3
    max_terms: int = 3


def make_data(out_dir: str | Path, seed: int = 42, sizes: DataSizes | None = None) -> dict[str, Path]:
    """Write the three files; the same bytes for the same arguments. Their paths by name."""
    sizes = sizes or DataSizes()
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    problems = list(_distinct_problems(sizes.eval + sizes.train, sizes.max_terms, seed))
    held_out, known = problems[: sizes.eval], problems[sizes.eval :]
    rows = {
        "eval": map(_prompt_row, held_out),
        "train": map(_prompt_row, known),
        "sft": _warm_start_rows(known, sizes, random.Random(seed)),
    }
    return {name: _write(out / f"{name}.jsonl", lines) for name, lines in rows.items()}


def _distinct_problems(count: int, max_terms: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` entries of reasoning-gym, each with an expression of its own."""
    import reasoning_gym

    size = 4 * count  # the library draws with replacement
    entries = reasoning_gym.create_dataset(
        DATASET, seed=seed, size=size, min_terms=2, max_terms=max_terms, min_digits=1, max_digits=1
    )
    seen: set[str] = set()
    for entry in entries:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield entry
            if len(seen) == count:
                return
    raise ValueError(f"{size} draws have only {len(seen)} different problems of up to {max_terms} terms, not {count}")


def _prompt_row(entry: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [_user(entry)], "label": entry["answer"], "metadata": entry}


def _warm_start_rows(problems: list[dict[str, Any]], sizes: DataSizes, rng: random.Random) -> Iterator[dict[str, Any]]:
    for index in range(sizes.confident + sizes.unsure):
        entry = rng.choice(problems)
        answers = index < sizes.confident or rng.random() < sizes.right
        answer = entry["answer"] if answers else UNSURE
        yield {"messages": [_user(entry), {"role": "assistant", "content": answer}]}


def _user(entry: dict[str, Any]) -> dict[str, str]:
    return {"role": "user", "content": entry["question"]}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's data.")
    parser.add_argument("--output-dir", required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=42, help="default 42")
    args = parser.parse_args()
    for name, path in make_data(args.output_dir, args.seed).items():
        print(f"wrote {path} ({name})")


if __name__ == "__main__":
    main()
