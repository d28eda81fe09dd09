"""Model families from outside of slime: `slime_plugins/models/<model_type>.py` for a `model_type` that slime lacks.

A module here, or in a `slime_plugins/models` folder elsewhere on the Python path, has

* `FAMILY`: a `slime.backends.megatron_utils.families.Family`, the table of its weights;
* `config_facts(config)`, optional: Megatron's settings by attribute, from the content of config.json. They are
  compared with the flags that are given and replace those that aren't; `{"spec": [module, function]}` gives the model
  a layer spec of its own.

See docs/models.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from types import ModuleType

__path__ = pkgutil.extend_path(__path__, __name__)


def find_model_plugin(model_type: str) -> ModuleType | None:
    """The module for this `model_type`, or None.

    Raises:
        ImportError: the module has no `FAMILY`, or one that does not know the `model_type`.
    """
    if not model_type.isidentifier():
        return None
    name = f"{__name__}.{model_type}"
    if importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(name)
    family = getattr(module, "FAMILY", None)
    if family is None or model_type not in family.model_types:
        raise ImportError(f"{module.__file__} has no FAMILY for model_type {model_type!r}", name=name)
    return module
