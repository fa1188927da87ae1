"""A policy that LeRobot itself runs, in an installation and a process of its own: frozen, whatever its family.

``lerobot:FOLDER`` names one, where a checkpoint's folder could stand; ``vla-rl policies install lerobot`` makes the
installation.  LeRobot's class, processors and queues do what they do in LeRobot's own loop, for each environment by
itself (``worker.py``).  It has neither a density nor a gradient here, so what improves it is a residual.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract import trust
from vla_rl.contract.child import ChildError, SharingChild, error_of
from vla_rl.contract.env import PRIVILEGED, Array, EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError, cause_of
from vla_rl.contract.installations import Installations, Shipped
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.contract.wire import Arrays
from vla_rl.policies.function import BlackBoxPolicy
from vla_rl.policies.noise import Generators, integers
from vla_rl.policies.normalization import check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.vla.checkpoint import CONFIG, PublicCheckpoint, match_cameras, short_name
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.saving import Base
from vla_rl.pretrained import save_folder

POLICIES = Installations(
    "policies",
    "library of policies",
    Path(__file__).resolve().parents[1] / "pins",
    {"lerobot": Shipped("import lerobot.policies.factory", pip=("--no-deps",), python=12)},
)
_WORKER = "vla_rl.policies.lerobot.worker"
_STATE, _OBSERVATION, _SEEN = "observation.state", "observation.", "seen/"
_INSIDE = ("", "pretrained_model", "checkpoints/last/pretrained_model")  # of what lerobot-train writes
PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
_START_S, _ANSWER_S = 900.0, 300.0  # to load and measure it; for the actions of one decision
_SEEDS = 1 << 62


class LeRobotPolicy(BlackBoxPolicy):
    """The policy in ``folder``, for environments like ``spec``; LeRobot's config says which device it computes on.

    Every input of its config is one of the environment: a camera, the state, or an extra of its name without
    "observation."; all others are refused.  ``horizon`` actions are asked for at once: as many as it chooses at once,
    but one where it also reads earlier observations, which it has to see then, as in LeRobot's own loop.

    An environment's memory stays in the process; ``session`` and ``step`` int64 [E] of the state say which it is.
    """

    instead = "it is frozen, as LeRobot runs it elsewhere; correct it by a residual (lerobot.py:residual_td3)."

    def __init__(
        self, spec: EnvSpec, folder: Path, base: Base | None = None, options: VLAOptions | None = None
    ) -> None:
        """``options``: ``cameras`` and ``horizon``; ``base``: what a checkpoint says of the folder.

        Raises UserError for a folder that LeRobot cannot open or that does not fit ``spec``.
        """
        super().__init__(spec, f"the LeRobot policy {str(folder)!r}")
        self.folder, self.options = folder, _checked(options or VLAOptions())
        _check_processors(folder)
        self.base = base or Base.of(folder)
        self._asking, self._sessions = threading.Lock(), itertools.count()
        self._link = self.start_process()
        weakref.finalize(self, self._link.close)
        try:
            described, _ = self._ask("load", {"folder": str(folder)}, within=_START_S)
            self.inputs = self._matched(described)
            shapes = {key: list(_shape(spec, source)) for key, source in self.inputs.items()}
            begun, _ = self._ask("begin", {"inputs": shapes, "tasks": list(spec.tasks)}, within=_START_S)
        except BaseException:
            self._link.close()
            raise
        alone = begun["decided"] if described["n_obs_steps"] == 1 else 1
        self.horizon = min(self.options.horizon, spec.max_chunk) or _longest_part(alone, spec.max_chunk)

    def start_process(self) -> SharingChild:
        """The process that loads the folder, in LeRobot's installation."""
        made = POLICIES.find("lerobot")
        return SharingChild((str(made.python), "-m", _WORKER), POLICIES.child_environment("lerobot"), "policy")

    @classmethod
    def open(cls, name: str, spec: EnvSpec, options: VLAOptions | None = None) -> LeRobotPolicy:
        """The policy in the folder ``name``, which may be what lerobot-train wrote around it."""
        return cls(spec, folder_of(name), options=options)

    # -- what it sees -------------------------------------------------------------------------------------------------

    def _matched(self, described: Mapping[str, Any]) -> dict[str, str]:
        """{LeRobot's key: our name} of what it is shown; raises UserError for what the environment does not have."""
        inputs: dict[str, Any] = {key: item for key, item in described["inputs"].items() if item["type"] != "LANGUAGE"}
        pictures = [key for key, item in inputs.items() if item["type"] == "VISUAL"]
        shown = PublicCheckpoint(
            self.folder, described["type"], {}, tuple(map(short_name, pictures)), None, None, 0, 0, ""
        )
        cameras = match_cameras(shown, self.spec, self.options.cameras) if pictures else ()
        found = {key: f"images/{name}" for key, name in zip(pictures, cameras, strict=True) if name is not None}
        for key in inputs.keys() - set(pictures):
            name = key.removeprefix(_OBSERVATION)
            if key != _STATE and (name not in self.spec.extras or name.startswith(PRIVILEGED)):
                public = [name for name in self.spec.extras if not name.startswith(PRIVILEGED)]
                raise UserError(
                    f"{self.name} reads {key!r} and the extras of the environment {self.spec.name!r} are "
                    f"{', '.join(public) or 'none'}, so it would be blind; declare {name!r} in the environment's spec."
                )
            found[key] = "state" if key == _STATE else f"extras/{name}"
            self._check_size(key, inputs[key]["shape"], _shape(self.spec, found[key]))
        for key, item in described["outputs"].items():
            self._check_size(key, item["shape"], self.spec.action.shape)
        return {key: found[key] for key in inputs if key in found}  # in LeRobot's order

    def _check_size(self, key: str, theirs: Sequence[int], ours: Sequence[int]) -> None:
        if list(theirs) != list(ours):
            raise UserError(
                f"{self.name} was trained for {key!r} of shape {list(theirs)} and the environment {self.spec.name!r} "
                f"has {list(ours)}, so its numbers would be misread; use the environment that it was trained for."
            )

    @property
    def feature_sizes(self) -> dict[str, int]:
        """What a residual reads besides the actions: what the policy is shown but pictures, and which task it is."""
        sizes = {name: int(np.prod(_shape(self.spec, name))) for name in ("state", *self._extras)}
        return sizes | ({"instruction": len(self.spec.tasks)} if len(self.spec.tasks) > 1 else {})

    @property
    def _extras(self) -> list[str]:
        return [name for name in self.inputs.values() if name.startswith("extras/")]

    def encode(self, obs: Observation) -> Features:
        arrays = {name: torch.as_tensor(item) for name, item in obs.arrays().items()}
        if unseen := sorted({*self.inputs.values()} - arrays.keys()):
            raise ContractError(
                f"an observation has no {unseen[0]!r}, which {self.name} reads, so it cannot decide there; recorded "
                "episodes have no extras: leave --demonstrations out."
            )
        features = {name: arrays[name].float() for name in ("state", *self._extras)}
        features["instruction"] = nn.functional.one_hot(arrays["task"].long(), len(self.spec.tasks)).float()
        features["time"] = arrays["time"].float()[:, None] / self.spec.time_limit
        return features | {_SEEN + name: arrays[name] for name in ("task", *self.inputs.values())}

    # -- acting -------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> State:
        sessions = torch.tensor(list(itertools.islice(self._sessions, num_envs)), dtype=torch.int64)
        return {"session": sessions, "step": torch.zeros_like(sessions)}

    def reset_state(self, state: State, env_ids: Array) -> State:
        step = state["step"].clone()
        step[torch.as_tensor(env_ids, dtype=torch.long)] = 0
        return {**state, "step": step}

    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Asks the process; its noise follows from ``generator``, and ``mode`` changes nothing."""
        count = len(state["session"])
        shown = {key: _host(features[_SEEN + name]) for key, name in self.inputs.items()}
        seed, task = integers(_SEEDS, (count,), generator), features[_SEEN + "task"]
        own = {"session": state["session"], "step": state["step"], "seed": seed, "task": task}
        arrays = {name: _host(item).astype(np.int64) for name, item in own.items()} | shown
        _, found = self._ask("act", {"horizon": self.horizon}, arrays)
        return self.action_out(found["action"].copy(), count), {**state, "step": state["step"] + 1}

    def saved_state(self, state: State) -> State:
        """``state`` with every environment's memory, uint8 [E,N], of which the first ``bytes`` [E] count."""
        answer, _ = self._ask("save", {}, {name: _host(state[name]) for name in ("session", "step")})
        kept = [np.frombuffer(data, np.uint8) for data in answer["kept"]]
        filled = np.zeros((len(kept), max(map(len, kept), default=0)), np.uint8)
        for row, data in enumerate(kept):
            filled[row, : len(data)] = data
        sizes = torch.tensor([len(data) for data in kept], dtype=torch.int64)
        return {**state, "memory": torch.from_numpy(filled), "bytes": sizes}

    def restored_state(self, saved: State) -> State:
        """The state of which :meth:`saved_state` was told, perhaps by another process; its sessions are new here."""
        state = {**self.initial_state(len(saved["step"])), "step": saved["step"].cpu()}
        rows = zip(_host(saved["memory"]), saved["bytes"].tolist(), strict=True)
        kept = [row[:size].tobytes() for row, size in rows]
        self._ask("restore", {"kept": kept}, {name: _host(state[name]) for name in ("session", "step")})
        return state

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._link.close()

    def _ask(
        self,
        what: str,
        fields: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        within: float = _ANSWER_S,
    ) -> tuple[dict[str, Any], Arrays]:
        """The answer of the process; raises UserError when there is none, in which its last words are."""
        end = time.monotonic() + within
        with self._asking:
            try:
                self._link.send({"do": what, **fields, "arrays": dict(arrays or {})}, end)
                answer, found = self._link.receive(end)
            except (ChildError, ContractError) as error:
                self._link.kill()
                words = self._link.last_words()
                raise UserError(
                    f"the process of {self.name} {error}, so it chooses no actions; start again, or go on from the "
                    f"last checkpoint (vla-rl train --resume).{f'  Its last words:{chr(10)}{words}' if words else ''}"
                ) from error
            except BaseException:
                self._link.kill()  # its answer may still come, and would be taken for the next one
                raise
        if "error" in answer:
            raise error_of(answer)
        return answer, found

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Raises UserError: there are no weights here."""
        raise UserError(f"{self.name} cannot be trained: {self.instead}")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, which refers to LeRobot's folder; its weights stay there."""
        reference = {"folder": self.base.folder, "fingerprint": self.base.fingerprint}
        options = {"cameras": dict(self.options.cameras), "horizon": self.horizon}
        own = {"policy": name_of(type(self)), "options": options, "spec": self.spec.to_json(), "base": reference}
        save_folder(Path(folder), own, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> LeRobotPolicy:
        """The policy that the checkpoint ``folder`` refers to; ``spec`` must fit the recorded one."""
        saved = read_config(Path(folder))
        trained, base = EnvSpec.from_json(saved["spec"]), Base(**saved["base"])
        check_same_env(trained, spec or trained)
        return cls(spec or trained, base.open(Path(folder)), base, VLAOptions(**saved["options"]))


def folder_of(name: str) -> Path:
    """Where the policy of the folder ``name`` lies, in it or in what lerobot-train wrote into it.

    Raises UserError where there is none.
    """
    found = next((Path(name, part) for part in _INSIDE if Path(name, part, CONFIG).is_file()), None)
    if found is None:
        raise UserError(f"{name!r} holds no {CONFIG}, so LeRobot finds no policy there; name the folder that does.")
    return found


def _check_processors(folder: Path) -> None:
    """Raise UserError for a processor that names code outside LeRobot, unless the user trusts it."""
    for path in filter(Path.is_file, (folder / name for name in PROCESSORS)):
        try:
            steps = trust.read_json(path)["steps"]
            foreign = [
                name for step in steps if not (name := str(step.get("class", "lerobot."))).startswith("lerobot.")
            ]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{str(path)!r} is damaged ({cause_of(error)}), so LeRobot cannot use it; copy it again."
            ) from error
        if foreign and not trust.options():
            raise UserError(
                f"{str(path)!r} names the code {foreign[0]!r}, which LeRobot would run, so the folder is not opened; "
                f"add {trust.OPTION} if you know who made it."
            )


def _host(array: Any) -> np.ndarray:
    found: np.ndarray = array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
    return found


def _shape(spec: EnvSpec, name: str) -> tuple[int, ...]:
    """The shape of the part ``name`` of an observation of one environment."""
    kind, _, part = name.partition("/")
    return spec.state.shape if kind == "state" else getattr(spec, kind)[part].shape


def _longest_part(decided: int, most: int) -> int:
    """The largest part of ``decided`` actions, all equally long, that an environment takes at once."""
    return next(size for size in range(min(decided, most), 0, -1) if decided % size == 0)


def _checked(options: VLAOptions) -> VLAOptions:
    """``options``; raises UserError for one that only policies of ours have."""
    if options != VLAOptions(cameras=options.cameras, horizon=options.horizon):
        raise UserError(
            "LeRobot opens its policies by itself, so of the options --vla only cameras and horizon have a meaning "
            "here; leave the others out."
        )
    return options
