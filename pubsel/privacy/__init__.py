"""What a release costs: the accountant, the secret streams, and the ledger of a person's releases."""
