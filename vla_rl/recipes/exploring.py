"""What learning costs while it explores: success of the training episodes, in windows, from a run's metrics."""

from __future__ import annotations

from collections.abc import Iterable

from vla_rl.recipes.json_types import JsonMapping, JsonObject

WINDOW = 64  # episodes


def windows(rows: Iterable[JsonMapping], size: int = WINDOW) -> list[tuple[float, int, int]]:
    """(success, episodes, control steps at its end) of windows in turn, from the lines of ``metrics.jsonl``.

    A window ends with the iteration in which it has ``size`` episodes; what is left in the end is none.  The deadline
    and the exploration noise of training apply, so a policy succeeds less often here than when it is evaluated.
    """
    found, good, episodes = [], 0.0, 0.0
    for row in rows:
        good += row.get("rollout/successes", 0.0)
        episodes += row.get("rollout/episodes", 0.0)
        if episodes >= size:
            found.append((good / episodes, int(episodes), int(row["env/steps_total"])))
            good, episodes = 0.0, 0.0
    return found


def exploring(rows: Iterable[JsonMapping]) -> JsonObject:
    """The first, lowest and last window of a run, for its summary; nothing for a run that is shorter than one."""
    found = windows(rows)
    if not found:
        return {}
    lowest = min(found)
    shown = {"first": found[0][0], "lowest": lowest[0], "lowest_at": lowest[2], "last": found[-1][0]}
    return {"exploring": {"windows": len(found), "episodes": WINDOW, **shown}}
