"""Configs of algorithms refuse numbers that have no meaning, in one sentence that names the field."""

from __future__ import annotations

import math

import pytest

from vla_rl.algorithms.chunks import HGDaggerConfig
from vla_rl.algorithms.dppo import DPPOConfig
from vla_rl.algorithms.dsrl import NoiseAliasedConfig
from vla_rl.algorithms.gorl import GoRLConfig, RefitConfig
from vla_rl.algorithms.group_relative import Constant, GRPOConfig, RLOOConfig
from vla_rl.algorithms.offline import CalQLConfig, IQLConfig, WSRLConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.recap import RecapConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.sac import RLPDConfig, SACConfig
from vla_rl.contract.errors import UserError

ON_POLICY = {"epochs": 0, "minibatch": 0, "lr": 0.0, "target_kl": 0.0, "stop_kl": -1.0, "grad_norm": 0.0, "max_age": -1}
ON_POLICY |= {"micro_batch": -1, "max_logprob_gap": math.nan, "lr_bounds": (1.0, 0.1)}
PPO = {"gamma": 1.5, "lam": -0.1, "clip_low": 0.0, "clip_high": -1.0, "critic_lr": 0.0, "critic_warmup": -1}
OFF_POLICY = {"batch": 0, "utd_ratio": 0.0, "policy_delay": 0, "num_critics": 0, "num_min_q": 11, "tau": 0.0}
OFF_POLICY |= {"lr": -1.0, "critic_lr": math.nan, "learning_starts": -1, "value_bounds": (1.0, 0.0)}
OFF_POLICY |= {"offline_steps": -3}
RECAP = dict.fromkeys(("lookahead", "capacity", "value_steps", "steps", "batch", "draws", "lr"), 0)
RECAP |= dict.fromkeys(("failure_cost", "max_age", "weight_decay", "value_lr", "grad_norm"), -1.0)
CASES: dict[type, dict[str, object]] = {
    PPOConfig: ON_POLICY | PPO,
    DPPOConfig: {**PPO, "gamma_denoise": 1.1, "clip_first": 0.0, "clip_rate": 0.0},
    GRPOConfig: {**ON_POLICY, "clip_low": 1.5, "clip_high": 0.0},
    RLOOConfig: {"epochs": 0},
    GoRLConfig: {"gamma": 1.5, "prior": -1.0},
    RefitConfig: {"lr": 0.0},
    Constant: {"max_decisions": 0},
    HGDaggerConfig: {name: 0 for name in ("steps", "batch", "draws", "capacity", "lr", "grad_norm")} | {"alpha": -1.0},
    RecapConfig: {**RECAP, "positive": 1.1, "dropout": -0.1},
    ResidualTD3Config: {**OFF_POLICY, "penalty": -0.1},
    SACConfig: {"tau": 1.1, "temperature": 0.0},
    RLPDConfig: {"tau": 1.1},
    WSRLConfig: {"tau": 1.1},
    CalQLConfig: {"actions": 0, "conservatism": -1.0},
    IQLConfig: {"tau": 1.1, "expectile": 0.0, "beta": -1.0, "weight_limit": 0.0},
    NoiseAliasedConfig: {"distillations": -1},
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_number_without_a_meaning_is_refused_in_one_sentence(kind):
    for name, value in CASES[kind].items():
        with pytest.raises(UserError, match=rf"^{kind.__name__}\.{name} is .*(choose|give)") as caught:
            kind(**{name: value})
        assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")


def test_the_bounds_themselves_are_allowed():
    PPOConfig(gamma=1.0, lam=0.0, clip_low=1.0, critic_warmup=0, max_age=0, max_logprob_gap=math.inf, stop_kl=math.inf)
    SACConfig(num_min_q=2, tau=1.0, learning_starts=0, utd_ratio=1e-3)
