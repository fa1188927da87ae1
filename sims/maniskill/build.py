"""Builds ManiSkill's environments, each seed with the scene that ManiSkill draws, and says why one cannot be built."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sims.base import BaseEnv, ReplayingEnv, free_bytes, process_bytes, require_memory
from sims.maniskill.world import Outcome, Simulation, World
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation, Observe, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.contract.tracker import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, EpisodeTracker

_MAX_CHUNK = 50
_MANY = 256  # environments; so many fit wherever ManiSkill starts
_FEW = 32  # environments whose memory is measured
AnyWorld = TypeVar("AnyWorld", bound=Simulation)


def build(
    num_envs: int,
    task: str,
    chosen: Mapping[str, Any],
    time_limit: int | None,
    ends_at_success: bool,
    device: str,
    arguments: Mapping[str, Any],
) -> VecEnv:
    """The environment of ``sims.maniskill.make:make_in_process``; ``chosen``: its obs, control mode, reward, size."""
    found = registered(task)
    limit = time_limit or found.max_episode_steps
    if not limit:
        raise UserError(
            f"{task} has no time limit in ManiSkill, so its episodes might never end; give the option time_limit, in "
            "actions."
        )
    require_gpu(task, device)
    worlds = worlds_of(num_envs, device, partial(_world, found, chosen, device, arguments))
    return env_of(_spec(worlds[0], found.uid, limit, chosen["obs"], device), worlds, ends_at_success)


def env_of(spec: EnvSpec, worlds: Sequence[Simulation], ends_at_success: bool) -> VecEnv:
    """The environment of ``worlds``; on the processor with snapshots."""
    kind = ReplayingManiSkillEnv if spec.device == "cpu" else ManiSkillEnv
    return kind(spec, worlds, ends_at_success)


def worlds_of(num_envs: int, device: str, make: Callable[[int], AnyWorld]) -> list[AnyWorld]:
    """What ``make(size)`` makes: one of all environments on a GPU, one for each on the processor.

    Raises UserError, saying how many fit, when ``_MANY`` environments or more do not fit the memory.  What one takes is
    the difference between simulations of two sizes on a GPU, and what the process grows by on the processor.
    """
    if device != "cpu" and num_envs >= _MANY:
        require_memory(_on_gpu(make, torch.device(device)), num_envs, torch.device(device))
    sizes = [1] * num_envs if device == "cpu" else [num_envs]
    worlds: list[AnyWorld] = []
    begin = 0
    try:
        for size in sizes:
            if num_envs >= _MANY and len(worlds) == _FEW:
                begin = process_bytes()
            if num_envs >= _MANY and len(worlds) == 2 * _FEW:
                require_memory((process_bytes() - begin) // _FEW, num_envs, torch.device(device))
            worlds.append(make(size))
    except BaseException:
        for world in worlds:
            world.close()
        raise
    return worlds


def _on_gpu(make: Callable[[int], AnyWorld], device: torch.device) -> int:
    """Bytes that one more environment takes on ``device``."""
    taken = []
    for size in (_FEW, 2 * _FEW):
        torch.cuda.empty_cache()
        before = free_bytes(device)
        with contextlib.closing(make(size)):
            taken.append(before - free_bytes(device))
    return max(0, taken[1] - taken[0]) // _FEW


def require_gpu(task: str, device: str) -> None:
    """Raise UserError where ``task`` is to run on a GPU that torch does not find."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"this machine has no GPU that torch can use, so {task} cannot run on {device!r}; use 'cpu'.")


def backends(device: str) -> dict[str, str]:
    """ManiSkill's options for ``device``."""
    return {"sim_backend": device.replace("cuda", "physx_cuda").replace("cpu", "physx_cpu"), "render_backend": device}


def _world(found: Any, chosen: Mapping[str, Any], device: str, arguments: Mapping[str, Any], num_envs: int) -> World:
    whole_state = chosen["obs"] == "state"
    overlaid = hasattr(found.cls, "rgb_overlay_paths")  # photographs behind what is in the foreground
    size = chosen["image_size"]
    options = {
        "num_envs": num_envs,
        "obs_mode": "state_dict" if whole_state else f"rgb+{'segmentation+' if overlaid else ''}state_dict",
        "control_mode": chosen["control_mode"] or None,
        "reward_mode": chosen["reward"] or None,
        "sensor_configs": {} if whole_state else {"width": size, "height": size},
        **backends(device),
        **arguments,
    }
    return World(made(found.uid, chosen, lambda: found.make(**options)), whole_state)


