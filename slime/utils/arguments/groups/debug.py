"""Running parts alone, dumps, checks."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, non_negative_int, positive_int, switch
from slime.utils.arguments.groups.pending import DEBUGGING

FLAGS = in_group(
    "Debugging",
    [
        flag("--train-backend", str, "megatron", "the trainer", choices=("megatron",)),
        switch("--debug-rollout-only", "engines and rollouts, no trainer"),
        switch("--debug-train-only", "trainer only, no engines"),
        flag(
            "--load-debug-rollout-data",
            str,
            None,
            "train on dumped rollouts: a path with {rollout_id} in it; implies --debug-train-only",
        ),
        flag("--load-debug-rollout-data-subsample", float, None, "fraction of a dump to use, from both ends"),
        flag("--save-debug-rollout-data", str, None, "dump each rollout: a path with {rollout_id} in it"),
        flag(
            "--save-debug-train-data",
            str,
            None,
            "dump train data: a path with {rollout_id} and {rank} in it",
        ),
        flag("--dump-details", str, None, "folder for both dumps and the tokenizer"),
        flag(
            "--load-forge-rollout-data",
            str,
            None,
            "dump that the rollout function slime.rollout.forge_load.generate_rollout replays while engines run",
        ),
        flag("--memory-snapshot-dir", str, ".", "folder of memory snapshots", pending=DEBUGGING),
        flag("--memory-snapshot-num-steps", positive_int, None, "last rollout to record", pending=DEBUGGING),
        flag(
            "--profile-target",
            str,
            ["train_overall"],
            "what to profile",
            nargs="+",
            choices=("train_overall", "train_actor", "train_log_probs"),
        ),
        switch("--use-pytorch-profiler", "write traces of PyTorch's profiler to {log_dir}/profile"),
        flag("--profile-step-start", non_negative_int, 10, "first rollout to profile"),
        flag("--profile-step-end", non_negative_int, 12, "rollout before which profiling ends"),
        flag("--profile-ranks", non_negative_int, [0], "trainer ranks to profile", nargs="+"),
        flag("--memory-recorder", str, "torch", "snapshot tool", choices=("torch", "memray"), pending=DEBUGGING),
        switch("--record-memory-history", "record memory from the start", pending=DEBUGGING),
        switch("--ci-test", "assert what must hold of every training step"),
        switch("--ci-disable-kl-checker", "without the assertions that the first KL is zero"),
        flag(
            "--ci-train-rollout-logprob-abs-diff-threshold",
            float,
            0.1,
            "largest mean difference between trainer's and engine's log-probs under --ci-test",
        ),
        flag(
            "--ci-save-grad-norm",
            str,
            None,
            "write gradient norms: a path with {role}, {rollout_id}, {step_id}",
        ),
        flag("--ci-load-grad-norm", str, None, "compare gradient norms with that file (1 %)"),
    ],
)
