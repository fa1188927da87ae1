"""Windows of experience: a policy in many environments, a fixed number of decisions each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.contract.env import PRIVILEGED, WORKER, EnvSpec, Observation, Snapshots, Step, VecEnv, on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut, Features, Policy, recorded, restored_state, saved_state
from vla_rl.experience.curriculum import InOrder, SeedStream
from vla_rl.experience.driver import Decision, Driver, no_seconds

Batch = TypeVar("Batch", Rollout, Transitions)


@dataclass(frozen=True)
class WindowConfig:
    """Experience as windows: ``decisions`` consecutive decisions of every environment."""

    num_envs: int = 128
    decisions: int = 5  # per environment and rollout
    privileged: tuple[str, ...] = ()  # "privileged/..." extras that are kept for critics
    curriculum: InOrder = InOrder()  # which scenes are played next

    def __str__(self) -> str:
        return f"{self.num_envs} environments x {self.decisions} decisions = {self.num_envs * self.decisions:,}"

    def split(self, parts: int) -> WindowConfig:
        if self.num_envs % parts:
            raise UserError(
                f"{self.num_envs} environments cannot be shared equally by {parts} processes, so nothing was started; "
                "choose a multiple of the processes."
            )
        return replace(self, num_envs=self.num_envs // parts, curriculum=self.curriculum.split(parts))

    def build(self, env: VecEnv, policy: Policy, seeds: SeedStream, generator: torch.Generator) -> RolloutSource:
        stream = self.curriculum.stream(seeds, env.spec)
        return RolloutSource(env, policy, self.decisions, stream, generator, self.privileged)


@dataclass
class Window:
    """What has been collected towards the next rollout.

    ``features`` {name: [T+1,E,...]}, privileged extras included, are written where the rollout will hold them: those of
    a vision-language-action model are most of a learner's memory.
    """

    decisions: list[Decision] = field(default_factory=list)
    features: dict[str, Tensor] = field(default_factory=dict)
    final_index: list[tuple[int, int]] = field(default_factory=list)
    final_features: list[Features] = field(default_factory=list)

    def keep(self, features: Features, length: int) -> None:
        """Write ``features`` {name: [E,...]} of the present observation, one of ``length``."""
        if not self.features:
            self.features = {name: item.new_empty((length, *item.shape)) for name, item in features.items()}
        for name, held in self.features.items():
            held[len(self.decisions)] = features[name]


class DrivenSource:
    """An ``ExperienceSource`` that steps ``env`` with ``policy``; both belong to it meanwhile.

    The policy acts in mode "sample" with ``generator``.  Raises NonFiniteError when it chose a NaN: that decision moved
    nothing and the earlier ones are kept, so a next call with repaired weights goes on with the rollout.
    """

    def __init__(self, env: VecEnv, policy: Policy, seeds: SeedStream, generator: torch.Generator) -> None:
        self.env, self.seeds, self.generator = env, seeds, generator
        self.driver = Driver(env, policy, generator)

    @property
    def policy(self) -> Policy:
        """The policy that acts; it may be replaced between two decisions."""
        return self.driver.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.driver.policy = policy

    def close(self) -> None:
        self.env.close()

    def next(self) -> Rollout:
        while not self.advance():
            pass
        return self.deliver()

    def advance(self) -> bool:
        """Make one decision, unless the rollout is complete; returns whether it is now, for :meth:`deliver`."""
        raise NotImplementedError

    def deliver(self) -> Rollout:
        """The complete rollout; the next one begins."""
        raise NotImplementedError

    def _shared_state(self, unfinished: int) -> dict[str, Any]:
        """Seeds and generator; raises ContractError where so many decisions would be lost."""
        if unfinished:
            raise ContractError(
                f"{unfinished} decisions of an unfinished rollout would be lost, so the source has no state to save "
                "now; ask between two calls of next()."
            )
        return {"seeds": self.seeds.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seeds.load_state_dict(state["seeds"])
        self.generator.set_state(state["generator"])


class RolloutSource(DrivenSource):
    """Windows; an environment whose episode ended starts its next seed at once.

    Episodes run on across windows, so whoever computes advantages bootstraps after the last decision of a window.  An
    episode that a simulator's breakdown truncates (cause "worker") ends with a decision without valid actions: it has
    no gradient, the decision before it is bootstrapped, and the episode is not counted.
    ``privileged`` names extras that are kept beside the policy's features, for critics; the policy never sees them.
    ``stream`` names the source where several fill one replay buffer.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        decisions: int,
        seeds: SeedStream,
        generator: torch.Generator,
        privileged: Sequence[str] = (),
        stream: str = "",
    ) -> None:
        _require_privileged(privileged, env.spec)
        super().__init__(env, policy, seeds, generator)
        self.decisions, self.privileged, self.stream = decisions, tuple(privileged), stream
        self._window = Window()

    def advance(self) -> bool:
        self.start()
        if len(self._window.decisions) < self.decisions:
            self._keep(self.driver.step(), self._window)
        return len(self._window.decisions) == self.decisions

    def state_dict(self) -> dict[str, Any]:
        """Seeds, generator, environments and the policy's own state (see ``Resumable``).

        Environments without snapshots cannot be saved: after loading, they start new episodes.
        """
        state = self._shared_state(len(self._window.decisions)) | {"features": None}
        if self.driver.obs is not None and isinstance(self.env, Snapshots):
            snapshot, features = self.env.snapshot(np.arange(self.env.num_envs)), dict(self.driver.features)
            seeds = torch.from_numpy(self.driver.seeds.copy())
            own = saved_state(self.policy, self.driver.state)
            state |= {"env": snapshot, "features": features, "policy": own, "seed": seeds}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["features"] is not None:
            obs = self.env.restore(np.arange(self.env.num_envs), state["env"])  # type: ignore[attr-defined]
            device = device_of(self.policy)
            features = {name: item.to(device) for name, item in state["features"].items()}
            like = self.policy.initial_state(self.env.num_envs)
            own = restored_state(self.policy, state["policy"])
            policy_state = {name: item.to(like[name].device) for name, item in own.items()}
            self.driver.restore(obs, features, policy_state, on_host(state["seed"]))

    def _reset(self, env_ids: np.ndarray) -> None:
        self.driver.reset(env_ids, np.array([next(self.seeds) for _ in env_ids], dtype=np.int64))

    def start(self) -> None:
        """Begin the first episodes."""
        if self.driver.obs is None:
            self._reset(np.arange(self.env.num_envs))

    def _keep(self, decision: Decision, window: Window) -> None:
        """Add ``decision`` to ``window``, and begin the next episodes where it ended some."""
        window.keep(self._features(decision.obs, decision.features), self.decisions + 1)
        window.decisions.append(replace(decision, step=to_policy_device(decision), features={}).without_pictures())
        truncated = np.flatnonzero(decision.host.truncated)
        if len(truncated):
            index = _index(truncated, decision)
            final = self.driver.final_features(index)
            window.final_features.append(self._features(decision.step.obs.select(index), final))
            window.final_index += [(len(window.decisions) - 1, int(env_id)) for env_id in truncated]
        ended = np.flatnonzero(decision.host.done)
        self.seeds.ended(decision, ended)
        self._reset(ended)

    def deliver(self) -> Rollout:
        self.driver.check()  # its last observation may be that of a reset
        last = self._features(self.driver.obs, recorded(self.policy, self.driver.features))
        self._window.keep(last, self.decisions + 1)
        seconds, self.driver.seconds = self.driver.seconds, no_seconds()
        window, self._window = self._window, Window()
        stacked = _stack(window, self.env.spec, {**seconds, **self.seeds.counters()})
        return replace(stacked, stream=self.stream, spans=self.driver.spans.take())

    def _features(self, obs: Observation | None, features: Features) -> Features:
        """``features`` of ``obs`` with the privileged extras that critics read."""
        assert obs is not None
        extras = {name: torch.as_tensor(obs.extras[name]).to(device_of(self.policy)) for name in self.privileged}
        return {**features, **extras}


