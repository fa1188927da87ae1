"""The faults, by what they break.  One that a reader would call tempting is worth more than a silly one."""

from __future__ import annotations

from tests.mutants import (
    faults_agreement,
    faults_backbones,
    faults_dppo,
    faults_dreams,
    faults_experience,
    faults_grpo,
    faults_gym,
    faults_judges,
    faults_latent,
    faults_learning,
    faults_lerobot,
    faults_packaging,
    faults_policies,
    faults_ppo,
    faults_replay,
    faults_residual,
    faults_resume,
    faults_rewards,
    faults_sac,
    faults_tabletop,
    faults_training,
    faults_worlds,
)
from tests.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *faults_learning.FAULTS,
    *faults_ppo.FAULTS,
    *faults_dppo.FAULTS,
    *faults_dreams.FAULTS,
    *faults_grpo.FAULTS,
    *faults_latent.FAULTS,
    *faults_resume.FAULTS,
    *faults_policies.FAULTS,
    *faults_experience.FAULTS,
    *faults_lerobot.FAULTS,
    *faults_training.FAULTS,
    *faults_tabletop.FAULTS,
    *faults_worlds.FAULTS,
    *faults_backbones.FAULTS,
    *faults_agreement.FAULTS,
    *faults_packaging.FAULTS,
    *faults_rewards.FAULTS,
    *faults_judges.FAULTS,
    *faults_replay.FAULTS,
    *faults_residual.FAULTS,
    *faults_gym.FAULTS,
    *faults_sac.FAULTS,
)
