"""Reading and writing of Hugging Face checkpoints and peft adapters."""
