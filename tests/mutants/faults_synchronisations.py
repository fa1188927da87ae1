"""Faults in how often the host waits for a device, and in what a device decides meanwhile."""

from __future__ import annotations

from tests.mutants.fault import Fault

_DEVICE, _ENV, _DRIVER = "vla_rl/contract/device.py", "vla_rl/contract/env.py", "vla_rl/experience/driver.py"
_IMAGINED, _ON_IMAGINED = "world_models/env.py", "tests/world_models/test_device.py::test_"
_ON_LOOP, _ON_DEVICE, _ON_WARP = (
    f"tests/{name}.py::test_" for name in ("experience/test_synchronisations", "contract/test_device", "sims/test_warp")
)
_ONCE = (f"{_ON_LOOP}a_decision_waits_for_the_device_once_whether_or_not_an_episode_ends[gaussian]",)
_FLOW = (f"{_ON_LOOP}a_decision_waits_for_the_device_once_whether_or_not_an_episode_ends[flow]",)
_WARP = (f"{_ON_WARP}a_decision_waits_for_the_device_once_with_all_that_the_simulator_reads",)
_SAME = (f"{_ON_DEVICE}episodes_on_a_device_are_those_of_the_host_and_wait_once_a_decision",)
_REFUSED = (f"{_ON_DEVICE}an_action_that_is_not_finite_moves_nothing_and_counts_only_where_an_episode_runs",)
_RESET = (f"{_ON_LOOP}a_nan_of_a_reset_on_the_device_is_the_environment_s[gaussian]",)
_BEGUN = (f"{_ON_DEVICE}the_observation_of_a_reset_is_looked_at_with_the_next_step",)
_NUMBERS = (f"{_ON_DEVICE}all_kinds_of_numbers_come_in_one_transfer_unchanged",)
_ANEW = (f"{_ON_DEVICE}what_was_replaced_in_a_step_is_read_anew",)

