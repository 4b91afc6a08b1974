"""What explains a result, and is no part of a run."""
