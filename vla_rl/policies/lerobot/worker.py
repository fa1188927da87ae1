"""The process of a LeRobot policy: ``python -m vla_rl.policies.lerobot.worker``, in LeRobot's installation.

It loads a folder by LeRobot's own config, class and processors and asks for every action as LeRobot's own loop does:
preprocessor, ``select_action``, postprocessor.  It imports the contract and LeRobot, and nothing else of ours.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.child import Answering, serve_owner
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.wire import Arrays
from vla_rl.policies.lerobot.memory import Kept, Memory, RowNoise, measure

Answer: TypeAlias = tuple[dict[str, Any], Arrays]
PREPROCESSOR = "policy_preprocessor.json"
_DEVICE, _RELATIVE = "device_processor", "relative_actions_processor"
_MOST_SESSIONS = 4096  # whose memories are held, unless more are played at once


@dataclass(frozen=True)
class Loaded:
    """A policy with LeRobot's interface (``reset``, ``select_action``), and what stands before and behind it.

    described  of its config: the ``type``, ``inputs`` and ``outputs`` {key: {"type", "shape"}}, and ``n_obs_steps``
    """

    policy: Any
    before: Callable[[dict[str, Any]], Any]
    after: Callable[[Tensor], Tensor]
    described: Mapping[str, Any]


def load_lerobot(folder: str) -> Loaded:
    """The policy in ``folder`` as LeRobot reads it; raises UserError for what its loop would not play."""
    configs, factory = (import_module(f"lerobot.{name}") for name in ("configs", "policies.factory"))
    import_module("lerobot.policies")  # registers the families
    import_module("lerobot.utils.import_utils").register_third_party_plugins()
    config = configs.PreTrainedConfig.from_pretrained(folder)
    if config.use_peft:
        raise UserError(
            f"{folder!r} holds an adapter of PEFT and not the whole policy, so it is not played here; merge it into "
            "its base (merge_and_unload) and save that."
        )
    relative = (_step(Path(folder) / PREPROCESSOR, _RELATIVE) or {}).get("enabled")
    if relative and getattr(config, "n_action_steps", 1) > 1:
        raise UserError(
            f"{folder!r} makes chunks relative to the state at their beginning, but LeRobot's loop adds that of every "
            "later step, so its actions would be wrong; open a smolvla, pi0 or pi05 without lerobot:, or set "
            "n_action_steps to 1 in its config.json."
        )
    policy = factory.get_policy_class(config.type).from_pretrained(folder, config=config)
    # Where it is trained need not be where it runs.
    moved = {_DEVICE: {"device": config.device}} if _step(Path(folder) / PREPROCESSOR, _DEVICE) is not None else {}
    before, after = factory.make_pre_post_processors(config, pretrained_path=folder, preprocessor_overrides=moved)
    described: dict[str, Any] = {"type": config.type, "n_obs_steps": config.n_obs_steps}
    for name, features in (("inputs", config.input_features), ("outputs", config.output_features)):
        described[name] = {
            key: {"type": item.type.value, "shape": list(item.shape)} for key, item in (features or {}).items()
        }
    return Loaded(policy, before, after, described)


def _step(path: Path, name: str) -> dict[str, Any] | None:
    """The options of the step ``name`` of the pipeline in ``path``; None where it has none."""
    steps = json.loads(path.read_text(encoding="utf-8"))["steps"] if path.is_file() else []
    found = (step.get("config", {}) for step in steps if step.get("registry_name") == name)
    return next(found, None)


class PolicyServer(Answering):
    """One policy, and the memories of sessions: each is what one environment plays, one episode after the other.

    A session's memory after ``step`` decisions of an episode is held until the decision after the next one, so that a
    decision can be made again; before the first one there is none.
    """

    does = ("load", "begin", "act", "save", "restore")
    who = "LeRobot's policy"

    def __init__(self, load: Callable[[str], Loaded] = load_lerobot) -> None:
        super().__init__()
        self._load = load
        self._loaded: Loaded
        self._memory: Memory
        self._tasks: tuple[str, ...] = ()
        self._held: dict[int, dict[int, tuple[Kept, int]]] = {}  # session -> step -> memory, row in it

    def load(self, folder: str) -> Answer:
        """Load what is in ``folder``; answers with its description."""
        with contextlib.redirect_stdout(io.StringIO()):  # what is loaded is said by us
            self._loaded = self._load(folder)
        return dict(self._loaded.described), {}

    def begin(self, inputs: Mapping[str, Sequence[int]], tasks: Sequence[str]) -> Answer:
        """Measure the policy on what it will be shown: ``inputs`` {key: shape} and one of ``tasks``.

        Answers with ``decided``: for how many actions it computes once.
        """
        self._tasks = tuple(tasks)
        pictures = {key: len(shape) == 3 for key, shape in inputs.items()}

        def step(size: int) -> None:
            shown = {
                key: np.zeros((size, *shape), np.uint8 if pictures[key] else np.float32)
                for key, shape in inputs.items()
            }
            with torch.no_grad():
                self._loaded.policy.select_action(self._ready(shown, np.zeros(size, np.int64)))

        measured = measure(self._loaded.policy, step)
        self._memory = measured.memory
        return {"decided": measured.decided}, {}

    def act(
        self,
        session: np.ndarray,
        step: np.ndarray,
        seed: np.ndarray,
        task: np.ndarray,
        horizon: int,
        **shown: np.ndarray,
    ) -> Answer:
        """The next ``horizon`` actions float32 [E,horizon,D] of sessions [E], ``step`` decisions into their episodes.

        ``shown`` {key: [E,...]} and ``task`` int [E] are the observation; noise follows from ``seed`` int64 [E].
        """
        ready, actions = self._ready(shown, task), torch.empty(0)
        for kept, rows in self._together(session.tolist(), step.tolist()):
            self._memory.put(kept)
            given = _rows(ready, rows, len(session))
            with RowNoise(seed[rows].tolist()), torch.no_grad():
                chosen = torch.stack([self._loaded.policy.select_action(dict(given)) for _ in range(horizon)], 1)
            if not len(actions):
                actions = chosen.new_empty((len(session), *chosen.shape[1:]))
            actions[rows] = chosen
            after = self._memory.take(len(rows))
            for place, row in enumerate(rows):
                self._hold(int(session[row]), int(step[row]), after, place)
        self._forget(len(session))
        with torch.no_grad():
            found = torch.stack([self._loaded.after(actions[:, i]) for i in range(horizon)], 1)
        return {}, {"action": found.float().cpu().numpy()}

    def save(self, session: np.ndarray, step: np.ndarray) -> Answer:
        """The memories of sessions [E] as bytes, b"" for one whose episode has not begun."""
        found = [self._found(one, at) if at else None for one, at in zip(session.tolist(), step.tolist(), strict=True)]
        return {"kept": [b"" if item is None else item[0].rows([item[1]]).packed() for item in found]}, {}

    def restore(self, session: np.ndarray, step: np.ndarray, kept: Sequence[bytes]) -> Answer:
        """Hold what :meth:`save` returned as the memories of sessions [E]."""
        device = next(iter(self._loaded.policy.parameters())).device
        for one, at, data in zip(session.tolist(), step.tolist(), kept, strict=True):
            self._held[one] = {at: (Kept.unpacked(data, device), 0)} if data else {}
        return {}, {}

    def _ready(self, shown: Mapping[str, np.ndarray], task: np.ndarray) -> dict[str, Any]:
        """What LeRobot's preprocessor makes of the observations of all environments."""
        given: dict[str, Any] = {key: _as_lerobot(item) for key, item in shown.items()}
        with torch.no_grad():
            ready: dict[str, Any] = self._loaded.before({**given, "task": [self._tasks[i] for i in task.tolist()]})
        return ready

    def _together(self, sessions: list[int], steps: list[int]) -> list[tuple[Kept, list[int]]]:
        """Memories of environments that can be computed together, with their rows in the batch."""
        whole: dict[int, tuple[Kept, list[int], list[int]]] = {}  # by memory: it, rows of it, rows of the batch
        begun = []
        for row, (session, step) in enumerate(zip(sessions, steps, strict=True)):
            if not step:
                begun.append(row)
                continue
            kept, place = self._found(session, step)
            _, places, rows = whole.setdefault(id(kept), (kept, [], []))
            places.append(place)
            rows.append(row)
        parts = [(kept.rows(places), rows) for kept, places, rows in whole.values()]
        if begun:
            parts.append((self._memory.fresh(len(begun)), begun))
        alike: dict[int, list[tuple[Kept, list[int]]]] = {}
        keys: list[Any] = []
        for part in parts:
            key = part[0].key
            alike.setdefault(keys.index(key) if key in keys else len(keys), []).append(part)
            keys += [] if key in keys else [key]
        return [
            (Kept.joined([kept for kept, _ in same]), [row for _, rows in same for row in rows])
            for same in alike.values()
        ]

    def _found(self, session: int, step: int) -> tuple[Kept, int]:
        """The memory of ``session`` after ``step`` decisions of its episode, and the row in it."""
        try:
            return self._held[session][step]
        except KeyError as error:
            raise ContractError(
                f"nothing is known of the {step} decisions of session {session}, so the next one would be another; "
                "begin its episode anew."
            ) from error

    def _hold(self, session: int, step: int, after: Kept, place: int) -> None:
        """Note the memory after decision ``step``; that before it stays, older ones go."""
        before = self._held.pop(session, {}).get(step)  # popped: the latest sessions are last
        self._held[session] = ({step: before} if before is not None else {}) | {step + 1: (after, place)}

    def _forget(self, played: int) -> None:
        """Drop the sessions that were not played for longest, of environments that are closed."""
        for session in list(self._held)[: max(0, len(self._held) - max(_MOST_SESSIONS, 4 * played))]:
            del self._held[session]


def _rows(ready: Mapping[str, Any], rows: list[int], size: int) -> dict[str, Any]:
    """The entries of a batch of ``size`` environments for ``rows`` of them."""
    if rows == list(range(size)):
        return dict(ready)
    found = dict(ready)
    for key, item in ready.items():
        if isinstance(item, Tensor) and item.shape[:1] == (size,):
            found[key] = item[rows]
        elif isinstance(item, list) and len(item) == size:
            found[key] = [item[row] for row in rows]
    return found


def _as_lerobot(array: np.ndarray) -> Tensor:
    """A picture as float32 [E,c,h,w] within [0, 1], anything else as float32, as LeRobot's own loop makes them."""
    tensor = torch.from_numpy(array.copy())  # the owner's memory changes with its next request
    if tensor.dtype != torch.uint8:
        return tensor.float()
    return tensor.movedim(-1, 1).contiguous().float() / 255


if __name__ == "__main__":
    serve_owner("policy", PolicyServer().answer)