FAULTS = (
    Fault(
        "the host reads every flag of a step apart",
        _DEVICE,
        "found = copies | read(unread)",
        "found = copies | {name: on_host(item) for name, item in unread.items()}",
        _ONCE,
    ),
    Fault(
        "the host reads the actions before the environment does",
        _DRIVER,
        "action = to_env(out.action, self.env)",
        "action = to_env(out.action, self.env); on_host(out.action)",
        _ONCE,
    ),
    Fault(
        "the rollout asks the device again who has ended",
        "vla_rl/experience/rollout.py",
        "ended = np.flatnonzero(decision.host.done)",
        "ended = np.flatnonzero(on_host(decision.step.done))",
        _ONCE,
    ),
    Fault(
        "groups ask the device for every flag",
        "vla_rl/experience/groups.py",
        "self._record(decision.host, decision.step.cause)",
        "self._record(decision.step, decision.step.cause)",
        (f"{_ON_LOOP}a_decision_of_groups_waits_once[gaussian]",),
    ),
    Fault(
        "an evaluation asks the device for every flag",
        "vla_rl/evaluation/run.py",
        "ended = self._count(decision.host)",
        "ended = self._count(decision.host); decision.step.done.tolist()",
        (f"{_ON_LOOP}a_decision_of_an_evaluation_waits_once[gaussian]",),
    ),
    Fault(
        "the host waits until noise has arrived on the device",
        "vla_rl/policies/noise.py",
        'drawn.to(device, non_blocking=device.type != "cpu")',
        "drawn.to(device)",
        _ONCE,
    ),
    Fault(
        "the host waits until the noisy steps have arrived on the device",
        "vla_rl/policies/flow.py",
        "sent(self.placement.draw(self.table, batch, generator), noise.device)",
        "self.placement.draw(self.table, batch, generator).to(noise.device)",
        _FLOW,
    ),
    Fault(
        "a NaN on the device is blamed on nobody",
        _DRIVER,
        "require_finite(out, on_host(out.action))  # names the policy",
        "pass",
        (f"{_ON_LOOP}a_nan_that_the_device_finds_is_the_policy_s_and_moves_nothing[gaussian]",),
    ),
    Fault(
        "what an environment has read is read again",
        _ENV,
        "return next((copy for own, copy in self.copies if own is array), None)",
        "return None",
        _WARP,
    ),
    Fault(
        "what an environment has found to be finite is looked at again",
        _ENV,
        "return any(own is array for own in self.finite)",
        "return False",
        _WARP,
    ),
    Fault(
        "rules of tasks take numbers from the host",
        "sims/mujoco/arrays.py",
        "xp.full((), number, dtype=xp.int8, device=device(condition))",
        "to_device(xp.asarray(number, dtype=xp.int8), device(condition))",
        _WARP,
    ),
    Fault(
        "Warp waits until what it sends has arrived",
        "sims/warp/env.py",
        "torch.from_numpy(np.array(item)).to(self._device, non_blocking=True)",
        "torch.from_numpy(np.array(item)).to(self._device)",
        _WARP,
    ),
    Fault(
        "what was replaced in a step counts as read",
        _ENV,
        "copy for own, copy in self.copies if own is array",
        "copy for own, copy in self.copies if own.dtype == array.dtype and own.shape == array.shape",
        _ANEW,
    ),
    Fault(
        "what was replaced in a step counts as finite",
        _ENV,
        "return any(own is array for own in self.finite)",
        "return any(own.shape == array.shape for own in self.finite)",
        _ANEW,
    ),
    Fault(
        "what comes from a device is a float", _DEVICE, ".astype(str(item.dtype)", ".astype(str(values.dtype)", _NUMBERS
    ),
    Fault(
        "what comes from a device is rounded",
        _DEVICE,
        "tensors.values()))).double()",
        "tensors.values()))).float()",
        _NUMBERS,
    ),
    Fault(
        "a NaN on a device moves the environments",
        _DEVICE,
        "running = running & ~refused",
        "running = running.clone()",
        _REFUSED,
    ),
    Fault("a NaN on a device is not told", _DEVICE, 'if host["refused"]:', "if False:", _REFUSED),
    Fault(
        "a NaN in an environment that idles stops the others",
        _DEVICE,
        "(~there.isfinite() & running[:, None, None]).any()",
        "(~there.isfinite()).any()",
        _REFUSED,
    ),
    Fault(
        "actions on a device exceed the bounds",
        _DEVICE,
        ".maximum(self._bounds[0])",
        "",
        _SAME,
    ),
    Fault(
        "an episode on a device goes on after its end",
        _DEVICE,
        "running & (ends == 0)",
        "running",
        _SAME,
    ),
    Fault(
        "clocks on a device count where nothing runs",
        _DEVICE,
        "running, time + running",
        "running, time + 1",
        _SAME,
    ),
    Fault(
        "clocks of the host stand still where the device's run",
        _DEVICE,
        "self.time += valid.sum(axis=1)",
        "self.time += valid.any(axis=1)",
        _SAME,
    ),
    Fault(
        "actions on a device count as executed after an end",
        _DEVICE,
        "action.masked_fill(~valid[..., None], 0)",
        "action",
        _SAME,
    ),
    Fault(
        "the host waits for the observation of a reset",
        _DRIVER,
        "if not is_tensor(self.obs.state):",
        "if True:",
        _ONCE,
    ),
    Fault(
        "a NaN of a reset on the device is the policy's",
        _DRIVER,
        "                    self.check()",
        "                    pass",
        _RESET,
    ),
    Fault(
        "the learner gets a NaN of a reset on the device",
        "vla_rl/experience/rollout.py",
        "self.driver.check()",
        "pass",
        _RESET,
    ),
    Fault(
        "what a reset shows is never looked at",
        _DEVICE,
        "*([] if before is None else _floats(before))",
        "",
        _BEGUN,
    ),
    Fault(
        "MuJoCo-Warp does not look at what its resets show",
        "sims/warp/env.py",
        "return self._book.begun(self._observe(self._tensor(self._book.time)))",
        "return self._observe(self._tensor(self._book.time))",
        _WARP,
    ),
    Fault(
        "the host waits until the ids of last observations have arrived",
        "vla_rl/experience/rollout.py",
        'return torch.from_numpy(env_ids).to(device, non_blocking=device.type != "cpu")',
        "return env_ids",
        _ONCE,
    ),
    Fault(
        "imagination reads one by one what a call of the model says",
        _IMAGINED,
        'found = read({"refused": refused, **told})',
        'found = {name: on_host(item) for name, item in {"refused": refused, **told}.items()}',
        (f"{_ON_IMAGINED}the_host_waits_once_for_every_call_of_the_model",),
    ),
    Fault(
        "imagination does not say that its resets are finite",
        _IMAGINED,
        "self._begun = [obs.state] if self._finite.all() else []",
        "self._begun = []",
        (f"{_ON_IMAGINED}a_decision_in_imagination_waits_once",),
    ),
    Fault(
        "imagination keeps actions that it refuses",
        _IMAGINED,
        "kept[at] = torch.where(refused, kept[at], action[rows])",
        "kept[at] = action[rows]",
        (f"{_ON_IMAGINED}an_action_that_is_not_finite_changes_nothing_in_imagination",),
    ),
    Fault(
        "imagination counts actions that it refuses",
        _IMAGINED,
        "self._known[:], self._book.time[:] = before",
        "pass",
        (f"{_ON_IMAGINED}an_action_that_is_not_finite_changes_nothing_in_imagination",),
    ),
    Fault(
        "extras on a device may be infinite",
        _DEVICE,
        "return [obs.state, *obs.extras.values()]",
        "return [obs.state]",
        (f"{_ON_DEVICE}what_is_not_finite_on_a_device_is_known_with_the_step[extras]",),
    ),
)
