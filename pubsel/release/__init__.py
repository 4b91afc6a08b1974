"""Everything that leaves the house with a model: weights, measured quality, and what is promised of both."""
