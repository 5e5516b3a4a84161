"""What a rank keeps of a stage: parameters, optimizers, and steps that post-validation takes back."""
