"""The entry point of an engine's server process: merge the layers of `ServerArgs` and run SGLang's HTTP server.

    python -m slime.backends.sglang_utils.launch LAYERS.json

Written for sglang 0.5.23.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.server_args import ServerArgsLayers, merge_layers
from slime_plugins import sglang_cpu


def field_defaults(server_args_class: type) -> dict[str, Any]:
    """Every field that can be given, with its default."""
    from sglang.srt.arg_groups.arg_utils import record_fields

    untouched = server_args_class(model_path="")
    names = [field.name for field in record_fields(server_args_class) if not field.name.startswith("_")]
    if not names:
        raise RuntimeError("sglang's ServerArgs has no fields that its arg_utils.record_fields finds (sglang 0.5.23)")
    return {name: getattr(untouched, name) for name in names}


def main(path: str) -> None:
    layers = ServerArgsLayers(**json.loads(Path(path).read_text()))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    settings = merge_layers(layers, field_defaults(ServerArgs))
    if sglang_cpu.is_selected():
        sglang_cpu.prepare_server(settings)
    run_server(ServerArgs(**settings))


if __name__ == "__main__":
    main(sys.argv[1])
