"""``python -m vla_rl.cli.owned ...`` is ``vla-rl ...`` for a program that holds the other end of its standard input.

The command ends with that program, at once and however the program ended, so it never writes to a folder in which
another has gone on.
"""

from vla_rl.contract.child import end_with_owner

if __name__ == "__main__":
    end_with_owner()  # before the seconds that imports take
    from vla_rl.cli.main import main

    main()
