"""The training loop and what it steps: optimizer, schedule, averages, accounts."""
