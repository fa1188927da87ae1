"""Imitation from a recorded dataset alone: any LeRobotDataset, by any policy that can imitate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.algorithms.chunks import ImitationPolicy
from vla_rl.contract.check import check_policy_methods, is_user_defined
from vla_rl.contract.config import Checked, JsonObject, at_least
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.hub import repository
from vla_rl.contract.policy import require
from vla_rl.experience.datasets import (
    depth_cameras,
    joined_episodes,
    load_demonstrations,
    save_demonstrations,
    stream_demonstrations,
)
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.disk import Problem
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import save_own
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import (
    NewImitator,
    NewTiny,
    collect,
    demonstrated_scale,
    imitate_from_pixels,
    imitate_policy,
    validated,
)
from vla_rl.recipes.policies import check_if_foreign, names_class, new_policy
from vla_rl.recipes.terminal import clock, console
from vla_rl.recipes.trainers import generator, placed
from vla_rl.training.device import resolve_device
from vla_rl.training.fit import FitConfig, ImitationConfig, RelativeImitationConfig, shuffled
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class FromDataset(Checked):
    """What recipes that learn from a LeRobotDataset (v3.0, v2.1, v2.0) alone have in common: the data and the policy.

    The policy acts in the environment ``env`` if one is named: it takes bounds, cameras, names and tasks from there,
    and the dataset must fit.  Otherwise they are those of the data, and the policy belongs to no environment yet.
    """

    dataset: str = ""  # a folder, or a name on the Hugging Face hub
    env: EnvConfig = NO_ENV  # where the policy will act
    cameras: tuple[str, ...] = ()  # of the dataset that are read; none: all but those of depth
    accept: tuple[str, ...] = ()  # differences from env or policy that do no harm here: "names", "rate", "bounds"
    policy: str = ""  # a checkpoint folder, a public one, or module:Class
    image_size: int = at_least(0, 0)  # pictures are shrunk to so many pixels a side while learning; 0: as recorded
    leave_out_damaged: bool = False  # go on without episodes that cannot be read
    seed: int = 1
    device: str = "cpu"  # where the policy learns: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl
    vla: VLAOptions = VLAOptions()  # how ``policy`` is opened if it is a public folder; ours have their own.  Actions
    # that ``relative`` says are relative are normalized by mean and std of the dataset's

    def read(self) -> Demonstrations:
        """All episodes of the dataset; raises UserError where none was named."""
        self._require_colours()
        return self._shrunk(load_demonstrations(self.dataset, None, self._on_damage(), self.cameras))

    def _require_colours(self) -> None:
        """Raise UserError where no dataset was named, and for a camera that shows depth."""
        if not self.dataset:
            raise UserError("no dataset was named, so there is nothing to imitate; give one with --dataset FOLDER.")
        for name in depth_cameras(self.dataset):
            if name in self.cameras:
                raise UserError(
                    f"camera {name!r} of {self.dataset!r} shows depth and policies read RGB, so none could learn from "
                    "it; leave it out of --cameras."
                )
            console.print(f"camera {name} is not read: it shows depth, and policies read RGB")

    def _on_damage(self) -> Callable[[Problem], None] | None:
        return (lambda problem: console.print(f"left out: {problem}")) if self.leave_out_damaged else None

    def _shrunk(self, episodes: Demonstrations) -> Demonstrations:
        if not episodes.images or not self.image_size:
            return episodes
        images = {name: shrink(image, self.image_size) for name, image in episodes.images.items()}
        return replace(episodes, images=images)

    def spec(self, episodes: Demonstrations) -> EnvSpec | None:
        """What a policy that has none of its own is made for: ``env``, or where ``episodes`` could be recorded."""
        found = repository(self.dataset, "dataset")
        name = Path(found.name if found else self.dataset).name
        if self.env.name:
            return self.env.spec()
        own = self.policy and not names_class(self.policy) and not is_public(Path(self.policy))
        return None if own else spec_of(episodes, name)

    def start(self, episodes: Demonstrations, place: str = "") -> tuple[ImitationPolicy, Demonstrations]:
        """``policy``, or the one in the folder ``place``, and ``episodes`` as it counts tasks.

        Raises UserError for one that cannot imitate, and ContractError where it and the episodes do not fit.
        """
        spec, name = self.spec(episodes), place or self.policy
        if spec is not None:
            episodes = require_fit(spec, episodes, f"the environment {spec.name!r}", self.accept)
        made = new_policy(name, spec, {}, self.seed) if spec and names_class(name) else None
        policy = _require_imitating(made or load_policy(name, spec, self.vla), name)
        policy = placed(policy, resolve_device(self.device))
        self._check(policy)
        episodes = require_fit(policy.spec, episodes, repr(name), self.accept)
        if self.vla.relative and isinstance(policy, FlowVLA):  # the dataset's own statistics are of absolute ones
            policy.action_scale = demonstrated_scale(episodes, policy.relative, policy.chunk_length)
        return policy, episodes

    def _check(self, policy: ImitationPolicy) -> None:
        """Raise ContractError when ``policy`` is somebody else's and breaks the contract; it acts in ``env``."""
        if self.env.name:
            check_if_foreign(policy, self.env, self.seed, ("save_pretrained",))
        elif is_user_defined(policy):
            check_policy_methods(policy, ("save_pretrained",))


