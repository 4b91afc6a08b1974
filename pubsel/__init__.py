"""pubsel: choose and use public data for differentially private machine learning."""

__version__ = "0.1.0"
