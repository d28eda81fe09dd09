"""The entry point of the router's process: `python -m slime.router.process SETTINGS.json`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.router.app import RouterApp
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer


def main(path: str) -> None:
    settings: dict[str, Any] = json.loads(Path(path).read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    router = RouterApp(
        load_tokenizer=lambda: load_tokenizer(settings["model_path"], trust_remote_code=True),
        timeout=settings["request_timeout_secs"],
    )
    middlewares = [load_function(name) for name in settings["middlewares"]]
    web.run_app(
        router.application(middlewares),
        host=settings["host"],
        port=settings["port"],
        access_log=None,
        print=None,
        handler_cancellation=True,  # a client that gives up frees the engine
        reuse_address=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
