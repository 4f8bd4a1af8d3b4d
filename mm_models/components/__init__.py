"""Torch modules and functions that both targets are made of.

A component knows neither TransformerConfig, Hugging Face configuration nor parallel_state: it takes plain keyword arguments,
tensors with tokens in front and the feature last, and a process group where it communicates. Those with parameters keep
Hugging Face's names and shapes. Each reproduces Hugging Face's arithmetic bit by bit on CPU; where the order of operations
matters, a comment says so and tests/components shows it.
"""
