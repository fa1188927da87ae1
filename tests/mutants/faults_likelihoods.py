"""Faults in what policies sample and how they compute its density, noticed by the table of all policies."""

from __future__ import annotations

from tests.mutants.fault import Fault

_TESTS = "tests/policies/test_likelihoods.py::"
_DECLARED = f"{_TESTS}test_samples_have_the_density_that_is_declared"
_REWEIGHTED = f"{_TESTS}test_reweighting_by_the_ratio_gives_the_new_policys_expectation"
_NEIGHBOURS = f"{_TESTS}test_a_decision_does_not_depend_on_its_neighbours"
_RATIO = f"{_TESTS}test_every_ratio_is_one_before_the_first_update"

FAULTS = (
    Fault(
        "a Gaussian samples more noise than it declares",
        "vla_rl/policies/gaussian.py",
        "sample = mean + self.log_std.exp() * normal(",
        "sample = mean + 1.2 * self.log_std.exp() * normal(",
        (f"{_DECLARED}[gaussian per chunk]", f"{_REWEIGHTED}[gaussian per chunk]"),
    ),
    Fault(
        "tokens are sampled at another temperature than that of their density",
        "vla_rl/policies/categorical.py",
        "index = (log_probs - (-drawn.log()).log()).argmax(-1)",
        "index = (log_probs / 1.6 - (-drawn.log()).log()).argmax(-1)",
        (f"{_DECLARED}[categorical per token]",),
    ),
    Fault(
        "inputs are standardized over the batch",
        "vla_rl/policies/feed_forward.py",
        'state = self.standardize(features["state"].to(self.last.weight))',
        'state = (raw := self.standardize(features["state"].to(self.last.weight))) - raw.mean(0)',
        (f"{_NEIGHBOURS}[gaussian per action]", f"{_RATIO}[fp64-gaussian per action]"),
    ),
    Fault(
        "noise of a batch is shared by its environments",
        "vla_rl/policies/categorical.py",
        "drawn = uniform(log_probs.shape, generator, like=log_probs).clamp_min(1e-20)",
        "drawn = uniform(log_probs.shape, generator, like=log_probs)[:1].clamp_min(1e-20)",
        (f"{_NEIGHBOURS}[categorical per token]",),
    ),
)
