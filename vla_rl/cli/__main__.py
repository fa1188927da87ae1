"""``python -m vla_rl.cli`` is ``vla-rl``."""

from vla_rl.cli.main import main

main()
