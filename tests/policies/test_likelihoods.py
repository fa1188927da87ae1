"""What must hold of every likelihood: of every policy and every sampler in the table of ``likelihood_families.py``."""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

import vla_rl.policies
from sims.catalog import make
from tests.policies.likelihood_families import BATCH, FAMILIES, encoded, law, moved, observed, outcome, recorded
from tests.token_toys import CHOICES, ENTRIES, HORIZON, PARTS, SPEC, token_policy
from tests.toys import seeded
from vla_rl.algorithms.policy_gradient import BF16_ERROR, check_density, joint, rounding_terms
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary

PARAMS = {name: pytest.param(name, marks=[pytest.mark.full] * one.full) for name, one in FAMILIES.items()}
EVERY = pytest.mark.parametrize("name", PARAMS.values())
EXACT = pytest.mark.parametrize("name", [PARAMS[name] for name, family in FAMILIES.items() if family.exact])
LIKELIHOOD = ("act", "log_prob", "kl")


def terms(params) -> int:
    """How many numbers are drawn for one decision."""
    return params["mean"][0].numel() if "mean" in params else params["log_probs"][0, :, 0].numel()


def test_the_table_holds_every_policy_with_a_likelihood():
    """A class of ``vla_rl.policies`` with a likelihood of its own that no line of the table makes is not tested."""
    made = {kind for family in FAMILIES.values() for kind in type(family.make()).__mro__}
    missing = []
    for module in pkgutil.walk_packages(vla_rl.policies.__path__, "vla_rl.policies."):
        for kind in vars(importlib.import_module(module.name)).values():
            own = isinstance(kind, type) and kind.__module__ == module.name
            if own and not getattr(kind, "_is_protocol", False) and all(hasattr(kind, name) for name in LIKELIHOOD):
                missing += [] if kind in made else [kind.__name__]
    assert not missing, f"add {missing} to tests/policies/likelihood_families.py"


@EVERY
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_every_ratio_is_one_before_the_first_update(name, dtype, bound):
    found = recorded(name, dtype)
    params = found.log_prob().params
    limit = bound * (math.sqrt(terms(params)) if dtype == torch.float32 else 1)
    assert found.out.logprob.dtype == torch.float64 and found.out.logprob.abs().max() > 0.1
    for size in (1, 7, BATCH):
        for index in torch.arange(BATCH).split(size):
            gap = found.log_prob(index).logprob - found.out.logprob[index]
            assert gap.abs().max() <= limit