def _require_privileged(names: Sequence[str], spec: EnvSpec) -> None:
    for name in names:
        if name not in spec.extras or not name.startswith(PRIVILEGED):
            raise UserError(
                f"{name!r} is not among the privileged extras of {spec.name!r}, so no critic could read it; choose "
                f"from {sorted(item for item in spec.extras if item.startswith(PRIVILEGED))}."
            )


def executed_or_chosen(step: Step, out: ActionOut) -> Tensor:
    """What was executed [E,H,D]; where nothing was, after an end inside the chunk, what the policy chose.

    Zeros there would let a critic tell from the actions that the episode ends.
    """
    executed = torch.as_tensor(step.executed)
    return torch.where(torch.as_tensor(step.valid).unsqueeze(-1), executed, out.action.to(executed))


def _index(env_ids: np.ndarray, decision: Decision) -> Any:
    """``env_ids`` as an index; where policy and environment are on one device it goes there, and the host goes on."""
    state, device = decision.step.obs.state, decision.out.sample.device
    if not isinstance(state, Tensor) or state.device != device:
        return env_ids
    return torch.from_numpy(env_ids).to(device, non_blocking=device.type != "cpu")


def to_policy_device(decision: Decision) -> Step:
    """The step with its arrays as tensors where the policy is, so that a rollout lies in one place."""
    return decision.step.mapped(lambda item: torch.as_tensor(item, device=decision.out.sample.device))


