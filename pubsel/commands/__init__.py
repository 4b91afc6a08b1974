"""Sub-commands, one file each: from settings to a record, and the record as text."""