@EVERY
def test_acting_in_bfloat16_is_within_the_stated_bound(name):
    """``8 * .011 * sqrt(terms)`` for every decision, where a Gaussian with a std below .2 counts as several terms.

    Nor is there a systematic error: ``check_density`` lets it pass.
    """
    found = recorded(name, torch.float32)
    features, state = encoded(found.policy, observed(found.policy.spec), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = found.policy.act(features, state, "sample", seeded(1))
    likelihood = found.policy.log_prob(features, out.sample, out.aux)
    gap = joint(likelihood.logprob - out.logprob).detach()
    rounding = rounding_terms(likelihood, out.sample)
    assert gap.abs().max() > 0 and (gap.abs() <= 8 * BF16_ERROR * rounding.sqrt()).all()
    check_density(gap, rounding, OneProcess())


@EVERY
def test_densities_entropies_and_kl_are_those_of_torch(name):
    found = recorded(name)
    old, new = found.log_prob(), found.log_prob(policy=moved(found, 0.5))
    laws = [law(item.params) for item in (old, new)]
    drawn = outcome(found.out, old.params)
    for likelihood, each in zip((old, new), laws, strict=True):
        torch.testing.assert_close(joint(likelihood.logprob), each.log_prob(drawn).flatten(1).sum(1), rtol=0, atol=1e-9)
        torch.testing.assert_close(likelihood.entropy, each.entropy().flatten(1).sum(1), rtol=0, atol=1e-9)
    if hasattr(found.policy, "step_logprob"):
        steps = found.policy.step_logprob(found.out.aux, old.params)
        torch.testing.assert_close(steps, laws[0].log_prob(drawn).sum(2), rtol=0, atol=1e-9)
    divergence = found.policy.kl(old.params, new.params)
    torch.testing.assert_close(divergence, kl_divergence(*laws).flatten(1).sum(1), rtol=0, atol=1e-9)
    assert found.policy.kl(old.params, old.params).abs().max() <= 1e-12 and divergence.min() > 1e-6


@EVERY
def test_a_decision_does_not_depend_on_its_neighbours(name):
    """From pictures to densities: two decisions alone, in another order, equal themselves among sixteen."""
    policy = recorded(name).policy
    obs, chosen = observed(policy.spec), np.array([3, 1])
    features, state = encoded(policy, obs, torch.float64)
    out, _ = policy.act(features, state, "sample", [seeded(i) for i in range(BATCH)])
    few, state = encoded(policy, obs.select(chosen), torch.float64)
    alone, _ = policy.act(few, state, "sample", [seeded(int(i)) for i in chosen])
    for key, item in few.items():
        torch.testing.assert_close(item, features[key][chosen], rtol=1e-5, atol=1e-6)  # encoders compute in float32
    torch.testing.assert_close(alone.action, out.action[chosen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone.logprob, out.logprob[chosen], rtol=1e-4, atol=1e-4)


ONE_OF_EACH = (
    "gaussian per action",
    "categorical with unequal counts",
    "flow FlowOu OneRandomStep",
    "diffusion ddim, last two",
    "diffusion ddpm, last ten",
    "latent noise",
    "advantage-conditioned flow",
    "residual",
    *(name for name in FAMILIES if name.startswith(("toy", "SmolVLA", "pi0")) and "LastStepFromNoise" in name),
    "toy with pictures, FlowNoise(std_min=0.08, std_max=0.16) AllSteps()",
    "OpenVLA in turn",
    "OpenVLA at once",
    "OpenVLA's L1 head",
    "OpenVLA's diffusion head",
)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_checkpoint_decides_the_same_in_its_environment_alone(name, tmp_path):
    policy = FAMILIES[name].make()
    policy.save_pretrained(tmp_path / "saved")
    restored = load_policy(tmp_path / "saved", policy.spec)
    assert type(restored) is type(policy) and restored.config == policy.config and restored.spec == policy.spec
    for mode in ("eval", "sample"):
        given = ((each, *encoded(each, observed(policy.spec), torch.float32)) for each in (policy, restored))
        one, two = (each.act(features, state, mode, seeded(1))[0] for each, features, state in given)
        assert torch.equal(one.action, two.action) and torch.equal(one.logprob, two.logprob)
    with pytest.raises(ContractError, match="control_dt"):
        load_policy(tmp_path / "saved", replace(policy.spec, control_dt=0.23))


# -- what is sampled --------------------------------------------------------------------------------------------------


def is_zero(values: Tensor) -> bool:
    """Whether the mean is 0, to within 4.5 standard errors."""
    return bool(values.mean().abs() <= 4.5 * values.std() / math.sqrt(len(values)))


@EVERY
def test_samples_have_the_density_that_is_declared(name):
    """The mean log-prob is minus the entropy, and the mean ratio to any other policy is 1."""
    found = recorded(name, many=True)
    with torch.no_grad():
        old = found.log_prob()
        new = found.log_prob(policy=moved(found, 0.5))
    assert is_zero(joint(old.logprob) + old.entropy)
    log_ratio = joint(new.logprob - old.logprob)
    assert log_ratio.std() > 0.2 and is_zero(log_ratio.exp() - 1)


@EXACT
def test_reweighting_gives_the_new_policys_expectation(name):
    """Hence the score gradient is the true one: it is the limit for a small change of the weights."""
    found = recorded(name, many=True)
    policy = moved(found, 0.7)
    state = policy.reset_state(policy.initial_state(len(found.out.sample)), np.arange(len(found.out.sample)))
    fresh = type(found)(policy, found.features, policy.act(found.features, state, "sample", seeded(2))[0])

    def log_ratio(decisions) -> Tensor:
        return joint(decisions.log_prob(policy=policy).logprob - decisions.log_prob(policy=found.policy).logprob)

    with torch.no_grad():
        before, after = log_ratio(found), log_ratio(fresh)
    reweighted, expected = before.exp() * before.tanh(), after.tanh()
    assert not is_zero(after.tanh() - before.tanh()), "the new policy does not differ enough to show anything"
    assert is_zero(reweighted - expected)


@pytest.mark.parametrize("logprob_per", PARTS)
def test_the_score_gradient_of_tokens_is_the_true_one(logprob_per):
    """By enumeration of all chunks: cosine at least .999, norm within 2 %."""
    policy = token_policy(logprob_per, 0.5).double()
    chunks = torch.tensor(list(itertools.product(range(CHOICES), repeat=HORIZON * ENTRIES)))
    features = {"state": torch.full((len(chunks), 1), 0.4, dtype=torch.float64)}
    reward = torch.sigmoid(chunks.double() @ torch.linspace(-1, 1, HORIZON * ENTRIES, dtype=torch.float64))
    logprob = joint(policy.log_prob(features, chunks.unflatten(1, (HORIZON, ENTRIES)), {}).logprob)
    assert logprob.exp().sum().item() == pytest.approx(1)
    weights = list(policy.parameters())
    score = torch.autograd.grad((logprob.detach().exp() * reward * logprob).sum(), weights)
    logits = policy.outputs(features).unflatten(-1, (-1, CHOICES))
    chance = logits.softmax(-1).gather(2, chunks[..., None]).squeeze(-1).prod(1)
    true = torch.autograd.grad((chance * reward).sum(), weights)
    one, other = (torch.cat([item.flatten() for item in part]) for part in (score, true))
    assert one @ other / (one.norm() * other.norm()) >= 0.999 and 0.98 <= one.norm() / other.norm() <= 1.02


def test_the_sample_is_the_end_of_the_chain():
    env = make("counting", num_envs=3)
    torch.manual_seed(0)
    config = TinyConfig(horizon=2, width=32, blocks=1, sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4))
    policy = TinyVLA(env.spec, Vocabulary.from_texts(env.spec.tasks), Affine.from_bounds(env.spec.state), config)
    features = policy.encode(env.reset([0, 1, 2], [1, 2, 3]))
    out, _ = policy.act(features, {}, "sample", torch.Generator().manual_seed(0))
    assert torch.equal(out.sample.flatten(1), out.aux["points"][:, -1])
    assert not torch.equal(out.aux["points"][:, 0], out.aux["points"][:, -1])


REAL = replace(SPEC, action=ArraySpec((ENTRIES,), "float32", -1.0, 1.0))
FEATURES = {"state": torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]}
SHAPES = {"chunk": (), "action": (HORIZON,), "token": (HORIZON * ENTRIES,)}
EACH = pytest.mark.parametrize("logprob_per", PARTS)


