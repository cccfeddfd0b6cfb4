"""What a peer keeps and leaves: checkpoints, its output folder, results in every form."""
