"""The environment spec: shapes, dtypes, ranges and tasks, in frozen dataclasses that survive JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from vla_rl.contract.errors import ContractError

MOST_NUMBERS = 1 << 26  # in one step of one environment


@dataclass(frozen=True)
class ArraySpec:
    """One array of the contract, without its leading ``E`` axis.

    ``low`` and ``high`` are inclusive bounds in ``unit`` (one number for all entries, or one per entry of the last
    axis); ``frame`` names the coordinate frame or camera; ``names`` labels the entries of the last axis.
    """

    shape: tuple[int, ...]
    dtype: str
    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    unit: str = ""
    frame: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvSpec:
    """All that a policy, a rollout or an evaluation may assume about an environment.

    ``state`` is proprioception only.  ``extras`` whose name starts with ``privileged/`` are for critics and rewards and
    never reach a policy.  ``tasks`` is a table of instructions that only grows; an observation carries an index into
    it.  ``families`` names the kind of each task ("lift", "place"), so that success can be reported by kind; it is
    empty when there is one kind.  ``control_dt`` is in seconds per low-level action, ``time_limit`` in such actions per
    episode.  ``action`` of dtype float32 is continuous; of dtype int64 it is discrete, every entry an index from its
    low to its high.  ``success``: "once" if one moment of success suffices, "at_end" if only the last moment counts,
    None if the environment has no notion of success; ``Step.success`` is then always False and returns are compared
    instead.  ``profile`` says how exactly an episode follows from its seed and actions: "bitwise", "tolerant" (physics
    on a GPU), or "hardware" (a robot, which no check moves); see ``vla_rl.contract.foreign``.
    """

    name: str
    images: dict[str, ArraySpec]
    state: ArraySpec
    action: ArraySpec
    tasks: tuple[str, ...]
    control_dt: float
    time_limit: int
    max_chunk: int
    extras: dict[str, ArraySpec] = field(default_factory=dict)
    success: Literal["once", "at_end"] | None = "once"
    device: str = "cpu"
    can_snapshot: bool = False
    families: tuple[str, ...] = ()
    profile: str = "bitwise"

    @property
    def action_dim(self) -> int:
        """``D``: entries of one low-level action."""
        return self.action.shape[0]

    @property
    def discrete(self) -> bool:
        """Whether actions are indices instead of physical quantities."""
        return self.action.dtype == "int64"

    def family(self, task: int) -> str:
        """The kind of task of the instruction with index ``task``."""
        return self.families[task] if task < len(self.families) else self.name

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON, from which :meth:`from_json` rebuilds an equal spec."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        """Rebuild a spec; raises ContractError when a field is missing, unknown or something else."""
        try:
            fields = dict(data)
            fields["images"] = {name: _array_spec(item) for name, item in data["images"].items()}
            fields["extras"] = {name: _array_spec(item) for name, item in data.get("extras", {}).items()}
            fields["state"], fields["action"] = _array_spec(data["state"]), _array_spec(data["action"])
            fields["tasks"], fields["families"] = tuple(data["tasks"]), tuple(data.get("families", ()))
            spec = cls(**fields)
            for name in ("control_dt", "time_limit", "max_chunk"):
                if not isinstance(getattr(spec, name), Real):
                    raise TypeError(f"its {name} is {getattr(spec, name)!r}")
            parts = (*spec.images.values(), *spec.extras.values(), spec.state, spec.action)
            if (numbers := sum(math.prod(part.shape) for part in parts)) > MOST_NUMBERS:
                raise ValueError(f"its arrays have {numbers:,} numbers, at most {MOST_NUMBERS:,} are taken")
            return spec
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ContractError(
                f"the environment spec cannot be read ({error}), so nothing can be checked against it; "
                "write it again with this version of vla-rl."
            ) from error


def _array_spec(data: dict[str, Any]) -> ArraySpec:
    fields = dict(data)
    fields |= {key: tuple(data[key]) for key in ("shape", "names") if key in data}
    fields |= {key: tuple(data[key]) for key in ("low", "high") if isinstance(data[key], list | tuple)}
    if not all(isinstance(side, Integral) and int(side) >= 0 for side in fields["shape"]):
        raise TypeError(f"a shape is {str(data['shape'])[:80]}")
    return ArraySpec(**fields)
