"""What a volunteer asks before, orders meanwhile, and deletes afterwards."""
