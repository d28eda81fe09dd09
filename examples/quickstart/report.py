"""Say in words and in a picture what a quickstart run did; exit status 1 when the reward did not rise as it should.

python examples/quickstart/report.py --log-dir outputs/quickstart/grpo-log --output-dir outputs/quickstart
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

EVAL_METRIC = "eval/heldout"
TRAIN_METRIC = "rollout/raw_reward"
START_BELOW = 0.4
END_ABOVE = 0.8


def read_series(path: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, in the order in which it was logged."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def evaluations(path: Path) -> list[tuple[int, float]]:
    """(rollouts trained on, mean reward on the held-out problems); the first evaluation comes before any training."""
    (_, before), *later = read_series(path, EVAL_METRIC) or [(0, float("nan"))]
    return [(0, before), *((rollout_id + 1, reward) for rollout_id, reward in later)]


def draw(path: Path, train: list[tuple[int, float]], heldout: list[tuple[int, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(*zip(*train, strict=True), color="tab:gray", label="training prompts")
    axes.plot(*zip(*heldout, strict=True), color="tab:green", marker="o", label="held-out problems")
    axes.axhline(START_BELOW, color="tab:red", linewidth=0.5)
    axes.axhline(END_ABOVE, color="tab:red", linewidth=0.5)
    axes.set(
        xlabel="rollouts trained on", ylabel="mean reward", ylim=(0, 1), title="GRPO on sums, a tiny Qwen3 on the CPU"
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()

    metrics = args.log_dir / "metrics.jsonl"
    train, heldout = read_series(metrics, TRAIN_METRIC), evaluations(metrics)
    if not train or len(heldout) < 2:
        print(f"{metrics} has no {EVAL_METRIC} or no {TRAIN_METRIC}: the run did not get that far", file=sys.stderr)
        return 1
    picture = args.output_dir / "reward.png"
    draw(picture, train, heldout)
    (_, before), (_, after) = heldout[0], heldout[-1]
    print(
        f"Before GRPO the model solved {before:.0%} of the problems that it was never trained on; "
        f"after {len(train)} rollouts it solves {after:.0%}.\n"
        f"The curve is in {picture}, every metric in {metrics}."
    )
    if before >= START_BELOW or after <= END_ABOVE:
        print(
            f"That is not what the quickstart is meant to show: a mean reward from under {START_BELOW} "
            f"to over {END_ABOVE}. Please report it with {args.log_dir}.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
