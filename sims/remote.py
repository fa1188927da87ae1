"""An environment on another machine, served there by ``vla-rl sims serve``: it may crash without ending the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sims.isolated import supervise
from sims.isolation.env import IsolatedEnv
from sims.isolation.remote import RemoteStart
from sims.isolation.security import Security
from sims.isolation.supervised import Deadlines
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task


@declare_task(expert="sims.isolation.expert:ExpertInWorker")
def make(
    num_envs: int,
    address: str = "",
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    expert: bool = False,
    key: str = "",
    certificate: str = "",
    deadline_s: float = 120.0,
    start_deadline_s: float = 900.0,
    reconnect_s: float = 60.0,
) -> IsolatedEnv:
    """``num_envs`` environments that the machine at ``address`` ("host:port") serves.

    options           of the served environment, as JSON
    workers           processes there; each has its share of the environments, at most one process for each
    expert            as for ``sims/isolated.py``
    key, certificate  files: the secret that the server knows too, and the certificate it has to show; without them
                      only this machine is connected to
    deadline_s        for a reset, step or snapshot of one worker's share
    start_deadline_s  to connect and to make the environment
    reconnect_s       how long a server that was there is waited for

    Raises UserError when nobody answers there or the environment cannot be made.
    """
    if not address:
        raise UserError(
            "no address was given, so no environment is reached; start vla-rl sims serve NAME on the simulator's "
            "machine and give its address as host:port."
        )
    start = RemoteStart(address, Security(key, certificate), reconnect_s)
    request = {"env": "remote", "options": dict(options or {}), "expert": expert}
    return supervise(start, num_envs, workers, request, Deadlines(deadline_s, start_deadline_s))
