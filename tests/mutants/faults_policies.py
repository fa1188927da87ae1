"""Faults in whole policies and in the contract's messages, configs and specs."""

from __future__ import annotations

from tests.mutants.fault import Fault

_GAUSSIAN, _TINY = "vla_rl/policies/gaussian.py", "vla_rl/policies/tiny.py"
_FLOW_POLICY = "vla_rl/policies/flow_policy.py"
_WIRE, _CONFIG, _CHECK = "vla_rl/contract/wire.py", "vla_rl/contract/config.py", "vla_rl/contract/check.py"
_ON_GAUSSIAN, _ON_TINY = "tests/policies/test_gaussian.py::", "tests/policies/test_tiny.py::"
_ON_WIRE, _ON_CHECK = "tests/contract/test_wire.py::", "tests/contract/test_check.py::"

_POLICIES = (
    Fault(
        "the recorded sample is the clipped action",
        _GAUSSIAN,
        "return ActionOut(action, sample, logprob, {}, self.version), state",
        "return ActionOut(action, self.action_scale.normalize(action), logprob, {}, self.version), state",
        (f"{_ON_GAUSSIAN}test_samples_have_the_declared_mean_and_std_and_are_not_clipped",),
    ),
    Fault(
        "what is deployed is noisy",
        _FLOW_POLICY,
        'if mode == "eval":',
        'if mode == "never":',
        (f"{_ON_TINY}test_what_is_deployed_is_the_ode_and_has_no_density",),
    ),
    Fault(
        "deployed actions start from all noise whatever the temperature",
        _FLOW_POLICY,
        "self.sampler.temperature * noise",
        "noise",
        (f"{_ON_TINY}test_the_temperature_is_that_of_the_noise_that_deployed_actions_start_from",),
    ),
    Fault(
        "a checkpoint forgets its temperature",
        _FLOW_POLICY,
        "self.config = replace(self.config, sampler=replace(self.config.sampler, temperature=temperature))",
        "",
        (f"{_ON_TINY}test_the_temperature_is_that_of_the_noise_that_deployed_actions_start_from",),
    ),
    Fault(
        "the sample is not the chain's last point",
        _FLOW_POLICY,
        "self._action_out(chain.sample, density.logprob, aux)",
        "self._action_out(chain.points[:, 0], density.logprob, aux)",
        ("tests/policies/test_recorded_chain.py::test_the_sample_is_the_end_of_the_chain",),
    ),
    Fault(
        "actions leave their bounds",
        _FLOW_POLICY,
        "self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)",
        "self.action_scale.unnormalize(sample)",
        (f"{_ON_TINY}test_samples_are_raw_and_actions_physical_and_within_bounds",),
    ),
    Fault(
        "the backbone is trained by RL",
        _TINY,
        'if not name.startswith("backbone.")}',
        'if not name.startswith("nothing.")}',
        (f"{_ON_TINY}test_gradients_reach_all_but_the_backbone",),
    ),
)

_CONTRACT = (
    Fault(
        "an unknown field is dropped",
        _CONFIG,
        "for name in fields.keys() - known:",
        "for name in set(fields := {key: fields[key] for key in fields.keys() & known}) - known:",
        ("tests/contract/test_config.py::test_a_field_or_class_that_does_not_fit_is_named",),
    ),
    Fault(
        "a received array belongs to the message",
        _WIRE,
        ".astype(dtype).reshape(shape)",
        ".astype(dtype, copy=False).reshape(shape)",
        (f"{_ON_WIRE}test_arrays_come_back_equal_writable_and_their_own",),
    ),
    Fault(
        "another contract version is welcome",
        _WIRE,
        "if version != CONTRACT_VERSION:",
        "if version > CONTRACT_VERSION + 1000:",
        (f"{_ON_WIRE}test_other_versions_and_strangers_are_refused",),
    ),
    Fault(
        "a message cut short is read",
        _WIRE,
        "or len(data) < size:",
        "or not size:",
        (f"{_ON_WIRE}test_a_message_cut_short_raises_an_error",),
    ),
    Fault(
        "an idle row's observation is not checked",
        _CHECK,
        "_require(_equal(step.obs, later.obs),",
        "_require(step.obs is not None,",
        ("tests/contract/test_idle_rows.py::test_a_change_of_an_idle_observation_is_found",),
    ),
    Fault(
        "ranges are not checked",
        _CHECK,
        "if values.size and values.dtype != np.bool_:",
        "if values.size and values.dtype == np.bool_:",
        (f"{_ON_CHECK}test_a_broken_environment_is_found",),
    ),
    Fault(
        "a nested config stays a dict",
        _CONFIG,
        "fields = {key: from_json(item) for key, item in value.items()",
        "fields = {key: item for key, item in value.items()",
        ("tests/policies/test_flow.py::test_samplers_are_configs",),
    ),
    Fault(
        "a spec comes back with lists",
        "vla_rl/contract/spec.py",
        'fields |= {key: tuple(data[key]) for key in ("shape", "names") if key in data}',
        'fields |= {key: data[key] for key in ("shape", "names") if key in data}',
        ("tests/sims/test_conformance.py::test_spec_survives_json",),
    ),
)

FAULTS = (*_POLICIES, *_CONTRACT)
