"""Plug-ins of slime. Folders of the same name elsewhere on the Python path belong to this package too."""

from __future__ import annotations

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
