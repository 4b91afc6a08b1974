"""What an attacker learns of private examples: one file an attack."""
