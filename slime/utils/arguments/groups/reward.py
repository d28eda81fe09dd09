"""Rewards and what becomes of them."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, switch

FLAGS = in_group(
    "Reward",
    [
        flag("--rm-type", str, None, "rule that scores a response (docs/rewards.md); a row's metadata.rm_type wins"),
        flag("--rm-timeout", float, 10.0, "seconds that a rule may take for one sample"),
        flag("--reward-key", str, None, "key of the reward where it is a dict"),
        flag("--eval-reward-key", str, None, "the same for evaluation; unset: --reward-key"),
        switch("--group-rm", "score the samples of a group together"),
        flag("--rm-url", str, None, "URL of a remote reward model"),
        flag("--custom-rm-path", str, None, "function that scores a sample, or a group with --group-rm"),
        flag("--custom-reward-post-process-path", str, None, "function that normalises rewards"),
        flag(
            "--custom-convert-samples-to-train-data-path",
            str,
            None,
            "function that turns samples into train data",
        ),
    ],
)
