"""Megatron-LM and Megatron Bridge: what it can run, its files written and read."""
