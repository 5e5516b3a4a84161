"""Folders of weights and adapters of Hugging Face's form, read and written."""
