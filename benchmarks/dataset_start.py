"""Seconds and memory until a large prompt file hands out its first shuffled batch.

    python benchmarks/dataset_start.py --rows 1000000

Writes jsonl (and parquet) of that many rows of about 300 bytes into a temporary folder, then opens each in a fresh
process with shuffle, a length limit and the tokenizer of `--tokenizer` (default: a byte tokenizer), takes 128 prompts,
and prints the wall seconds and the largest resident set, imports not counted in the seconds but in the memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = 128


def write_rows(folder: Path, count: int) -> list[Path]:
    """A jsonl and a parquet file of the same rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    jsonl, parquet = folder / "prompts.jsonl", folder / "prompts.parquet"
    writer = None
    with jsonl.open("w") as lines:
        for first in range(0, count, 50_000):
            rows = [_row(i) for i in range(first, min(first + 50_000, count))]
            lines.writelines(json.dumps(row) + "\n" for row in rows)
            table = pa.Table.from_pylist(rows)
            writer = writer or pq.ParquetWriter(parquet, table.schema)
            writer.write_table(table)
    if writer is not None:
        writer.close()
    return [jsonl, parquet]


def _row(number: int) -> dict[str, Any]:
    words = " ".join(str(number * 7919 % (p + 1)) for p in range(1000, 1040))
    return {"prompt": f"What is the sum of {words}?", "label": str(number), "metadata": {"number": number}}


def measure(path: str, tokenizer: str | None) -> None:
    """In a process of its own: open, shuffle, take a batch."""
    from slime.rollout.prompt_sources import PromptCursor
    from slime.utils.data import Dataset

    loaded = _tokenizer(tokenizer)
    began = time.monotonic()
    dataset = Dataset(path, loaded, None, 4096, prompt_key="prompt", label_key="label")
    cursor = PromptCursor("prompts", dataset, 1.0, shuffle=True)
    opened = time.monotonic()
    prompts = cursor.take(BATCH)
    done = time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert len(prompts) == BATCH
    print(
        f"{Path(path).name}: {len(dataset)} rows, {Path(path).stat().st_size / 2**20:.0f} MiB: open and shuffle"
        f" {opened - began:.2f} s, first {BATCH} prompts {done - opened:.2f} s, peak memory {peak:.2f} GiB"
    )


def _tokenizer(name: str | None) -> Any:
    if name is None:
        from tests.support.toy_tokenizer import byte_tokenizer

        return byte_tokenizer()
    from slime.utils.processing_utils import load_tokenizer

    return load_tokenizer(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", help="a Hugging Face folder")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.tokenizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in write_rows(Path(folder), options.rows):
            extra = ["--tokenizer", options.tokenizer] if options.tokenizer else []
            subprocess.run([sys.executable, __file__, "--measure", str(path), *extra], check=True)


if __name__ == "__main__":
    main()
