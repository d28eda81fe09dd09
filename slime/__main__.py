"""`python -m slime doctor`; also what a console command `slime` runs."""

from __future__ import annotations

import sys

_USAGE = "usage: slime doctor [--json]   (to train: python train.py --help)"


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] != ["doctor"]:
        print(_USAGE, file=sys.stdout if words in (["--help"], ["-h"]) else sys.stderr)
        return 0 if words in (["--help"], ["-h"]) else 2
    from slime.doctor.__main__ import main as doctor

    return doctor(words[1:])


if __name__ == "__main__":
    sys.exit(main())
