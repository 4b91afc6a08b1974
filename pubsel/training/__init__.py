"""The one loop that spends the privacy, on one process or several, and what it will take. Imports nothing itself."""
