"""Calling what a user names as "package.module:name"."""

from __future__ import annotations

import inspect
from typing import Any

from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load


def call(target: str, *args: object, **options: object) -> Any:
    """What ``target`` returns; raises UserError when it is not there or does not take these arguments."""
    function = load(target)
    if not callable(function):
        raise UserError(f"{target!r} is a {type(function).__name__}, so it cannot be called; name a class or function.")
    try:
        inspect.signature(function).bind(*args, **options)
    except TypeError as error:
        given = ", ".join([*(type(item).__name__ for item in args), *(f"{key}=..." for key in options)])
        raise UserError(
            f"{target!r} does not take ({given}): {error}; correct the options, or its signature "
            f"{inspect.signature(function)}."
        ) from error
    except ValueError:  # built-in callables have no signature
        pass
    return function(*args, **options)
