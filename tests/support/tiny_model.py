"""The tiny Qwen3-architecture model, with its tokenizer, that the tests share; made once per test run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAKERS = [REPOSITORY / "tools" / "make_tiny_model.py", Path(__file__).with_name("make_local_model.py")]
TIMEOUT_S = 300


class TinyModel:
    """Makes the model in a process of its own, so that the test process need not load torch for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def path(self) -> Path:
        """The model's folder; made at the first call. Safe to call from several threads."""
        with self._lock:
            if not (self._directory / "config.json").exists():
                maker = next(path for path in MAKERS if path.exists())
                command = [sys.executable, str(maker), "--output-dir", str(self._directory)]
                made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
                if made.returncode != 0:
                    raise RuntimeError(f"{' '.join(command)} failed:\n{made.stdout}{made.stderr}")
        return self._directory