def gaussian(logprob_per) -> GaussianPolicy:
    torch.manual_seed(0)
    policy = GaussianPolicy(REAL, config=GaussianConfig(HORIZON, 16, 1, logprob_per=logprob_per))
    torch.nn.init.normal_(policy.last.weight, std=0.5)
    return policy


def terms_likelihood_parts(policy, sample) -> torch.Tensor:
    """Torch's log-probs of every entry, [B,H*D]."""
    if isinstance(policy, GaussianPolicy):
        return Normal(policy.mean(FEATURES), policy.log_std.exp()).log_prob(sample.flatten(1))
    logits = policy.outputs(FEATURES).unflatten(-1, (-1, CHOICES))
    return Categorical(logits=logits).log_prob(sample.flatten(1))


@EACH
@pytest.mark.parametrize("made", [gaussian, lambda per: token_policy(per, 0.5)], ids=["gaussian", "categorical"])
def test_parts_are_those_of_torch_and_sum_to_the_chunk(made, logprob_per):
    policy = made(logprob_per).double()
    out, _ = policy.act(FEATURES, {}, "sample", seeded(1))
    found = policy.log_prob(FEATURES, out.sample, {})
    assert out.logprob.shape == (8, *SHAPES[logprob_per]) and torch.equal(out.logprob, found.logprob)
    expected = terms_likelihood_parts(policy, out.sample)
    per_part = expected.reshape(8, PARTS[logprob_per], -1).sum(-1).reshape(found.logprob.shape)
    torch.testing.assert_close(found.logprob, per_part, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.logprob.reshape(8, -1).sum(1), expected.sum(1), rtol=0, atol=1e-12)
    assert found.entropy.shape == policy.kl(found.params, found.params).shape == (8,)
    deployed, _ = policy.act(FEATURES, {}, "eval", None)
    assert deployed.logprob.shape == out.logprob.shape and not deployed.logprob.any()
