"""Parameters and optimizers of a rank's stages, and optimizer steps that can be rolled back."""
