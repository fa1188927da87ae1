"""``vla-rl serve-policy CHECKPOINT|RUN [--protocol openpi] [--port 8000] ...``"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vla_rl.cli.override import override, positional
from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import located
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.contract.wire import is_loopback
from vla_rl.policies.pretrained import default_options, load_policy
from vla_rl.policies.real_time_chunking import in_real_time
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.terminal import console, print_log, say_the_way, sigterm_like_ctrl_c
from vla_rl.recipes.trainers import placed
from vla_rl.serving.access import Access, find_api_key
from vla_rl.serving.openpi import OpenpiServer
from vla_rl.serving.served import Batching, ServedPolicy, SessionPolicy
from vla_rl.serving.vla_eval import PolicyServer, read_observation
from vla_rl.serving.websocket import Limits, Listener, log
from vla_rl.training.device import resolve_device


@dataclass(frozen=True)
class ServePolicy:
    """Serve a policy to benchmarks of the vla-eval harness or to openpi's clients, until Ctrl-C.

    Of a run, its checkpoint "best" is served.  A downloaded folder belongs to no environment: --env names the one
    whose cameras, state, action and instructions the clients have.  Another --host than 127.0.0.1 needs a certificate
    and an API key, of a file or the environment variable VLA_RL_API_KEY.
    """

    protocol: Literal["vla-eval", "openpi"] = "vla-eval"
    port: int = 8000  # 0: any that is free
    host: str = "127.0.0.1"  # the address to listen on
    tls_cert: str = ""  # PEM file of the server's certificate
    tls_key: str = ""  # PEM file of its private key
    api_key_file: str = ""  # holds what clients have to know
    layout: str = ""  # "module:function" from a client's observation to a SingleObservation; "": the usual keys
    seed: int = 1  # of the flow's starting noise
    real_time: Literal["", "identity", "vjp"] = ""  # chunks of openpi's clients continue the prefix that a request has
    device: str = "cpu"  # where the policy computes: "cpu", "cuda", "cuda:1", "auto"
    max_connections: int = 256  # clients that ask at the same time
    batch: Batching = Batching()  # of openpi's clients; the harness's episodes are decided one by one
    limits: Limits = Limits()
    env: EnvConfig = NO_ENV  # what a downloaded folder is opened for; a checkpoint of ours knows its own
    vla: VLAOptions = VLAOptions()  # how a downloaded folder is opened; a checkpoint of ours has its own

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning, and for what the protocol has not."""
        check_limits(self, port=(0, 65535), max_connections=(1, 4096))
        if self.protocol == "vla-eval" and self.batch != Batching():
            raise UserError(
                "--batch is for --protocol openpi; the harness's episodes are decided one by one, so it would change "
                "nothing; leave it out."
            )
        if self.protocol == "vla-eval" and self.real_time:
            raise UserError(
                "--real-time is for --protocol openpi; the harness stands still while the policy computes, so it would "
                "change nothing; leave it out."
            )


def serve_policy(arguments: Sequence[str]) -> None:
    """Load, listen, answer."""
    (named,), rest = positional(arguments, "serve-policy CHECKPOINT", ServePolicy(), "runs/demo")
    checkpoint = checkpoint_of(located(named))
    default = ServePolicy(vla=default_options(checkpoint))
    config: ServePolicy = override(default, rest, "vla-rl serve-policy CHECKPOINT")
    access = Access(config.host, config.tls_cert, config.tls_key, find_api_key(config.api_key_file))
    spec = config.env.spec() if config.env.name else None
    policy = placed(load_policy(checkpoint, spec, config.vla), resolve_device(config.device))
    with sigterm_like_ctrl_c(), PROTOCOLS[config.protocol](config, policy, access) as server:
        print_log(log)
        console.print(f"{checkpoint} is served by the protocol {config.protocol} at {server.url}  (Ctrl-C ends it)")
        if is_loopback(config.host):
            say_the_way(server.server_address[1])
        try:
            server.serve_forever()
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped serving.") from stop


def _vla_eval(config: ServePolicy, policy: Policy, access: Access) -> Listener:
    served, layout = ServedPolicy(policy, config.seed), load(config.layout) if config.layout else read_observation
    return PolicyServer(served, config.port, layout, config.limits, config.max_connections, access)


def _openpi(config: ServePolicy, policy: Policy, access: Access) -> Listener:
    policy = in_real_time(policy, config.real_time, "the policy")
    served, layout = SessionPolicy(policy, config.seed), load(config.layout) if config.layout else None
    return OpenpiServer(served, config.port, layout, config.limits, config.max_connections, access, config.batch)


PROTOCOLS: dict[str, Callable[[ServePolicy, Policy, Access], Listener]] = {"vla-eval": _vla_eval, "openpi": _openpi}
