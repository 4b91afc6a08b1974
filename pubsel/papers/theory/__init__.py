"""Explanations of results, which are no part of a run."""
