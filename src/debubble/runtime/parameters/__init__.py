"""Parameters and optimizers of a rank's stages, and steps that post-validation takes back."""
