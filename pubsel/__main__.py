"""`python -m pubsel`."""

from pubsel.cli import entry

entry()
