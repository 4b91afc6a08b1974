"""Attacks on what pubsel releases: what an adversary finds, beside what is claimed."""
