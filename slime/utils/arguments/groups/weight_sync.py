"""How trained weights reach the engines."""

from __future__ import annotations

from slime.utils.arguments.flag import flag, in_group, positive_int, switch
from slime.utils.arguments.groups.pending import DISAGGREGATED

_MIB = 1024 * 1024

FLAGS = in_group(
    "Weight sync",
    [
        flag(
            "--update-weight-mode",
            str,
            "full",
            "full: every tensor at each sync; delta: changed bytes only",
            choices=("full", "delta"),
        ),
        flag(
            "--update-weight-transport",
            str,
            "nccl",
            "nccl: collectives (shared memory when colocated); disk: checkpoints in a shared folder",
            choices=("nccl", "disk"),
        ),
        flag("--update-weight-buffer-size", positive_int, 512 * _MIB, "bytes of one bucket of weights"),
        flag(
            "--update-weight-timeout",
            float,
            600.0,
            "seconds that an engine has to load a bucket of weights, or a checkpoint from disk",
        ),
        flag("--update-weights-interval", positive_int, 1, "sync every N rollouts (asynchronous driver)"),
        flag(
            "--pause-generation-mode",
            str,
            "retract",
            "requests that run while weights are replaced: retract: go on with new weights and a new KV cache; "
            "in_place: go on with the old KV cache; abort: end as aborted",
            choices=("retract", "in_place", "abort"),
        ),
        switch(
            "--release-train",
            "end the training actors after each step and rebuild them from --save before the next",
            pending=DISAGGREGATED,
        ),
        flag("--update-weight-disk-dir", str, None, "shared folder for disk syncs"),
        switch("--update-weight-disk-keep-files", "keep what the engines have loaded from the shared folder"),
        flag(
            "--update-weight-delta-encoding",
            str,
            "xor",
            "form of a byte delta",
            choices=("xor", "overwrite"),
        ),
        flag(
            "--update-weight-delta-checksum",
            str,
            "xxh3-128",
            "digest of each tensor's new bytes",
            choices=("xxh3-128", "blake3", "adler32"),
        ),
        flag(
            "--custom-update-weight-post-write-path",
            str,
            None,
            "hook after the files of a disk sync are written",
        ),
        flag(
            "--update-weight-local-checkpoint-dir",
            str,
            None,
            "folder on each engine's host that disk syncs are copied to and deltas applied to; engines load it",
        ),
        switch(
            "--check-weight-update-equal",
            "overwrite the engines' weights at the start, sync once, and compare them with the trainer's bit for bit",
        ),
    ],
)