@dataclass(frozen=True)
class ImitateDataset(FromDataset):
    """Imitate the episodes of a LeRobotDataset (v3.0, v2.1, v2.0): the checkpoint "imitation".

    With ``policy``, a checkpoint, a public folder or "module:Class", what its ``trainable`` says learns, and perception
    that is frozen stays as it is.  Without, ``new`` is built and learns everything, perception included if it can; that
    takes many more episodes.
    """

    new: NewImitator = field(default_factory=NewTiny)
    imitation: ImitationConfig = field(
        default_factory=lambda: RelativeImitationConfig(0, stride=1, fit=FitConfig(steps=2000, batch=64))
    )
    only_successes: bool = False  # leave out episodes that failed
    stream: int = at_least(0, 0)  # episodes whose pictures are read at a time, while it learns; 0: all, before it does

    def run(self, folder: RunFolder) -> JsonObject:
        seconds: dict[str, float] = {}
        with clock(seconds, "read"):
            episodes, numbers = self._chosen(self.imitation.demonstrations)
        console.print(f"{episodes.count} episodes, {len(episodes.state)} steps, {len(episodes.tasks)} tasks")
        with clock(seconds, "imitation"):
            policy = self._train(episodes, numbers, folder)
        save_own(policy, folder.checkpoint("imitation"))
        loss = folder.metrics("imitation")[-1]["loss"]
        counts = {"episodes": episodes.count, "steps": len(episodes.state)}
        return {"loss": loss, **counts, "seconds": seconds, "seed": self.seed}

    def _chosen(self, count: int) -> tuple[Demonstrations, np.ndarray]:
        """What is imitated of the first ``count`` episodes, and their numbers in the dataset.

        In the place of pictures that will be streamed stand black ones of their size, which take no memory.
        """
        self._require_colours()
        cameras, first = None if self.stream else self.cameras, range(count) if count else None
        parts = list(stream_demonstrations(self.dataset, first, self._on_damage(), cameras))
        episodes, numbers = joined_episodes(self.dataset, parts), np.array([part.episode[0] for part in parts])
        if self.only_successes:
            episodes, numbers = self._successes(episodes), numbers[episodes.successes()]
        if not self.stream:
            return self._shrunk(episodes), numbers
        found = stream_demonstrations(self.dataset, numbers.tolist(), self._on_damage(), self.cameras)
        shown = self._shrunk(joined_episodes(self.dataset, [*islice(found, 1)]))
        count = len(episodes.state)
        black = {name: np.broadcast_to(np.uint8(0), (count, *item.shape[1:])) for name, item in shown.images.items()}
        return replace(episodes, images=black), numbers

    def _successes(self, episodes: Demonstrations) -> Demonstrations:
        success = episodes.successes()
        if not success.any():
            raise UserError(f"none of the {len(success)} episodes succeeded, so there is nothing to imitate.")
        return episodes.of(success)

    def _train(self, episodes: Demonstrations, numbers: np.ndarray, folder: RunFolder) -> ImitationPolicy:
        if self.policy:
            policy, episodes = self.start(episodes)
        else:
            spec = self.spec(episodes)
            assert spec is not None, "of the data where there is no other"
            episodes = require_fit(spec, episodes, f"the environment {spec.name!r}", self.accept)
            policy = placed(self.new.build(spec, episodes, self.seed), resolve_device(self.device))
        learn = imitate_policy if self.policy or not hasattr(policy, "encode_with_grad") else imitate_from_pixels
        learn(policy, self._blocks(policy, numbers) if self.stream else episodes, self.imitation, self.seed, folder)
        return policy

    def _blocks(self, policy: ImitationPolicy, numbers: np.ndarray) -> Iterator[Demonstrations]:
        """The episodes ``numbers``, ``stream`` that follow each other at a time, in random order, without end.

        While one block is imitated the next is read, and downloaded where it is not here yet.
        """
        blocks = np.split(numbers, range(self.stream, len(numbers), self.stream))

        def read(chosen: np.ndarray) -> list[Demonstrations]:
            """A block, or none where all of it is damaged."""
            parts = list(stream_demonstrations(self.dataset, chosen.tolist(), self._on_damage(), self.cameras))
            if not parts:
                return []
            found = self._shrunk(Demonstrations.joined(parts))
            return [require_fit(policy.spec, found, repr(self.policy or policy.spec.name), self.accept)]

        with ThreadPoolExecutor(1) as reader:
            order = shuffled(len(blocks), 1, generator(self.seed, 9))
            coming = reader.submit(read, blocks[int(next(order))])
            for index in order:
                found, coming = coming.result(), reader.submit(read, blocks[int(index)])
                yield from found


