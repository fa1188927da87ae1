"""What a config returns and how it runs: frozen dataclasses that build policy, source and learner, train and report."""
