"""What members' contributions do to the loss, measured by a peer that assists: numbers for people, never a ban."""