def _require_imitating(policy: object, name: str) -> ImitationPolicy:
    """``policy``; raises UserError when it lacks something that imitation needs."""
    for method in ("imitation_losses", "action_scale", "horizon", "trainable"):
        require(policy, f"imitation by {name!r}", (method,), "so it cannot imitate; see docs/bring/policy.md.")
    found: Any = policy
    return found


_MARGIN = 0.05  # of an action's recorded range, added to both ends of what the policy may do
_TOLERANCE = 1e-4  # of a range: recorded values are float32
HARMLESS = ("names", "rate", "bounds")  # differences that ``accept`` may name


def spec_of(episodes: Demonstrations, name: str) -> EnvSpec:
    """The spec of an environment in which these episodes could have been recorded.

    Bounds are those of the data, actions' with a margin of 5 % of their range; no unit is known.  Raises UserError for
    a dataset without pictures.
    """
    if not episodes.images:
        raise UserError(
            f"the dataset {name!r} has no camera, so a vision policy cannot learn from it; record pictures."
        )
    for camera, image in episodes.images.items():
        if image.shape[-1] != 3:
            raise UserError(
                f"camera {camera!r} of {name!r} has {image.shape[-1]} channel(s) and policies read RGB, so "
                "none could learn from it; record it as RGB (a grey picture three times), or name others (--cameras)."
            )
    images = {
        camera: ArraySpec(tuple(image.shape[1:]), "uint8", 0, 255, unit="RGB", frame=camera)
        for camera, image in episodes.images.items()
    }
    longest = max(end - begin for begin, end in episodes.spans())
    return EnvSpec(
        name=name,
        images=images,
        state=_bounds(episodes.state, 0.0, episodes.state_names),
        action=_bounds(episodes.action, _MARGIN, episodes.action_names),
        tasks=episodes.tasks,
        control_dt=1.0 / episodes.fps,
        time_limit=longest,
        max_chunk=longest,
    )


def _bounds(values: np.ndarray, margin: float, names: tuple[str, ...]) -> ArraySpec:
    low, high = values.min(axis=0).astype(np.float64), values.max(axis=0).astype(np.float64)
    wider = np.maximum(margin * (high - low), 1e-3)  # what never changed still needs a range
    low, high = low - wider, high + wider
    return ArraySpec((values.shape[1],), "float32", tuple(low.tolist()), tuple(high.tolist()), names=names)