def made(task: str, chosen: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """ManiSkill's environment that ``make`` makes of ``task``, or a sentence about why it does not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return make()
    except (RuntimeError, NotImplementedError, KeyError, TypeError, OSError, AssertionError, EOFError) as error:
        raise _refusal(task, chosen, error, said.getvalue()) from error


def _refusal(task: str, chosen: Mapping[str, Any], error: BaseException, said: str) -> UserError:
    """The sentence about an ``error`` while ``task`` was built, which had ``said`` something on the way."""
    text = str(error).strip() or type(error).__name__
    if "rendering device" in text or "ErrorIncompatibleDriver" in text or "Vulkan" in text:
        return UserError(
            f"ManiSkill finds no Vulkan driver that it can use ({text.splitlines()[0]}), so {task} cannot be built; "
            "run 'vla-rl inspect', which says what to install."
        )
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
        return UserError(
            f"the GPU's memory is too small for these environments of {task} ({text.splitlines()[0]}), so they cannot "
            "be built; give fewer, or smaller pictures."
        )
    words = [*said.strip().splitlines()[-1:], text.splitlines()[0]]
    return UserError(
        f"ManiSkill cannot build {task} with {dict(chosen)} ({'; '.join(words)}), so there is no environment; correct "
        "the options, or download what it names."
    )


def _spec(world: World, task: str, limit: int, obs: str, device: str) -> EnvSpec:
    infinite, names = float("inf"), world.state_names()
    images = world.images() if obs == "rgb" else {}
    privileged = world.privileged().items()
    return EnvSpec(
        name=f"maniskill/{task}",
        images={name: ArraySpec(tuple(one.shape[1:]), "uint8", 0, 255, frame=name) for name, one in images.items()},
        state=ArraySpec((len(names),), "float32", -infinite, infinite, unit="rad, m, s", frame="world", names=names),
        action=world.controls.spec,
        tasks=(instruction_of(task, world.env),),
        control_dt=1 / world.env.control_freq,
        time_limit=limit,
        max_chunk=min(limit, _MAX_CHUNK),
        extras={name: ArraySpec(tuple(one.shape[1:]), "float32", -infinite, infinite) for name, one in privileged},
        success="once" if world.has_success else None,
        device=device,
        can_snapshot=device == "cpu",
        profile="bitwise" if device == "cpu" else "tolerant",
    )


INSTRUCTIONS = {
    "PickCube-v1": "pick up the red cube and move it to the green goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "PushT-v1": "push the T onto the goal T",
    "PegInsertionSide-v1": "insert the orange end of the peg into the hole of the box",
    "PushCube-v1": "push the blue cube to the target",
    "PullCube-v1": "pull the blue cube to the target",
    "PokeCube-v1": "push the cube with the peg",
    "LiftPegUpright-v1": "stand the peg upright",
    "PlaceSphere-v1": "put the blue ball into the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "RollBall-v1": "roll the ball to the goal",
    "PutOnPlateInScene25Main-v3": "put the object on the plate",
}
"""Tasks with an instruction of their own; the others have their name, or what ManiSkill says itself."""
ELSEWHERE = {
    "PutOnPlateInScene25": (
        "is not in ManiSkill but in the ManiSkill fork of RL4VLA (https://github.com/gen-robot/RL4VLA), with its "
        "assets; install that and name the module that registers it, as in task='mani_skill.envs:ID'"
    )
}
"""{beginning of an id: where the tasks of that name are}."""


def instruction_of(task: str, env: Any = None) -> str:
    """The instruction of ``task``: ours, what the built ``env`` says itself, or the words of its name."""
    if task in INSTRUCTIONS:
        return INSTRUCTIONS[task]
    said = getattr(env, "get_language_instruction", None)
    if said is not None:
        return str(said()[0])
    name = task.rpartition("-v")[0] or task
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def registered(task: str) -> Any:
    """What ManiSkill has registered as ``task``; "module:ID" imports the module that registers it first.

    Raises UserError for an unknown task and for one whose files were not downloaded.
    """
    importlib.import_module("mani_skill.envs")  # registers its own
    from mani_skill.utils.registration import REGISTERED_ENVS

    module, _, name = task.rpartition(":")
    if module:
        load(f"{module}:__name__")
    if name not in REGISTERED_ENVS:
        where = next((text for start, text in ELSEWHERE.items() if name.startswith(start)), "")
        cure = f"it {where}" if where else did_you_mean(name, REGISTERED_ENVS)
        raise UserError(f"ManiSkill has no task {name!r}, so it cannot be played; {cure}")
    found = REGISTERED_ENVS[name]
    missing = missing_assets(found.asset_download_ids or ())
    if missing:
        raise UserError(
            f"{name} needs files that are not here ({', '.join(missing)}), so it cannot be played; download them with "
            f"'python -m mani_skill.utils.download_asset {name}' where ManiSkill is installed."
        )
    return found


def missing_assets(asset_ids: Any) -> list[str]:
    """Those of ManiSkill's ``asset_ids`` (of groups: of their members) that were not downloaded."""
    from mani_skill.utils import assets

    sources: list[str] = []
    for one in asset_ids:
        inside = one in assets.DATA_GROUPS
        sources += assets.expand_data_group_into_individual_data_source_ids(one) if inside else [one]
    return sorted(one for one in sources if not assets.is_data_source_downloaded(one))


class ManiSkillEnv(BaseEnv):
    """``E`` environments of one task behind the environment contract (``VecEnv``), in one ``World`` or several.

    Success ("success") and ManiSkill's "fail" ("failed") terminate an episode, ``spec.time_limit`` truncates it, and so
    does a state or reward that is not finite ("diverged", reward 0; the last finite observation is returned).

    Clocks, seeds and ends are kept on the host: rewards and ends come there once for every action.  State, privileged
    entries and pictures stay on ``spec.device``.  A world on a GPU moves all its environments; what it does with those
    that idle is never shown.
    """

    def __init__(self, spec: EnvSpec, worlds: Sequence[Simulation], ends_at_success: bool) -> None:
        """Owns ``worlds``, whose environments follow each other."""
        self.spec, self._worlds, self._ends_at_success = spec, worlds, ends_at_success
        ends = np.cumsum([world.num_envs for world in worlds])
        count = int(ends[-1])
        self._rows = [slice(int(end) - world.num_envs, int(end)) for end, world in zip(ends, worlds, strict=True)]
        self._book = EpisodeTracker(count, ("failed",))
        self._state = self._zeros(count, spec.state.shape, torch.float32)
        self._extras = {name: self._zeros(count, one.shape, torch.float32) for name, one in spec.extras.items()}
        self._images = {name: self._zeros(count, one.shape, torch.uint8) for name, one in spec.images.items()}
        self._stale = np.zeros(count, bool)  # environments that have moved since their pictures were taken

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        step = super().step(on_host(chunk), observe)
        return step if self.spec.device == "cpu" else step.mapped(self._to_device)

    def close(self) -> None:
        for world in self._worlds:
            world.close()
        self._worlds = ()

    # -- one moment ---------------------------------------------------------------------------------------------------

    def _start(self, env_ids: np.ndarray) -> None:
        for world, rows, own in self._parts(env_ids):
            world.reset((own - rows.start).tolist(), self._book.seed[own].tolist())
            self._keep(rows, own, world.state(), world.privileged())

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if env_ids.size == self.num_envs:
            reward, success, failed, sound = self._move(env_ids, action)
        else:
            every = np.zeros((self.num_envs, self.spec.action_dim), np.float32)
            every[env_ids] = action
            reward, success, failed, sound = self._move(env_ids, every)[:, env_ids]
        late = self._book.time[env_ids] >= self.spec.time_limit
        succeeded = (success > 0) | self._book.success[env_ids]
        if sound.all() and not (success.any() or failed.any() or late.any()):
            return reward, succeeded, np.zeros(env_ids.size, int)
        cause = np.where(failed > 0, FAILURES, np.where(late, TIME_LIMIT, 0))
        cause = np.where(success > 0, SUCCESS, cause) if self._ends_at_success else cause
        cause = np.where(sound > 0, cause, DIVERGED)
        ended = env_ids[cause > 0]
        if ended.size and self._images:  # their worlds go on
            self._look(ended)
        return np.where(sound > 0, reward, np.float32(0)), succeeded & (sound > 0), cause

    def _move(self, env_ids: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Execute ``action`` [E,D] and keep what ``env_ids`` show: float32 [4,E] of reward, success, failed, sound."""
        found = np.zeros((4, self.num_envs), np.float32)
        for world, rows, own in self._parts(env_ids):
            outcome = world.step(action[rows])
            state, hidden = world.state(), world.privileged()
            found[:, rows] = self._read(outcome, [state, *hidden.values()])
            self._keep(rows, own[found[3, own] > 0], state, hidden)
        return found

    def _read(self, outcome: Outcome, shown: Sequence[Tensor]) -> np.ndarray:
        """float32 [4,n] on the host, of reward, success, failed, and whether these and ``shown`` are finite."""
        parts = [outcome.reward, outcome.success, outcome.failed]
        read = torch.cat([torch.stack(parts, 1), *(one.flatten(1) for one in shown)], 1)
        flags = torch.cat([read[:, :3], read.isfinite().all(1, keepdim=True)], 1)
        return flags.cpu().numpy().T

    def _keep(self, rows: slice, env_ids: np.ndarray, state: Tensor, hidden: Mapping[str, Tensor]) -> None:
        """Take over what ``env_ids`` show of ``state`` and ``hidden``, those of all ``rows`` of their world."""
        whole = env_ids.size == rows.stop - rows.start
        places, chosen = (rows, slice(None)) if whole else (env_ids, env_ids - rows.start)
        self._state[places] = state[chosen]
        for name, value in hidden.items():
            self._extras[name][places] = value[chosen]
        self._stale[env_ids] = True

    def _look(self, env_ids: np.ndarray) -> None:
        for world, rows, own in self._parts(env_ids):
            for name, image in world.images().items():
                self._images[name][own] = image[own - rows.start].to(self._images[name].device)
        self._stale[env_ids] = False

    def _observe(self) -> Observation:
        if self._images:
            self._look(np.flatnonzero(self._stale))
        images = {name: self._output(one) for name, one in self._images.items()}
        extras = {name: self._output(one) for name, one in self._extras.items()}
        task, time = (self._to_device(part) for part in (np.zeros(self.num_envs, np.int64), self._book.time))
        return Observation(images, self._output(self._state), task, time, extras)

    def _parts(self, env_ids: np.ndarray) -> Iterator[tuple[Simulation, slice, np.ndarray]]:
        """The worlds that have some of ``env_ids``, with all their rows and these of them."""
        for world, rows in zip(self._worlds, self._rows, strict=True):
            own = env_ids[(env_ids >= rows.start) & (env_ids < rows.stop)]
            if own.size:
                yield world, rows, own

    # -- host and device ----------------------------------------------------------------------------------------------

    def _zeros(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros((count, *shape), dtype=dtype, device=self.spec.device)

    def _output(self, tensor: Tensor) -> Any:
        """A copy in the form that callers get: numpy on the host."""
        return tensor.numpy().copy() if self.spec.device == "cpu" else tensor.clone()

    def _to_device(self, array: np.ndarray) -> Any:
        return array.copy() if self.spec.device == "cpu" else torch.as_tensor(array.copy(), device=self.spec.device)


class ReplayingManiSkillEnv(ReplayingEnv, ManiSkillEnv):
    """A ``ManiSkillEnv`` of worlds of one environment, with ``Snapshots``."""

    def _replay(self, env_id: int, action: np.ndarray) -> None:
        self._move(np.array([env_id]), np.tile(action, (self.num_envs, 1)))

    def _read(self, outcome: Outcome, shown: Sequence[Tensor]) -> np.ndarray:
        # A small operation takes numpy a third of torch's time.
        reward = outcome.reward.numpy()
        sound = np.isfinite(reward)
        for one in shown:
            sound &= np.isfinite(one.numpy()).reshape(len(sound), -1).all(1)
        return np.array([reward, outcome.success.numpy(), outcome.failed.numpy(), sound], np.float32)
