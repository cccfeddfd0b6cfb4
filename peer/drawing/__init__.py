"""What a peer that assists draws: each final state, or every Nth, by a process of its own (docs/decisions/0009)."""
