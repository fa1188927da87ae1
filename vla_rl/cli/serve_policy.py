"""``vla-rl serve-policy CHECKPOINT|RUN [--port 8000] ...``"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.contract.load import load
from vla_rl.policies.pretrained import default_options, load_policy
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.context import placed
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.progress import console
from vla_rl.recipes.saved import checkpoint_of
from vla_rl.recipes.signals import sigterm_like_ctrl_c
from vla_rl.serving.episode import ServedPolicy
from vla_rl.serving.server import PolicyServer, log
from vla_rl.serving.vla_eval import read_observation
from vla_rl.serving.websocket import Limits
from vla_rl.training.device import resolve_device


@dataclass(frozen=True)
class ServePolicy:
    """Serve a policy to the benchmarks of the vla-eval harness on this machine, until Ctrl-C.

    Of a run, its checkpoint "best" is served.  A downloaded folder belongs to no environment: --env names the one
    whose cameras, state, action and instructions the benchmark has.
    """

    protocol: Literal["vla-eval"] = "vla-eval"
    port: int = 8000  # of 127.0.0.1; 0: any that is free
    layout: str = ""  # "module:function" from the harness's observation to a SingleObservation; "": the usual keys
    seed: int = 1  # of the flow's starting noise
    device: str = "cpu"  # where the policy computes: "cpu", "cuda", "cuda:1", "auto"
    max_connections: int = 256  # benchmarks that ask at the same time
    limits: Limits = Limits()
    env: EnvConfig = NO_ENV  # what a downloaded folder is opened for; a checkpoint of ours knows its own
    vla: VLAOptions = VLAOptions()  # how a downloaded folder is opened; a checkpoint of ours has its own

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        check_limits(self, port=(0, 65535), max_connections=(1, 4096))


def serve_policy(arguments: Sequence[str]) -> None:
    """Load, listen, answer."""
    given = list(arguments)
    if given in (["-h"], ["--help"]):
        override(ServePolicy(), given, "vla-rl serve-policy CHECKPOINT")
    if not given or given[0].startswith("-"):
        raise UserError("serve-policy needs a checkpoint or run folder, for example vla-rl serve-policy runs/demo.")
    checkpoint = checkpoint_of(given[0])
    default = ServePolicy(vla=default_options(checkpoint))
    config: ServePolicy = override(default, given[1:], "vla-rl serve-policy CHECKPOINT")
    spec = config.env.spec() if config.env.name else None
    policy = placed(load_policy(checkpoint, spec, config.vla), resolve_device(config.device))
    served = ServedPolicy(policy, config.seed)
    layout = load(config.layout) if config.layout else read_observation
    _print_log()
    with (
        sigterm_like_ctrl_c(),
        PolicyServer(served, config.port, layout, config.limits, config.max_connections) as server,
    ):
        console.print(f"{checkpoint} is served to vla-eval at {server.url}  (Ctrl-C ends it)")
        port = server.server_address[1]
        console.print(
            f"  from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then the same address there"
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped serving.") from stop


def _print_log() -> None:
    """Who comes, leaves and is refused, on standard error."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
