"""Which settings of weight updates go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.base_config import BaseConfig

DISK = ["--update-weight-transport", "disk", "--update-weight-disk-dir", "/shared"]
LOCAL = ["--update-weight-local-checkpoint-dir", "/local"]
DELTA = [*DISK, *LOCAL, "--update-weight-mode", "delta"]
APART = ["--rollout-num-gpus", "2"]


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


def parse(base: BaseConfig, words: list[str]) -> object:
    return base.parse(*words, without=("--colocate",) if "--rollout-num-gpus" in words else ())


@pytest.mark.parametrize("words", [DISK, [*DISK, *LOCAL], [*DISK, *APART], [*DELTA, *APART]])
def test_accepted(base: BaseConfig, words: list[str]) -> None:
    parse(base, words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (DISK[:2], "--update-weight-transport disk needs --update-weight-disk-dir"),
        (DISK[2:], "--update-weight-disk-dir /shared needs --update-weight-transport disk"),
        (LOCAL, "--update-weight-local-checkpoint-dir /local needs --update-weight-transport disk"),
        (["--update-weight-disk-keep-files"], "--update-weight-disk-keep-files needs --update-weight-transport disk"),
        (["--update-weight-mode", "delta", *APART], "--update-weight-mode delta needs --update-weight-transport disk"),
        ([*DISK, "--update-weight-mode", "delta", *APART], "needs --update-weight-local-checkpoint-dir"),
        (DELTA, "--update-weight-mode delta can't be run with --colocate"),
        ([*DISK, "--update-weight-delta-encoding", "xor"], "--update-weight-delta-encoding xor needs --update-weight"),
        (["--update-weight-delta-checksum", "adler32"], "checksum adler32 needs --update-weight-mode delta"),
        ([*DISK, "--update-weight-local-checkpoint-dir", "/shared/"], "is also --update-weight-disk-dir"),
    ],
)
def test_refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    with pytest.raises(SystemExit):
        parse(base, words)
    assert part in capsys.readouterr().err
