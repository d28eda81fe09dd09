"""The configuration of a run: flags as data, parsed strictly, resolved and checked before anything is started.

    command line -> YAML -> config.json -> defaults      explicit settings win in this order
    parse -> merge -> resolve -> check                   pure steps, one module each

`groups/` holds slime's own flags; Megatron's, SGLang's and the router's come from the installed packages. `rules/`
holds what follows from settings and what may not be combined. `hooks.py` lists the functions that users may plug in.
"""

from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.parse import parse_args, slime_validate_args
from slime.utils.arguments.roles import parse_megatron_role_args
from slime.utils.arguments.table import reset_arg

__all__ = ["ConfigError", "parse_args", "parse_megatron_role_args", "reset_arg", "slime_validate_args"]