def device_of(policy: Policy) -> torch.device:
    """Where a policy with weights computes; the host for one without."""
    parameters = getattr(policy, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return torch.device("cpu") if first is None else first.device


def _over_time(decisions: Sequence[Decision], env_ids: slice) -> dict[str, Any]:
    """The fields of a rollout that every decision has, [T,E,...], of the environments ``env_ids``."""
    steps, outs = [decision.step for decision in decisions], [decision.out for decision in decisions]
    device = outs[0].sample.device

    def stacked(items: Iterable[Any]) -> Tensor:
        return torch.stack([torch.as_tensor(item)[env_ids] for item in items]).to(device)

    names = ("reward", "valid", "intervened", "terminated", "truncated", "success")
    sample = stacked(out.sample for out in outs)
    return {
        **{name: stacked(getattr(step, name) for step in steps) for name in names},
        "sample": sample,
        "executed": stacked(map(executed_or_chosen, steps, outs)),
        "aux": {name: stacked(out.aux[name] for out in outs) for name in outs[0].aux},
        "logprob": stacked(out.logprob for out in outs),
        "version": torch.tensor([[out.policy_version] * sample.shape[1] for out in outs], device=device),
        "task": stacked(decision.obs.task for decision in decisions),
    }


def _stack(window: Window, spec: EnvSpec, measured: Mapping[str, float]) -> Rollout:
    decisions, device = window.decisions, window.decisions[0].out.sample.device
    fields = _over_time(decisions, slice(None))
    fields["success"] &= fields["terminated"] | fields["truncated"]
    causes = [cause for decision in decisions for cause in decision.step.cause]
    lost, diverged = (float(causes.count(cause)) for cause in (WORKER, "diverged"))
    hosts = [decision.host for decision in decisions]
    info = {
        "env/steps": float(sum(host.valid.sum() for host in hosts)),
        "rollout/episodes": float(sum(host.done.sum() for host in hosts)) - lost,
        "rollout/successes": float(sum((host.success & host.done).sum() for host in hosts)),
        **measured,
        **_by_family(decisions, spec),
        **({"rollout/truncated_by_worker": lost} if lost else {}),  # no outcome of the policy
        **({"rollout/diverged": diverged} if diverged else {}),
    }
    return Rollout(
        **fields,
        features=window.features,
        final_index=torch.tensor(window.final_index, dtype=torch.long, device=device).reshape(-1, 2),
        final_features=_concatenate(window.final_features, window.features),
        seeds=torch.stack([torch.from_numpy(decision.seeds) for decision in decisions]).to(device),
        info=info,
        robot=spec.name,
    )


def _by_family(decisions: Sequence[Decision], spec: EnvSpec) -> dict[str, float]:
    """Episodes and successes of every family of tasks, where there are several."""
    if len(set(spec.families)) < 2:
        return {}
    counts = {
        f"rollout/{what}/{name}": 0.0 for name in sorted(set(spec.families)) for what in ("episodes", "successes")
    }
    for decision in decisions:
        host, tasks = decision.host, on_host(decision.step.obs.task)
        for env_id in np.flatnonzero(host.done & host.valid.any(1)):  # not those that idle
            name = spec.family(int(tasks[env_id]))
            counts[f"rollout/episodes/{name}"] += 1.0
            counts[f"rollout/successes/{name}"] += float(host.success[env_id])
    return counts


def _concatenate(items: list[Features], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{name: [F,...]} of ``items`` {name: [R,...]}; none of them are of the shapes of ``like`` {name: [T+1,E,...]}."""
    if not items:
        return {name: value.new_empty((0, *value.shape[2:])) for name, value in like.items()}
    return {name: torch.cat([item[name] for item in items]) for name in like}


_ZERO_WHEN_IDLE = (
    "sample",
    "executed",
    "logprob",
    "reward",
    "valid",
    "intervened",
    "terminated",
    "truncated",
    "success",
)
_KEPT_WHEN_IDLE = ("version", "seeds", "task")


def episode_column(
    decisions: Sequence[Decision], env_id: int, seed: int, final: Features | None, robot: str = ""
) -> Rollout:
    """The episode that environment ``env_id`` played in ``decisions``: a rollout with E = 1, ended by the last of them.

    ``final`` {name: [...]} are the features of the last observation of a truncated episode.  A terminated episode
    (None) has no value after its end, so the features of its last decision stand there as well.
    """
    fields = _over_time(decisions, slice(env_id, env_id + 1))
    features = [{name: item[env_id] for name, item in decision.features.items()} for decision in decisions]
    features.append(final or features[-1])
    length, truncated, device = len(decisions), final is not None, fields["sample"].device
    end = torch.zeros(length, 1, dtype=torch.bool, device=device)
    end[-1] = True
    fields |= {"terminated": end & (not truncated), "truncated": end & truncated, "success": end & fields["success"]}
    return Rollout(
        **fields,
        features={name: torch.stack([item[name] for item in features])[:, None] for name in features[0]},
        final_index=torch.tensor([[length - 1, 0]], device=device)[: int(truncated)],
        final_features={name: item[None][: int(truncated)] for name, item in features[-1].items()},
        seeds=torch.full((length, 1), seed, device=device),
        robot=robot,
    )


def side_by_side(parts: Sequence[Rollout], info: Mapping[str, float] | None = None) -> Rollout:
    """Rollouts of any length side by side; shorter ones idle (``valid`` False) after their last decision.

    An idle decision has the features of the last observation; its samples and log-probs are 0 and mean nothing.
    """
    length = max(len(part.reward) for part in parts)
    widths = torch.tensor([0] + [part.reward.shape[1] for part in parts]).cumsum(0)
    arrays: dict[str, Any] = {
        name: torch.cat([_pad_with_zeros(getattr(part, name), length) for part in parts], 1) for name in _ZERO_WHEN_IDLE
    }
    arrays |= {
        name: torch.cat([_pad_with_last(getattr(part, name), length) for part in parts], 1) for name in _KEPT_WHEN_IDLE
    }
    shifted = [
        part.final_index + torch.tensor([0, int(first)], device=part.final_index.device)
        for part, first in zip(parts, widths[:-1], strict=True)
    ]
    return Rollout(
        features={
            name: torch.cat([_pad_with_last(p.features[name], length + 1) for p in parts], 1)
            for name in parts[0].features
        },
        aux={name: torch.cat([_pad_with_zeros(part.aux[name], length) for part in parts], 1) for name in parts[0].aux},
        final_index=torch.cat(shifted),
        final_features={name: torch.cat([p.final_features[name] for p in parts]) for name in parts[0].final_features},
        info=dict(info or {}),
        robot=parts[0].robot,
        **arrays,
    )


def to_state(rollout: Rollout) -> dict[str, Any]:
    """The rollout as nested dicts of arrays (see ``Resumable``); ``Rollout(**state)`` restores it."""
    return {item.name: getattr(rollout, item.name) for item in fields(rollout)}


def moved(batch: Batch, device: torch.device) -> Batch:
    """``batch`` with all its tensors on ``device``."""

    def move(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: move(item) for name, item in value.items()}
        return value.to(device) if isinstance(value, Tensor) else value

    return replace(batch, **{item.name: move(getattr(batch, item.name)) for item in fields(batch)})


def _pad_with_zeros(values: Tensor, length: int) -> Tensor:
    """``values`` [T,...] padded to ``length`` with zeros."""
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


def _pad_with_last(values: Tensor, length: int) -> Tensor:
    """``values`` [T,...] padded to ``length`` with the last one."""
    return torch.cat([values, values[-1:].expand(length - len(values), *values.shape[1:])])
