"""Records joined with the numbers of the papers, as tables and figures. Imports no torch."""
