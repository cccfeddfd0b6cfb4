"""What keeps a trainer alive: processes of one life, signs of life, what to do after an end, one log. Needs no torch."""
