"""The router's own process: `python -m slime.ray.router_process SETTINGS.json` with RouterArgs fields in the file.

Written for sglang-router 0.3.2. Only its Rust part and its settings are imported: its own launcher also imports
SGLang's tracing, which takes half a minute and 600 MB where SGLang is installed; this takes 0.3 s and 40 MB.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path


def main(path: str) -> None:
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    settings = json.loads(Path(path).read_text())
    router_args = RouterArgs.from_cli_args(Namespace(**settings["flags"]), use_router_prefix=True)
    for name, value in settings["owned"].items():
        if not hasattr(router_args, name):
            raise AttributeError(f"RouterArgs has no field {name} (slime is written for sglang-router 0.3.2)")
        setattr(router_args, name, value)
    router_args._validate_router_args()
    Router.from_args(router_args).start()


if __name__ == "__main__":
    main(sys.argv[1])
