"""The one loop that spends the privacy, on one process or several, and the memory it needs. Imports nothing itself."""
