"""Distances between a private and a public dataset; one file per paper."""
