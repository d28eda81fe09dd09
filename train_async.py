"""Asynchronous training, one step off-policy: the next rollout is generated while the trainers learn from the last."""

from __future__ import annotations

import sys

from slime.utils.arguments import parse_args


def main() -> None:
    parse_args()
    sys.exit("slime: error: train_async.py: disaggregated, asynchronous training is not available yet; run train.py")


if __name__ == "__main__":
    main()
