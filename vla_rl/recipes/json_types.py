"""What run folders hold: the one place where a JSON object is untyped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object: a summary, a line of metrics, options of an environment."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""The same where it is only read."""
