"""From a sample of the source to what the denoiser is trained on."""
