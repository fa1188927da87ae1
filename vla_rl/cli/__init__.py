"""The command line, ``vla-rl COMMAND ...``: it parses, calls recipes and prints."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence

from vla_rl.contract.errors import Terminated, UserError, cause_of, did_you_mean, printable
from vla_rl.contract.load import check_packages, load
from vla_rl.contract.trust import OPTION, trust_all

_TRACEBACK = "VLA_RL_TRACEBACK"  # in the environment: an error that nobody has foreseen shows all of its traceback
COMMANDS = {
    "demo": ("vla_rl.cli.train:demo", "from nothing to a policy that RL has made good, and a page about it"),
    "collect": ("vla_rl.cli.train:collect", "record demonstrations of the scripted expert"),
    "train": ("vla_rl.cli.train:train", "run a config: vla-rl train FILE.py:function [--field value]"),
    "eval": ("vla_rl.cli.eval:evaluate", "play a checkpoint on held-out seeds"),
    "imagine": ("vla_rl.cli.imagine:imagine", "RL in a learned world model, and a page about it"),
    "compare": ("vla_rl.cli.train:compare", "methods that improve the same policies, side by side on several seeds"),
    "sims": ("vla_rl.cli.inspect:sims", "simulators in virtual environments of their own: which, and install NAME"),
    "policies": ("vla_rl.cli.inspect:policies", "libraries of policies, LeRobot's, in environments of their own"),
    "serve-policy": (
        "vla_rl.cli.serve_policy:serve_policy",
        "serve a checkpoint to the vla-eval harness or openpi clients",
    ),
    "push": ("vla_rl.cli.push:push", "send a run's policy, or a dataset, to the Hugging Face hub, with its card"),
    "robot": ("vla_rl.cli.robot:robot", "an arm on your desk: set up, check, record, let a policy drive"),
    "fleet": ("vla_rl.cli.fleet:fleet", "a fleet's policies and data; simulate what one would learn"),
    "serve": ("vla_rl.cli.fleet:serve", "the server of a fleet: stores what its robots do, and shows it on a page"),
    "certs": ("vla_rl.cli.fleet:certs", "certificates of a fleet: make an authority, add robots, revoke them"),
    "inspect": ("vla_rl.cli.inspect:main", "what is installed and works; an environment, checkpoint, config or run"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command.

    A user's mistake ends with one sentence and status 2, what nobody has foreseen with one and status 1, Ctrl-C with
    status 130.

    Whose output nobody reads any more, as with ``| head``, ends silently.
    """
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt as stop:  # while it was said how the command had ended
        sys.exit(_complain("stopped.", _status(stop)))


def _run(given: list[str]) -> None:
    if OPTION in given:
        given = [item for item in given if item != OPTION]
        trust_all()
    choose_threads()
    try:
        if not given or given[0] in ("-h", "--help", "help"):
            return print(usage(), flush=True)
        if given[0] not in COMMANDS:
            raise UserError(f"vla-rl has no command {given[0]!r}; {did_you_mean(given[0], COMMANDS)}")
        check_packages()
        load(COMMANDS[given[0]][0])(given[1:])
        sys.stdout.flush()
    except UserError as error:
        sys.exit(_complain(str(error), 2))
    except ModuleNotFoundError as error:
        sys.exit(_complain(f"{error}, so {given[0]!r} cannot run; {_cure(error.name or '')}", 2))
    except Exception as error:
        if isinstance(error, RuntimeError) and "MUJOCO_GL" in str(error):
            sys.exit(_complain(f"MuJoCo cannot be loaded ({error}); unset MUJOCO_GL, or set it to egl or osmesa.", 2))
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            sys.exit(141)  # 128 + SIGPIPE, as other programs end
        if _TRACEBACK in os.environ:
            raise
        sys.exit(_complain(_unexpected(error), 1))
    except KeyboardInterrupt as stop:
        sys.exit(_complain(str(stop) or "stopped before anything was saved.", _status(stop)))


def _status(stop: KeyboardInterrupt) -> int:
    return 143 if isinstance(stop, Terminated) else 130  # 128 + the signal's number, as shells have it


def _nobody_reads() -> bool:
    """Whether standard output is what is broken; if so, what is left for it goes nowhere."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    broken = any(event & select.POLLERR for _, event in poll.poll(0))
    if broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return broken


def choose_threads() -> None:
    """One thread for torch beside simulators, where more slow small networks down; all cores for a stage that is alone.

    With OMP_NUM_THREADS, that number everywhere.  It must be called before torch is imported.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.setdefault("VLA_RL_THREADS", str(len(os.sched_getaffinity(0))))


def usage() -> str:
    """What ``vla-rl`` prints without a command."""
    lines = [f"  {name:<12} {what}" for name, (_, what) in COMMANDS.items()]
    trust = f"\n\n{OPTION}, with any of them: obey the folders of others as your own; they can then run anything here."
    return "vla-rl COMMAND [arguments]    (vla-rl COMMAND --help)\n\n" + "\n".join(lines) + trust


def _cure(module: str) -> str:
    ours = ("torch", "safetensors", "mujoco", "gymnasium", "av", "PIL", "jinja2", "websockets", "tensorboard", "wandb")
    known = module.partition(".")[0] in ours
    return "pip install 'vla-rl[all]'." if known else "check its name, or install it where Python finds it."


def _unexpected(error: Exception) -> str:
    """The sentence about an error that nobody has foreseen: of the user's code, of the machine, or of ours."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename!r} cannot be used ({error.strerror}), so the command stopped; check that path."
    return f"{cause_of(error)}, so the command stopped; {_TRACEBACK}=1 before it shows the way there."


def _complain(sentence: str, status: int) -> int:
    print(f"vla-rl: {printable(sentence)}", file=sys.stderr)
    return status
