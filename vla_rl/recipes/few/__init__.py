"""A hundred real episodes: what a residual gains from them, and what a model beside it could gain at most."""