def require_fit(spec: EnvSpec, episodes: Demonstrations, whose: str, accept: Sequence[str] = ()) -> Demonstrations:
    """``episodes`` with tasks counted as in ``spec``; raises ContractError for the first field that differs.

    Shapes, cameras and tasks must agree.  ``accept`` names which of the other differences do no harm: "names" of state
    and action entries, the "rate" of control steps, values outside the "bounds".
    """
    for item in accept:
        if item not in HARMLESS:
            raise UserError(f"--accept {item!r} is no difference that can be accepted; {did_you_mean(item, HARMLESS)}")
    for kind, part, ours, theirs in _differences(spec, episodes):
        if kind not in accept:
            cure = f"record or convert it anew, or add --accept {kind}" if kind in HARMLESS else "choose another one"
            raise ContractError(
                f"{whose} was made for {part} {ours} but the dataset has {theirs}, so a policy would learn something "
                f"else; {cure}."
            )
    return episodes.with_tasks(spec.tasks)


def _differences(spec: EnvSpec, episodes: Demonstrations) -> Iterator[tuple[str, str, object, object]]:
    """(kind, part, in the spec, in the dataset) of everything that differs."""
    ours = {f"camera {name} of shape": item.shape for name, item in spec.images.items()}
    ours |= {"state of shape": spec.state.shape, "action of shape": spec.action.shape}
    theirs = {f"camera {name} of shape": tuple(image.shape[1:]) for name, image in episodes.images.items()}
    theirs |= {"state of shape": episodes.state.shape[1:], "action of shape": episodes.action.shape[1:]}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield "shape", name, ours.get(name), theirs.get(name)
            return
    recorded = (
        (spec.state, episodes.state_names, episodes.state),
        (spec.action, episodes.action_names, episodes.action),
    )
    for part, (array, names, values) in zip(("state", "action"), recorded, strict=True):
        if array.names and names and array.names != names:
            yield "names", f"{part} entries", array.names, names
        low, high = np.broadcast_to(array.low, array.shape), np.broadcast_to(array.high, array.shape)
        slack = _TOLERANCE * np.where(np.isfinite(high - low), high - low, 0.0)
        found = values.min(axis=0), values.max(axis=0)
        if (found[0] < low - slack).any() or (found[1] > high + slack).any():
            yield "bounds", f"{part}s within", (low.tolist(), high.tolist()), [item.tolist() for item in found]
    if not episodes.has_rate_of(spec):
        yield "rate", "control steps per second", round(1 / spec.control_dt, 3), episodes.fps


def shrink(images: np.ndarray, size: int, part: int = 512) -> np.ndarray:
    """uint8 [N,size,size,3]: area-averaged pictures."""
    pieces = []
    for i in range(0, len(images), part):
        pixels = torch.as_tensor(images[i : i + part]).permute(0, 3, 1, 2).float()
        small = torch.nn.functional.interpolate(pixels, (size, size), mode="area")
        pieces.append(small.round().to(torch.uint8).permute(0, 2, 3, 1).numpy())
    return np.concatenate(pieces)


@dataclass(frozen=True)
class ImitateExpert:
    """Record demonstrations, imitate them as ``ImitateDataset`` does, validate: the checkpoint "imitation".

    The policy ``new`` learns everything, perception included, from the demonstrations, which stay in the run folder.
    ``Imitate`` needs fewer of them where the task has labelled scenes.
    """

    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    new: NewImitator = field(default_factory=NewTiny)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)  # of as many demonstrations as are recorded
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # where the policy learns: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> JsonObject:
        """Record, train and validate; a resumed run begins anew."""
        seconds: dict[str, float] = {}
        kept = folder.path / "demonstrations"
        with clock(seconds, "collect"):
            episodes = collect(self.env, self.imitation.demonstrations, self.seed, self.evaluation.num_envs)
            save_demonstrations(episodes, kept, video="never")  # every pixel, for an exact repetition
        found = replace(self.imitation, demonstrations=0)  # all of them: an expert may have failed
        learning = ImitateDataset(
            str(kept), self.env, new=self.new, seed=self.seed, imitation=found, device=self.device
        )
        learned = learning.run(folder)
        policy = placed(load_policy(folder.checkpoint("imitation"), self.env.spec()), resolve_device(self.device))
        with clock(seconds, "evaluation"):
            rates = validated(self.env, policy, self.evaluation, self.seed)
        return {**learned, **rates, "seconds": {**seconds, **learned["seconds"]}}
