"""What the families share: where a base model comes from, its pipeline, prompts, noise and losses."""
